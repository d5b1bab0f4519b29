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
import torch
from conftest import ROOT, processes_with
from small_runs import checkpoint

from experiments import run as runner
from experiments import runner as machines
from experiments.plan import expand, run_name
from experiments.recipes import PAPER, RECIPES, SCALES
from main_pretrain import settle_mask_args
from util.cli import UserError
from util.evaluation.compare import mcnemar

TINY = (
    *("--pretrain", "--epochs", "2", "--shapes_images", "48", "--batch_size", "16"),
    *("--input_size", "16", "--cmm_depth", "1"),
)
TUNING = ("lambda_gauss", "lambda_kl", "lambda_cl_end", "lambda_div", "cmm_depth")


def arguments(*flags):
    parsed = runner.get_args_parser().parse_args(list(map(str, flags)))
    runner.check_args(parsed)
    return parsed


@pytest.fixture
def tiny(monkeypatch):
    """The small scale with few images to evaluate on, and of the main results nearest neighbours alone."""
    fewer = replace(SCALES["small"], data=SCALES["small"].data | {"shapes": ("--shapes_images 160", "")})
    monkeypatch.setitem(SCALES, "small", fewer)
    monkeypatch.setitem(RECIPES, "main_results", replace(RECIPES["main_results"], evaluations=("knn",)))


@pytest.fixture
def call(program, tiny, tmp_path):
    """The runner on shapes, into a folder of this test."""

    def start(*flags, pretrain=()):
        where = ("--data_set", "shapes", "--output_dir", tmp_path / "out")
        return program(runner, *flags, *where, *TINY, *pretrain)

    return start


# --- What recipes say ---


def at_full_scale(name):
    return expand(RECIPES[name], arguments(name, "--scale", "full", "--data_path", "in", "--downstream_path", "down"))


def settled_at_full_scale(name):
    for run in at_full_scale(name):
        args = run.pretrain.args()
        settle_mask_args(args)
        yield args, run


@pytest.mark.parametrize("name", RECIPES)
def test_the_overview_has_a_command_whose_flags_all_programs_know(name):
    command = runner.overview(name, RECIPES[name]).splitlines()[-1].split("experiments.run ")[1]
    args = arguments(*command.split())
    assert args.recipes == [name]
    for step in [step for run in expand(RECIPES[name], args) for step in run.steps]:
        assert step.args().output_dir.startswith("output_dir/experiments/full/imagenet/")
    assert f"| {name} |" in (ROOT / "experiments" / "README.md").read_text()


def test_every_accuracy_of_the_paper_is_beside_the_evaluation_that_repeats_it():
    shown = set()
    for run in (run for name in RECIPES for run in at_full_scale(name) if run.variant.paper):
        for step in run.steps[1:]:
            data = "imagenet200" if step.data == "in" else step.data
            for shots in getattr(step.args(), "shots", [None]):
                protocol = (
                    f"{shots}-shot"
                    if shots
                    else {"knn": "nearest neighbour", "linprobe": "linear probing"}[step.protocol]
                )
                line = run.variant.paper | {"protocol": protocol, "data": data}
                acc1, acc5 = run.variant.reported(protocol, data)
                shown.add(tuple({**line, "table": "", "acc1": acc1, "acc5": acc5}.values()))
    printed = {tuple({**line, "table": ""}.values()) for line in PAPER}
    assert len(PAPER) == 241
    assert printed <= shown
    huge = RECIPES["fewshot"].variants[-1]
    assert (huge.name, huge.reported("16-shot", "sport_balls")) == ("CL-MAE, ViT-H", ["43.2", "78.1"])
    assert huge.reported("linear probing", "imagenet200") == ["-", "-"]


