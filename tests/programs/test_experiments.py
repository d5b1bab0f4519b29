"""Recipes of the paper's tables and figures: what they run, and how they are run, skipped, resumed and shown."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, processes_with
from small_runs import checkpoint

from experiments import cluster, scale
from experiments import run as runner
from experiments.local import last_words, machine_slots, own_folder
from experiments.plan import expand, run_name
from experiments.recipe import load_recipe, recipe_names, recipe_text
from experiments.recipes import main_results
from util.cli import UserError
from util.evaluation.compare import mcnemar

TINY = (
    *("--pretrain", "--epochs", "2", "--shapes_images", "48", "--batch_size", "16"),
    *("--input_size", "16", "--cmm_depth", "1"),
)
# What the paper reports (nearest neighbour Acc@1, by the value that a table varies).
PAPER = {
    "lambda_gauss": {"1": 35.0, "2": 37.8, "5": 35.1, "10": 38.7, "20": 38.2},
    "lambda_kl": {"0.1": 36.5, "0.2": 37.8, "0.5": 38.2, "1": 39.5, "2": 39.3},
    "lambda_cl": {"0": 39.5, "-0.1": 41.4, "-0.15": 40.7, "-0.2": 38.1},
    "lambda_div": {"1": 41.4, "2": 42.1, "5": 40.6},
    "cmm_depth": {"4": 42.1, "5": 42.1, "6": 40.0},
}


def arguments(*flags):
    parsed = runner.get_args_parser().parse_args(list(map(str, flags)))
    runner.check_args(parsed)
    return parsed


@pytest.fixture
def tiny(monkeypatch):
    """The small scale with few images to evaluate on, and of the main results nearest neighbours alone."""
    small = scale.SCALES["small"]
    fewer = replace(small, image_flags=small.image_flags | {"shapes": "--shapes_images 160"})
    monkeypatch.setitem(scale.SCALES, "small", fewer)
    monkeypatch.setattr(main_results, "RECIPE", replace(main_results.RECIPE, evaluations=("knn",)))


@pytest.fixture
def call(program, tiny, tmp_path):
    """The runner on shapes, into a folder of this test."""

    def start(*flags, pretrain=()):
        where = ("--data_set", "shapes", "--output_dir", tmp_path / "out")
        return program(runner, *flags, *where, *TINY, *pretrain)

    return start


# --- What recipes say ---


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_tells_what_it_runs_costs_and_should_reach(name):
    text = recipe_text(name)
    for heading in ("Runs", "Paper", "Cost", "Command"):
        assert re.search(rf"^{heading} {{3,}}\S", text, re.MULTILINE), heading
    command = re.search(r"^Command +python -m experiments\.run (.*)", text, re.MULTILINE)[1]
    args = arguments(*command.split())
    assert args.recipes == [name]
    for run in expand(load_recipe(name), args):  # every program knows its flags
        for step in run.steps:
            assert step.args().output_dir.startswith("./output_dir/experiments/full/imagenet/".removeprefix("./"))


def test_every_recipe_is_in_the_overview():
    listed = re.findall(r"\(recipes/(\w+)\.py\)", (ROOT / "experiments" / "README.md").read_text())
    assert sorted(listed) == recipe_names()


@pytest.mark.parametrize("name", PAPER)
def test_ablations_have_the_papers_values_and_figures(name):
    variants = load_recipe(name).variants
    assert {variant.name.split()[-1]: variant.paper[0] for variant in variants} == PAPER[name]
    for variant in variants:
        assert f"{variant.name.split()[-1]}" in variant.flags.split()


def test_the_loss_ablation_adds_one_loss_after_the_other():
    runs = expand(load_recipe("losses"), arguments("losses", "--data_set", "shapes"))
    flags = [run.pretrain.args() for run in runs]
    on = [(a.lambda_gauss > 0, a.lambda_kl > 0, a.lambda_div > 0, not a.no_curriculum) for a in flags]
    assert flags[0].masking == "random"
    assert on[1:] == [(True,) + (False,) * 3, (True,) * 2 + (False,) * 2, (True,) * 3 + (False,), (True,) * 4]
    assert [run.variant.paper for run in runs[1:]] == [(38.7, 61.7), (39.5, 61.9), (40.8, 62.4), (42.1, 65.1)]


def test_recipes_share_runs():
    folders = {}
    for name in ("losses", "main_results", "schedule", "lambda_div", "cmm_depth", "masks_curriculum"):
        runs = expand(load_recipe(name), arguments(name, "--data_set", "shapes"))
        folders[name] = [run.folder for run in runs if run.folder.parent.name == "clmae"]
    assert all(len(found) == 1 and found == folders["losses"] for found in folders.values())


def test_a_run_is_named_by_what_it_changes():
    base = ["--model", "mae_vit_base", "--epochs", "8"]
    assert run_name(base, []) == "clmae"
    assert run_name(base, ["--masking", "random", "--epochs", "38"]) == "mae-epochs=38"
    assert run_name(base, ["--no_curriculum", "--lambda_kl", "0"]) == "clmae-no_curriculum-lambda_kl=0.0"
    assert run_name(base, ["--lambda_cl_end", "-0.1"]) == "clmae"  # the default


def test_equal_compute_is_clmaes_time_in_epochs_of_mae():
    for at, epochs in (("small", round(8 * 4.77)), ("full", round(400 * 3.09))):
        data = ["--data_path", "imagenet"] if at == "full" else ["--data_set", "shapes"]
        runs = expand(load_recipe("compute"), arguments("compute", "--scale", at, *data))
        assert [run.pretrain.args().epochs for run in runs][1] == epochs
        assert runs[1].pretrain.args().masking == "random"


def test_the_full_scale_has_three_sizes_and_five_downstream_sets():
    args = arguments("main_results", "--scale", "full", "--data_path", "in", "--downstream_path", "down")
    models = [run.pretrain.args().model for run in expand(load_recipe("main_results"), args)]
    assert models == [f"mae_vit_{size}" for size in ("base", "large", "huge") for _ in range(2)]
    run = expand(load_recipe("downstream"), args)[0]
    assert len({step.data for step in run.evaluations} - {"in"}) == 5
    assert all("down/" in step.args().data_path for step in run.evaluations if step.data != "in")


# --- Doing it on this machine ---


def results(folder: Path, protocol: str) -> list[dict]:
    lines = map(json.loads, (folder / "cls_token" / "results.jsonl").read_text().splitlines())
    return [line for line in lines if line["protocol"] == protocol]


def test_a_recipe_is_run_evaluated_and_shown(call, tmp_path):
    """Then a second call finds everything done, one run that fails stops no other, and other settings are refused."""
    flags = ("main_results", "--seeds", 0, 1, "--jobs", 2)
    code, out, err = call(*flags)
    assert code == 0, out + err
    folder = tmp_path / "out" / "small" / "shapes"
    runs = {name: [folder / name / f"seed{seed}" for seed in (0, 1)] for name in ("mae", "clmae")}
    table = (folder / "main_results-cls_token.md").read_text()
    for name, title in (("mae", "MAE"), ("clmae", "CL-MAE")):
        accuracies = [results(run, "knn")[0]["acc1"] for run in runs[name]]
        row = next(line for line in table.splitlines() if line.startswith(f"| {title} |"))
        assert f"| {statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} |" in row
    paper = next(line for line in table.splitlines() if line.startswith("| CL-MAE |"))
    assert paper.endswith("| 42.1 | 65.1 |")
    hits = [[np.load(run / "cls_token" / "knn-shapes-0.npz")["correct"][0] for run in runs[n]] for n in runs]
    p = max(mcnemar(own, base) for own, base in zip(hits[1], hits[0], strict=True))
    assert f" {p:.3f} |" in paper
    assert "Health of the masks" in table
    assert f"Commit {checkpoint(runs['mae'][0])['args']['commit']}" in table

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pth")}
    code, out, _ = call(*flags)
    assert code == 0
    assert " took " not in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pth")} == before

    for path in runs["mae"][1].glob("checkpoint-*.pth"):
        path.write_bytes(b"damaged")
    (runs["clmae"][0] / "cls_token" / "results.jsonl").unlink()
    code, out, _ = call("main_results", "--seeds", 0, 1, "--jobs", 1)
    assert code == 1
    assert re.search(r"failed: mae seed 1: .*damaged", out)
    assert re.search(r"MAE +[\d.]+ +[\d.]+ +1 of 2 ", out)
    assert len(results(runs["clmae"][0], "knn")) == 1

    code, _, err = call("main_results", pretrain=("--lambda_kl", 2))
    assert code == 2
    assert re.search(r"mae.seed0 was trained with other settings: --lambda_kl 1.0, now 2.0", err)


def test_a_dry_run_shows_commands_and_leaves_nothing(call, tmp_path):
    code, out, _ = call("losses", "--dry_run")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[1] for line in lines] == ["main_pretrain.py", "main_knn.py"] * 5
    assert "--no_curriculum --lambda_kl 0 --lambda_div 0" in lines[2]
    code, out, _ = call("losses", "--dry_run", "--cluster", "slurm", "--nodes", 2, "--ngpus", 4)
    assert out.splitlines()[0].startswith("python submitit_pretrain.py --nodes 2 --ngpus 4 ")
    assert out.splitlines()[1].startswith("python submitit_eval.py --task knn --nodes 1 --ngpus 4 ")
    assert not (tmp_path / "out").exists()
    code, out, _ = call("losses", "--table_only")
    assert code == 0
    assert re.search(r"MAE +- +- +0 of 1 ", out)
    assert "not finished: mae seed 0, " in out


def test_a_stopped_queue_leaves_no_process_and_goes_on(background, tmp_path):
    flags = ["--epochs", "3", "--shapes_images", "960", "--batch_size", "16", "--input_size", "16", "--cmm_depth", "1"]
    command = [sys.executable, "-m", "experiments.run", "masks_curriculum", "--data_set", "shapes"]
    command += ["--output_dir", str(tmp_path / "out"), "--pretrain", *flags]
    process, said = background(command)
    folder = tmp_path / "out" / "small" / "shapes" / "clmae" / "seed0"
    wait_until(lambda: "epoch 0 [" in read(folder / "main_pretrain.log"), process, said)

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "the same command goes on" in said.read_text()
    assert processes_with(str(tmp_path)) == []
    assert not (folder / "checkpoint-2.pth").exists()

    process, said = background(command)
    assert process.wait(300) == 0, said.read_text()
    assert "resuming from" in read(folder / "main_pretrain.log")
    assert checkpoint(folder, 2)["epoch"] == 2
    assert {path.name for path in (tmp_path / "out/small/shapes/masks_curriculum").iterdir()} == {
        *("curves.png", "diversity.png", "masks.png", "positions.png"),
    }


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_until(condition, process, said, timeout=120):
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.1)


def test_a_folder_is_locked_as_long_as_its_program_lives(tmp_path):
    """Even if the queue that started the program is gone."""
    with own_folder(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "100"], pass_fds=[lock])
    with own_folder(tmp_path) as again:
        assert again is None
    child.kill()
    child.wait()
    with own_folder(tmp_path) as again:
        assert again is not None


def test_cores_are_shared_out_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [slot.environment for slot in machine_slots(0, None)] == [{"OMP_NUM_THREADS": "1"}] * 8
    assert [slot.environment for slot in machine_slots(0, 2)] == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [slot.environment for slot in machine_slots(0, 1)] == [{"OMP_NUM_THREADS": "3"}]


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    slots = machine_slots(4, None)
    assert [(slot.environment["CUDA_VISIBLE_DEVICES"], slot.processes) for slot in slots] == [
        ("0,1,2,3", 4),
        ("4,5,6,7", 4),
    ]
    assert len(machine_slots(1, None)) == 8
    assert len(machine_slots(1, 3)) == 3
    with pytest.raises(UserError, match="--ngpus 9"):
        machine_slots(9, None)


def refuse_download(_path, *, download, train):
    assert download
    raise OSError("no network")


def test_mistakes_end_in_a_sentence(call, program, monkeypatch, tmp_path):
    for flags, message in (
        ((), "which recipe"),
        (("nonsense",), "no recipe nonsense"),
        (("losses", "--seeds", 1, 1), "each seed once"),
        (("losses", "--jobs", 0), "--jobs 0 must be at least 1"),
        (("losses", "--scale", "full"), "--scale full takes folder"),
    ):
        code, _, err = call(*flags)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1
    code, _, err = program(runner, "losses")
    assert (code, "--data_path: which images?" in err) == (2, True)
    code, _, err = program(runner, "downstream", "--scale", "full", "--data_path", "imagenet")
    assert (code, "--downstream_path: where are aid, airbus" in err) == (2, True)
    monkeypatch.setattr("torchvision.datasets.CIFAR10", refuse_download)
    code, _, err = program(runner, "losses", "--data_set", "cifar10", "--data_path", tmp_path, "--download")
    assert (code, f"cannot be fetched to {tmp_path}: no network" in err) == (2, True)
    code, _, err = call("losses", pretrain=("--no_such_flag",))
    assert (code, "--no_such_flag" in err) == (2, True)


# --- On a cluster ---


def test_a_recipe_runs_as_job_arrays(slurm, monkeypatch, call, tmp_path):
    for name in set(os.environ) - set(slurm.env):
        monkeypatch.delenv(name)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    flags = ("main_results", "--cluster", "slurm", "--ngpus", 0, "--timeout", 10)
    code, out, err = call(*flags)
    assert code == 0, out + err
    assert "not finished: mae seed 0, clmae seed 0" in out
    folder = tmp_path / "out" / "small" / "shapes"
    jobs = {name: json.loads((folder / name / "seed0" / "jobs.json").read_text()) for name in ("mae", "clmae")}
    arrays = {step: {jobs[name][step].split("_")[0] for name in jobs} for step in jobs["mae"]}
    assert len(arrays) == 2
    assert all(len(numbers) == 1 for numbers in arrays.values())  # both runs of a step are one array

    code, out, _ = call(*flags)  # while they are in the queue, nothing is submitted twice
    assert "job " not in out
    for name in jobs:
        for job in jobs[name].values():
            slurm.wait(job, "COMPLETED", timeout=240)
    code, out, err = call(*flags)
    assert code == 0, out + err
    assert "not finished" not in out
    assert "nearest neighbour on shapes" in (folder / "main_results-cls_token.md").read_text().lower()


def test_a_job_that_ended_without_a_result_is_listed(tmp_path, monkeypatch):
    run = expand(load_recipe("losses"), arguments("losses", "--data_set", "shapes", "--output_dir", tmp_path))[0]
    assert cluster.lost_jobs(run) == []
    cluster.note_job(run, run.pretrain, "12_3")
    monkeypatch.setattr(cluster, "in_queue", lambda job: job == "12_3")
    assert cluster.lost_jobs(run) == []
    monkeypatch.setattr(cluster, "in_queue", lambda job: False)
    assert cluster.lost_jobs(run) == ["job 12_3 (main_pretrain)"]


def test_evaluations_wait_for_their_pretraining():
    assert cluster.after_each(["12_0", "12_1"]) == "aftercorr:12"
    assert cluster.after_each(["12"]) == "afterok:12"
    assert cluster.after_each([]) is None


def test_last_words_are_the_last_line_that_says_something(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\nERROR: no such file\n\n")
    assert last_words(log) == "ERROR: no such file"
    log.write_text("")
    assert last_words(log) == "it said nothing"
