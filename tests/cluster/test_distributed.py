"""Several processes for real, over gloo: the same result as one, little traffic, and a prompt end when one fails."""

import os
import signal
import sys
import time

import pytest
import small_runs
import torch
from processes import ROOT, processes_with, run_to_end, torchrun, wait_for, wait_until
from worker_distributed import VARIANTS

from util.cli import Interrupted, UserError
from util.misc import own_gpu

SMALL = (*small_runs.SMALL, "--shapes_images", 240, "--batch_size", 8, "--epochs", 50, "--num_workers", 1)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """What 1, 2 and 4 processes make of the same global batches: one dictionary for each process."""
    folder, made = tmp_path_factory.mktemp("worlds"), {}
    worker = ROOT / "tests" / "cluster" / "worker_distributed.py"
    for size in (1, 2, 4):
        command = [sys.executable, str(worker)] if size == 1 else torchrun(size, worker)
        output = folder / f"{size}.pth"
        done = run_to_end([*command, output])
        assert done.returncode == 0, done.stderr
        made[size] = [torch.load(f"{output}.{rank}") for rank in range(size)]
    return made


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_do_not_depend_on_the_number_of_processes(worlds, variant, size):
    one = worlds[1][0][variant]
    assert len(one["losses"]) == 4
    for rank in range(size):
        many = worlds[size][rank][variant]
        for expected, found in zip(one["losses"], many["losses"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert many["losses"][-1].keys() >= {"mask/distinct", "mask/hamming"}
        for part in ("gradients", "gradients_cmm"):
            for expected, found in zip(one[part], many[part], strict=True):
                assert expected.abs().max() > 1e-3
                assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)
    first, second = (worlds[size][rank][variant] for rank in (0, 1))
    if "threshold" in variant:
        assert first["removed"] != second["removed"], "else a mean of means would pass, too"
    for part in ("gradients", "gradients_cmm"):
        assert all(torch.equal(a, b) for a, b in zip(first[part], second[part], strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_travel_once_per_update_and_only_those_of_the_step(worlds, variant):
    """In buckets of gradients: up to two for the MAE, one for the CMM. Of four iterations, accumulation skips two."""
    found = worlds[2][0][variant]
    expected = [1, 1, 1, 1] if "accum_iter 1" in variant else [0, 1, 0, 1]
    assert [min(count, 1) for count in found["exchanges"]] == expected
    of_cmm = {"random": [], "cheaper": expected[::2]}.get(variant.split(",")[0], expected)
    assert found["exchanges_cmm"] == of_cmm, "step 2 moves no gradient of the MAE"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_step_exchanges_beside_gradients(worlds, variant):
    """One gather for the module, one reduction for the log, and nothing between the MAE's forward and backward pass."""
    name = variant.split(",")[0]
    count = [] if name in ("random", "topk", "predictive") else ["all_reduce"]  # of removed patches, if it may vary
    soft = [] if name in ("random", "predictive") else ["forward"]
    module = [] if name == "random" else [*soft, "all_gather_into_tensor", "backward"]
    expected = []
    for step in range(4):
        expected += [*count, "forward", "backward", *(module if name != "cheaper" or step % 2 == 0 else [])]
        health = ["all_gather_into_tensor"] if step == 3 else []
        expected += [*health, "all_reduce", "logged"]
    assert all(process[variant]["events"] == expected for process in worlds[4])


def test_all_processes_hear_of_a_signal_in_the_same_step(worlds):
    for size in (2, 4):
        assert [process["stopping"] for process in worlds[size]] == [[False, False, True, True]] * size


def test_mean_gradients_do_not_depend_on_their_place_in_a_bucket(worlds):
    """DDP moves them after the first update, so that an exact resume needs this. An all-reduce of four fails here."""
    at_0, at_333 = worlds[4][0]["means"]
    assert torch.equal(at_0, at_333)
    expected = torch.stack([torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)])
    assert torch.allclose(at_0, expected.mean(dim=0), atol=1e-6)


def test_an_exception_on_one_process_ends_all_with_its_traceback(background, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os, main_pretrain\n"
        "original = main_pretrain.train_one_epoch\n"
        "def train_one_epoch(*args, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and args[4] == 1:\n"
        "        raise KeyError('the second process breaks')\n"
        "    return original(*args, **kwargs)\n"
        "main_pretrain.train_one_epoch = train_one_epoch\n"
        "main_pretrain.run(main_pretrain.main, main_pretrain.get_args_parser())\n"
    )
    process, said = background(torchrun(2, tmp_path / "broken.py", *SMALL))
    wait_for("epoch 1/50 done", said, process)
    assert process.wait(timeout=30) != 0
    text = said.read_text()
    assert "ERROR: process 1 failed:\nTraceback (most recent call last):" in text
    assert "KeyError: 'the second process breaks'" in text
    assert "process 0: another process is gone" in text
    assert not processes_with(str(tmp_path / "broken.py"))


def test_a_process_that_dies_is_reported_within_seconds(background, tmp_path):
    flags = (*SMALL, "--save_minutes", 0, "--output_dir", tmp_path / "out")
    process, said = background(torchrun(2, ROOT / "main_pretrain.py", *flags))
    wait_for("epoch 1/50 done", said, process)
    launcher, _, second, *_ = sorted(processes_with(str(tmp_path / "out")))
    assert launcher == process.pid
    os.kill(second, signal.SIGKILL)
    assert process.wait(timeout=30) != 0
    text = said.read_text()
    assert "Signal 9 (SIGKILL)" in text
    assert "another process is gone" in text
    assert (tmp_path / "out" / "checkpoint-last.pth").exists()


@pytest.mark.parametrize("moment", ["starting from the beginning", "epoch 1/50 done"])
def test_processes_whose_torchrun_is_gone_save_and_end(background, tmp_path, moment):
    """A new torchrun may be about to resume the run in the same folder."""
    flags = (*SMALL, "--resume", "auto", "--output_dir", tmp_path / "out")
    process, said = background(torchrun(2, ROOT / "main_pretrain.py", *flags))
    wait_for(moment, said, process)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_with(str(tmp_path / "out")), seconds=30)
    assert "stopped by the end of torchrun after step" in said.read_text()


def test_processes_that_wait_for_others_end_with_torchrun(background, tmp_path):
    (tmp_path / "three.py").write_text(
        "import os, main_knn\nos.environ['WORLD_SIZE'] = '3'\nmain_knn.run(main_knn.main, main_knn.get_args_parser())\n"
    )
    flags = ("--model", "vit_micro_patch4", *small_runs.DATA, "--output_dir", tmp_path / "out")
    process, said = background(torchrun(2, tmp_path / "three.py", *flags))
    wait_for("waiting for other processes: RANK 1 of WORLD_SIZE 3", said, process)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_with(str(tmp_path / "three.py")), seconds=30)
    assert said.read_text().count("torchrun is gone; rerun the same command to continue") == 2