@pytest.mark.parametrize(
    ("name", "kl", "curriculum", "diversity"),
    [
        ("lambda_gauss", 0, False, 1),
        ("lambda_kl", None, False, 1),
        ("lambda_cl_end", 1, True, 1),
        ("lambda_div", 1, True, None),
        ("cmm_depth", 1, True, 2),
    ],
)
def test_tuning_tables_keep_what_was_chosen_before(name, kl, curriculum, diversity):
    for args, run in settled_at_full_scale(name):
        assert getattr(args, name) == float(run.variant.paper[name])
        assert kl in (None, args.lambda_kl)
        assert diversity in (None, args.lambda_div)
        assert args.no_curriculum is not curriculum
        assert name == "lambda_gauss" or args.lambda_gauss == 10
        assert name == "cmm_depth" or args.cmm_depth == 5


def test_the_loss_ablation_adds_one_loss_after_the_other():
    flags = [args for args, _ in settled_at_full_scale("losses")]
    on = [(a.lambda_gauss > 0, a.lambda_kl > 0, a.lambda_div > 0, not a.no_curriculum) for a in flags]
    assert flags[0].masking == "random"
    assert on[1:] == [(True,) + (False,) * 3, (True,) * 2 + (False,) * 2, (True,) * 3 + (False,), (True,) * 4]


@pytest.mark.parametrize("scale", SCALES)
def test_probes_are_the_mean_of_three_runs(scale):
    data = ["--data_path", "in", "--downstream_path", "down"]
    runs = [run for name in RECIPES for run in expand(RECIPES[name], arguments(name, "--scale", scale, *data))]
    probes = [step for run in runs for step in run.steps[1:] if step.program != "main_knn"]
    assert {step.program for step in probes} == {"main_linprobe", "main_fewshot"}
    assert all(step.args().runs == 3 for step in probes)


def test_paper_flags_go_to_the_papers_runs_of_clmae_alone():
    """MAE does not need them, and would no longer share its runs with the other recipes."""
    for name in ("main_results", "losses", *TUNING, "masks_no_kl"):
        for variant in RECIPES[name].variants:
            assert ("--soft" in variant.flags) is not variant.baseline


def test_recipes_share_runs():
    names = ("losses", "main_results", "lambda_div", "cmm_depth", "masks_curriculum", "compute")
    folders = {name: [run.folder for run in at_full_scale(name)] for name in names}
    for found in folders.values():
        assert [folder for folder in found if folder.parent.name == "curriculum"] == folders["masks_curriculum"]


def test_a_run_is_named_by_what_it_changes(monkeypatch, tmp_path):
    base = ["--model", "mae_vit_base", "--epochs", "8"]
    assert run_name(base, []) == "curriculum"
    assert run_name(base, ["--masking", "random", "--epochs", "38"]) == "random-epochs=38"
    assert run_name(base, ["--no_curriculum", "--lambda_kl", "0"]) == "curriculum-no_curriculum-lambda_kl=0.0"
    assert run_name(base, ["--lambda_cl_end", "-0.1"]) == "curriculum"  # the default
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "masks.py").write_text("def stripes(ask):\n    return ask.uniform()\n")
    assert run_name([*base, "--masking", "my/masks.py:stripes"], []) == "my_masks.py_stripes"


def test_equal_compute_is_clmaes_time_in_epochs_of_mae():
    run = at_full_scale("compute")[1]
    assert (run.pretrain.args().masking, run.pretrain.args().epochs) == ("random", round(400 * 3.09))


@pytest.mark.parametrize("name", ["main_results", "downstream", "fewshot"])
def test_the_full_scale_has_three_sizes_and_five_downstream_sets(name):
    runs = at_full_scale(name)
    models = [(run.pretrain.args().model, run.pretrain.args().masking) for run in runs]
    assert models == [(f"mae_vit_{s}", m) for s in ("base", "large", "huge") for m in ("random", "curriculum")]
    paths = {step.args().data_path for step in runs[-1].steps[1:]} - {"in"}
    expected = {f"down/{data}" for data in ("aid", "airbus", "ahe", "sea_animals", "sport_balls")}
    assert paths == (set() if name == "main_results" else expected)


# --- Doing it on this machine ---


def results(folder: Path, protocol: str) -> list[dict]:
    lines = map(json.loads, (folder / "cls_token" / "results.jsonl").read_text().splitlines())
    return [line for line in lines if line["protocol"] == protocol]


@pytest.mark.slow
def test_a_recipe_is_run_evaluated_and_shown(call, tmp_path):
    """Then a second call finds everything done, one run that fails stops no other, and other settings are refused."""
    flags = ("main_results", "--seeds", 0, 1, "--jobs", 2)
    code, out, err = call(*flags)
    assert code == 0, out + err
    folder = tmp_path / "out" / "small" / "shapes"
    runs = {name: [folder / name / f"seed{seed}" for seed in (0, 1)] for name in ("random", "curriculum")}
    table = (folder / "main_results-cls_token.md").read_text()
    for name, title in (("random", "MAE"), ("curriculum", "CL-MAE")):
        accuracies = [results(run, "knn")[0]["acc1"] for run in runs[name]]
        row = next(line for line in table.splitlines() if line.startswith(f"| {title} |"))
        assert f"| {statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} |" in row
    paper = next(line for line in table.splitlines() if line.startswith("| CL-MAE |"))
    assert paper.endswith("| 42.1 | 65.1 |")
    hits = [[np.load(run / "cls_token" / "knn-shapes-0.npz")["correct"][0] for run in runs[n]] for n in runs]
    p = max(mcnemar(own, base) for own, base in zip(hits[1], hits[0], strict=True))
    assert f" {p:.3f} |" in paper
    assert "Health of the masks" in table
    assert f"Commit {checkpoint(runs['random'][0])['args']['commit']}" in table

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pth")}
    code, out, _ = call(*flags)
    assert code == 0
    assert " took " not in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pth")} == before

    (folder / "curriculum" / "seed1" / "log.txt").write_text("")  # as in a first epoch
    for path in runs["random"][1].glob("checkpoint-*.pth"):
        path.write_bytes(b"damaged")
    (runs["curriculum"][0] / "cls_token" / "results.jsonl").unlink()
    code, out, _ = call("main_results", "--seeds", 0, 1, "--jobs", 1)
    assert code == 1
    assert re.search(r"failed: MAE \(seed 1\): .*damaged", out)
    assert re.search(r"MAE +[\d.]+ +[\d.]+ +1 of 2 ", out)
    assert len(results(runs["curriculum"][0], "knn")) == 1

    path = max(runs["random"][0].glob("checkpoint-*.pth"))
    state = torch.load(path, weights_only=True)
    state["args"]["world_size"] = 2  # shown here, too, though it was trained with two GPUs
    torch.save(state, path)
    code, _, err = call("main_results", pretrain=("--lambda_kl", 2))
    assert (code, "images per iteration" in err) == (2, False)
    assert re.search(r"random.seed0 was trained with other settings: --lambda_kl 1.0, now 2.0", err)


def test_a_dry_run_shows_commands_and_leaves_nothing(call, tmp_path):
    code, out, _ = call("losses", "--dry_run")
    assert code == 0
    lines = out.splitlines()[1:]  # the first has the time of day
    assert [line.split()[1] for line in lines] == ["main_pretrain.py", "main_knn.py"] * 5
    assert "--lambda_kl 0 --lambda_div 0 --no_curriculum" in lines[2]
    code, out, _ = call("losses", "--dry_run", "--cluster", "slurm", "--nodes", 2, "--ngpus", 4)
    assert out.splitlines()[1].startswith("python submitit_pretrain.py --nodes 2 --ngpus 4 ")
    assert out.splitlines()[2].startswith("python submitit_eval.py --task knn --nodes 1 --ngpus 4 ")
    assert not (tmp_path / "out").exists()
    code, out, _ = call("losses", "--table_only")
    assert code == 0
    assert re.search(r"MAE +- +- +0 of 1 ", out)
    assert "not finished: MAE (seed 0), " in out