def test_a_mistake_is_told_once_and_in_torchruns_summary(tmp_path):
    flags = ("--output_dir", tmp_path / "out", "--global_batch_size", 7)
    done = run_to_end(torchrun(2, ROOT / "main_pretrain.py", *SMALL, *flags))
    assert done.returncode != 0
    sentence = "--global_batch_size 7 cannot be split evenly into 2: 2 processes with --accum_iter 1"
    assert done.stderr.count(f"ERROR: {sentence}") == 1
    summary = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert sentence in summary, done.stderr
    assert "Traceback" not in summary
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_signal_saves_and_ends_with_a_code_of_its_own(background, tmp_path, launcher):
    """To the whole process group with its loaders, as schedulers do; torchrun hands it on itself."""
    program = (ROOT / "main_pretrain.py", *SMALL, "--output_dir", tmp_path / "out")
    command = [sys.executable, *map(str, program)] if launcher == "python" else torchrun(2, *program)
    process, said = background(command)
    wait_for("epoch 1/50 done", said, process)
    (os.killpg if launcher == "python" else os.kill)(process.pid, signal.SIGTERM)
    code = process.wait(timeout=30)
    assert code == (Interrupted.exit_code if launcher == "python" else 1), said.read_text()
    assert "WARNING: stopped by SIGTERM after step" in said.read_text()
    saved = torch.load(tmp_path / "out" / "checkpoint-last.pth", weights_only=True)
    assert f"after step {saved['step']}: saved as" in said.read_text()
    time.sleep(0.5)
    assert not processes_with(str(tmp_path / "out"))


def test_each_process_has_a_gpu_of_its_own():
    assert [own_gpu(rank, 8) for rank in range(8)] == list(range(8))
    assert [own_gpu(rank, 1) for rank in range(8)] == [0] * 8, "the scheduler shows each its own alone"
    with pytest.raises(UserError, match="process 2 of this node has no GPU: there are 2; start 2 processes"):
        own_gpu(2, 2)