@pytest.mark.slow
def test_a_stopped_queue_leaves_no_process_and_resumes(background, tmp_path):
    flags = ["--epochs", "3", "--shapes_images", "960", "--batch_size", "16", "--input_size", "16", "--cmm_depth", "1"]
    command = [sys.executable, "-m", "experiments.run", "masks_curriculum", "--data_set", "shapes"]
    command += ["--output_dir", str(tmp_path / "out"), "--pretrain", *flags]
    process, said = background(command)
    folder = tmp_path / "out" / "small" / "shapes" / "curriculum" / "seed0"
    wait_until(lambda: "epoch 1/3 [" in read(folder / "main_pretrain.log"), process, said)

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "the same command resumes" in said.read_text()
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
    with machines.locked(tmp_path, ".lock") as lock:
        child = subprocess.Popen(["sleep", "100"], pass_fds=lock)
    with pytest.raises(UserError, match="in use by process"), machines.locked(tmp_path, ".lock"):
        pass
    child.kill()
    child.wait()
    with machines.locked(tmp_path, ".lock"):
        pass


def test_cores_are_shared_out_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [environment for environment, _ in machines.machine_slots(0, None)] == [{"OMP_NUM_THREADS": "1"}] * 8
    assert [environment for environment, _ in machines.machine_slots(0, 2)] == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [environment for environment, _ in machines.machine_slots(0, 1)] == [{"OMP_NUM_THREADS": "3"}]


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    slots = machines.machine_slots(4, None)
    assert slots == [({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4), ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4)]
    assert len(machines.machine_slots(1, None)) == 8
    assert len(machines.machine_slots(1, 3)) == 3
    with pytest.raises(UserError, match="--ngpus 9"):
        machines.machine_slots(9, None)


def refuse_download(_path, *, download, train):
    assert download
    raise OSError("no network")


def test_mistakes_end_in_a_sentence(call, program, monkeypatch, tmp_path):
    for flags, message in (
        ((), "RECIPE is missing"),
        (("nonsense",), "no recipe nonsense"),
        (("losses", "--seeds", 1, 1), "give each seed once"),
        (("losses", "--jobs", 0), "--jobs: 0 must be at least 1"),
        (("losses", "--scale", "full"), "--scale full takes folder"),
    ):
        code, _, err = call(*flags)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1
    code, _, err = program(runner, "losses")
    assert (code, "--data_path is missing" in err) == (2, True)
    code, _, err = program(runner, "downstream", "--scale", "full", "--data_path", "imagenet")
    assert (code, "--downstream_path is missing: the folder with aid, airbus" in err) == (2, True)
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
    assert "not finished: MAE (seed 0), CL-MAE (seed 0)" in out
    folder = tmp_path / "out" / "small" / "shapes"
    files = {name: sorted((folder / name / "seed0").glob("*.job")) for name in ("random", "curriculum")}
    jobs = {name: {file.name: file.read_text().strip() for file in files[name]} for name in files}
    arrays = {step: {jobs[name][step].split("_")[0] for name in jobs} for step in jobs["random"]}
    assert list(arrays) == ["main_knn-shapes-cls_token.job", "main_pretrain.job"]
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


def test_what_is_lost_is_listed_and_submitted_again_and_evaluations_wait(tmp_path, monkeypatch):
    args = arguments("losses", "--data_set", "shapes", "--output_dir", tmp_path, "--cluster", "slurm")
    runs = expand(RECIPES["losses"], args)
    submitted, queued = [], set()

    def submit(steps, _args, after=None):
        submitted.append((sorted({step.program for step in steps.values()}), len(steps), after))
        for number, (run, step) in enumerate(steps.items()):
            run.folder.mkdir(parents=True, exist_ok=True)
            machines.job_file(run, step).write_text(f"{len(submitted)}_{number}")
        return [f"{len(submitted)}_{number}" for number in range(len(steps))]

    monkeypatch.setattr(machines, "submit_array", submit)
    monkeypatch.setattr(machines, "in_queue", lambda job: job in queued)
    assert machines.submit_all(runs, args) == {}
    assert submitted == [(["main_pretrain"], 5, None), (["main_knn"], 5, "aftercorr:1")]

    queued |= {f"{array}_{task}" for array in (1, 2) for task in range(5)} - {"2_3"}
    failed = machines.submit_all(runs, args)
    assert failed == {runs[3]: "no result from job 2_3 (main_knn on shapes)"}
    assert submitted[3:] == [(["main_knn"], 1, "afterok:1_3")]
