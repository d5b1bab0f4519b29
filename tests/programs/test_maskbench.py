"""MaskBench: what it runs, how runs are probed on images they never saw, and what it makes of the results."""

import base64
import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ENVIRONMENT, ROOT
from small_runs import checkpoint

import main_pretrain
from benchmarks.bench_step import peak_memory
from experiments import costs, maskbench, probe
from experiments.archive import read_archive
from experiments.costs import Cost, known_costs
from experiments.leaderboard import Entry, noise_table, standings
from experiments.maskbench import plan_bench, plan_entries
from experiments.plan import Run
from experiments.probe import ProbedRun, cross_fit, find_unseen
from experiments.runner import command
from experiments.strategies import SCALES, STRATEGIES, identify
from models_vit import load_encoder
from util.cli import UserError
from util.data.shapes import ShapesDataset
from util.data.sources import build_source, image_names
from util.datasets import build_pretrain_loader
from util.jsonl import append_record

TINY = ("--scale", "tiny", "--data_set", "shapes")
EVERY = ("--strategies", *STRATEGIES)
COSTS = {name: Cost(1.0, 0.9, 1.1, 0.5, 0.1) for name in STRATEGIES}


def arguments(*flags):
    parsed = maskbench.get_args_parser().parse_args(list(map(str, flags)))
    maskbench.check_args(parsed)
    return parsed


def planned(*flags, costs=COSTS) -> dict[str, Run]:
    args = arguments(*flags)
    return {entry.label: plan_bench(entry, 0, args) for entry in plan_entries(args, costs)}


# --- What it runs ---


@pytest.mark.parametrize(
    ("data", "shape"), [("folder", "--input_size 32"), ("fashion_mnist", "--input_size 28 --in_chans 1")]
)
def test_the_small_scale(data, shape):
    """Finished runs are recognised by these settings."""
    flags = f"--model mae_vit_micro_patch4 {shape} --max_images 12800 --batch_size 128 --lr 2e-3 --epochs 16 "
    flags += f"--warmup_epochs 2 --num_workers 0 --save_every 1 --masking random --data_set {data} --data_path d/x"
    run = planned("--data_set", data, "--data_path", "d/x")["random"]
    folder = f"output_dir/maskbench/small/{'x' if data == 'folder' else data}/random/seed0"
    place = ["--output_dir", folder, "--resume", "auto"]
    assert run.pretrain.args() == main_pretrain.get_args_parser().parse_args([*flags.split(), *place])


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_are_settings_of_pretraining_with_folders_of_their_own(name):
    runs = planned(*TINY, *EVERY)
    assert len({run.folder for run in runs.values()}) == len(STRATEGIES)
    main_pretrain.check_args(runs[name].pretrain.args())
    assert runs[name].pretrain.args().epochs == 2


def test_equal_compute_gives_epochs_by_step_time_and_longer_training_has_its_own_baseline():
    flags = ("--data_path", "x", "--strategies", "tokens", "block", "--epochs_factor", 1, 4, "--equal", "compute")
    costs = COSTS | {"tokens": Cost(2.9, 2.8, 3.0, 1.0, 0.2), "block": Cost(1.01, 1.0, 1.1, 0.5, 0.1)}
    assert set(planned(*flags[:5], "--equal", "compute", costs=costs)) == {"random", "tokens-5epochs", "block"}
    flags += ("epochs",)
    entries = {entry.label: entry for entry in plan_entries(arguments(*flags), costs)}
    long = {label for label in entries if entries[label].baseline == "random-64epochs"}
    assert entries.keys() - long == {"random", "tokens", "tokens-5epochs", "block"}
    assert long == {"random-64epochs", "tokens-64epochs", "tokens-22epochs", "block-64epochs"}
    fast = plan_entries(arguments(*flags), costs | {"block": Cost(0.8, 0.7, 0.9, 0.4, 0.1)})
    assert {"block-20epochs", "block-80epochs"} < {entry.label for entry in fast}
    same = plan_entries(arguments(*flags), costs | {"tokens": Cost(4.0, 3.9, 4.1, 1.0, 0.2)})
    assert {entry.baseline for entry in same if entry.label == "tokens"} == {"random", "random-64epochs"}
    slow = costs | {"tokens": Cost(17.0, 16.9, 17.1, 1.0, 0.2)}
    with pytest.raises(UserError, match=r"an epoch of tokens takes as long as 17\.0 of random masks"):
        maskbench.check_lengths(plan_entries(arguments(*flags), slow), slow)
    shorter = planned(*flags, costs=costs)["tokens-5epochs"].pretrain.args()
    assert (shorter.epochs, shorter.warmup_epochs, shorter.soft) == (5, 1, "tokens")


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_the_full_scale_is_shown_with_its_cost(program, cluster):
    flags = ("--scale", "full", "--data_path", "in", "--strategies", "tokens", "--seeds", 0, 1, "--dry_run")
    code, out, err = program(maskbench, *flags, "--cluster", cluster, "--ngpus", 8)
    assert (code, err) == (0, "")
    pretrain = [line for line in out.splitlines() if "pretrain.py" in line]
    assert len(pretrain) == 4
    assert all("--num_classes 100 --max_images 100000" in line for line in pretrain)
    assert all(line.startswith("python submitit_pretrain.py") == (cluster == "slurm") for line in pretrain)
    assert out.count("experiments.probe") == 4
    assert f"4 pretrainings, about {2 * 3.8 * (1 + 3.03):.3g} A100 hours" in out


def test_the_full_scale_with_a_larger_model_and_more_classes_costs_more(program):
    flags = ("--scale", "full", "--data_path", "in", "--strategies", "random", "--seeds", 0, "--dry_run", "--pretrain")
    flags += ("--model", "mae_vit_base", "--num_classes", 200, "--max_images", 200_000, "--epochs", 200)
    code, out, _ = program(maskbench, *flags)
    assert "--num_classes 200 --max_images 200000 --epochs 200" in out
    hours = float(re.search(r"1 pretrainings, about ([\d.]+) A100 hours", out)[1])
    assert (code, hours) == (0, pytest.approx(3.8 * 58.2 / 11.2, rel=0.03))  # GFLOP of ViT-B and ViT-S, counted


def test_a_dotted_program_is_run_as_a_module():
    step = planned(*TINY)["random"].steps[1]
    assert command(step, 1)[:2] == ["-m", "experiments.probe"]
    assert "--standalone" in command(step, 2)


def test_mistakes_of_maskbench_end_in_a_sentence(program, tmp_path):
    (tmp_path / "mine.py").write_text("def grid(ask):\n    return ask.uniform()\n")
    mine = f"{tmp_path}/mine.py:grid"
    for flags, message in (
        (("--strategies", "nonsense"), "--strategies nonsense is unknown"),
        (("--strategies", "none.py:stripes"), "--strategies none.py:stripes: there is no file none.py"),
        (("--scale", "full", "--data_set", "shapes"), "--scale full takes folder"),
        (
            ("--data_set", "shapes", "--equal", "compute", "--table_only"),
            "the cost of random is measured when it is run",
        ),
        (("--data_set", "shapes", "--equal", "compute", "--cluster", "slurm", "--device", "cpu"), "has no GPU as the"),
        (("--data_set", "shapes", "--archive", tmp_path / "none" / "file"), f"there is no folder {tmp_path}/none"),
        (("--strategies", "grid", mine), f"--strategies grid and {mine} would both be called grid"),
        (("--data_set", "shapes", "--measure", "last-cls"), "--scale small probes the final checkpoint only"),
        ((*TINY, "--measure", "last-cls", "--archive", tmp_path / "new"), "holds results of final checkpoints only"),
        (
            (*TINY, "--part", "held_out", "--strategies", "random", "--pretrain", "--max_images", 96),
            "--part held_out: there are no such images",
        ),
    ):
        code, _, err = program(maskbench, *flags, "--output_dir", tmp_path)
        assert (code, message in err, err.count("\n")) == (2, True, 1), err
    code, _, err = program(probe, tmp_path)
    assert (code, "--save_every 1" in err) == (2, True)


# --- A whole benchmark ---


@pytest.fixture
def bench(program, monkeypatch, tmp_path):
    """MaskBench on shapes with all programs in this process, and no measurement of costs."""

    def in_process(runs, _args):
        for run in runs:
            for step in run.steps:
                if not run.is_done(step):
                    done.append(step.title)
                    importlib.import_module(step.program).main(step.args())
        return {}

    done: list[str] = []
    monkeypatch.setattr(maskbench, "work", in_process)
    monkeypatch.setattr(costs, "measure_costs", lambda *_: COSTS)

    def call(*flags):
        done.clear()
        code, out, err = program(maskbench, *TINY, "--output_dir", tmp_path / "out", *flags)
        assert code == 0, out + err
        return out, list(done)

    return call


def probed(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    line = json.loads((folder / "probe" / "results.jsonl").read_text().splitlines()[-1])
    with np.load(folder / "probe" / line["predictions"]) as file:
        return line, dict(file)


@pytest.mark.slow
def test_a_benchmark_is_run_probed_and_shown(bench, program, tmp_path):
    (tmp_path / "mine.py").write_text("def stripes(ask):\n    return ask.uniform() + 2 * (ask.uniform() > 0.5)\n")
    flags = ("--strategies", "block", f"{tmp_path}/mine.py:stripes", "--seeds", 0, 1, 2)
    out, done = bench(*flags)
    assert done == ["main_pretrain", "experiments.probe on shapes"] * 9
    folder = tmp_path / "out" / "tiny" / "shapes"
    (stripes,) = folder.glob("stripes-*")
    folders = {"random": folder / "random", "stripes": stripes}
    found = {name: [probed(path / f"seed{seed}") for seed in range(3)] for name, path in folders.items()}
    _, arrays = found["random"][0]
    assert arrays["encoders"].tolist() == ["0", "1", "average"]
    assert arrays["hits"].shape == (3, 3, 96 - 32 + 19)
    assert np.array_equal(arrays["hits"][1, 0], arrays["correct"][0])
    assert (arrays["held_out"].sum(), arrays["held_out"][:64].all()) == (64, True)

    # Both tokens of the last checkpoint, on all images: the leaderboard's default.
    accuracy = {name: [100 * a["hits"][1, 2].mean() for _, a in found[name]] for name in found}
    assert [line["measures"]["final-both"]["all"] for line, _ in found["random"]] == pytest.approx(accuracy["random"])
    with open(folder / "leaderboard-final-both-all-seeds-0-1-2.csv") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    gain = np.mean(accuracy["stripes"]) - np.mean(accuracy["random"])
    assert float(rows["stripes"]["gain"]) == pytest.approx(gain, abs=1e-4)
    assert float(rows["stripes"]["low_simultaneous"]) <= float(rows["stripes"]["low"]) <= gain
    assert rows["random"]["gain"] == ""
    page = (folder / "leaderboard-final-both-all-seeds-0-1-2.md").read_text()
    assert re.search(rf"\| stripes \| undecided \| 2 \| 3 \| {np.mean(accuracy['stripes']):.2f} \|", page)
    assert "### Noise, from 3 seeds of 3 strategies" in page
    assert (folder / "leaderboard-final-both-all-seeds-0-1-2.png").stat().st_size > 10_000

    out, done = bench(*flags, "--measure", "average-cls", "--part", "held_out", "--html")
    assert done == []
    accuracy = np.mean([100 * a["hits"][2, 1][a["held_out"]].mean() for _, a in found["random"]])
    assert re.search(rf"random +baseline +2 +3 +{accuracy:.2f}", out)
    page = (folder / "leaderboard-average-cls-held_out-seeds-0-1-2.html").read_text()
    data = json.loads(re.search('id="data">(.*)</script>', page)[1])
    assert [(run["name"], len(run["moments"])) for run in data["runs"]] == [("random", 2), ("block", 2), ("stripes", 2)]
    assert re.search(rf"Leaderboard: .*>random</th><th scope=row>baseline<.*<td>{accuracy:.2f}<", page, re.DOTALL)

    # A damaged result is made again, damaged predictions are reported; neither stops the others.
    (folder / "block" / "seed0" / "probe" / "results.jsonl").write_text("{")
    _, done = bench(*flags)
    assert done == ["experiments.probe on shapes"]
    (folder / "block" / "seed1" / "probe" / "crossfit-shapes-0.npz").write_bytes(b"")
    code, out, _ = program(maskbench, *TINY, "--output_dir", tmp_path / "out", *flags, "--table_only")
    assert code == 1
    assert re.search(r"failed: block \(seed 1\): .*damaged or incomplete; delete .*probe and probe again", out)
    assert re.search(r"stripes +undecided +2 +3", out)

    # An edited strategy is another: nothing that its earlier version reached is shown as its own.
    (tmp_path / "mine.py").write_text("def stripes(ask):\n    return ask.uniform()\n")
    out, done = bench("--strategies", f"{tmp_path}/mine.py:stripes", "--seeds", 0)
    assert done == ["main_pretrain", "experiments.probe on shapes"]
    assert len(list(folder.glob("stripes-*"))) == 2


def test_the_report_shows_the_images_of_the_named_set(monkeypatch, tmp_path):
    args = arguments("--data_set", "fashion_mnist", "--data_path", "data")
    (tmp_path / "table.png").write_bytes(b"a picture")
    shown = []
    monkeypatch.setattr(maskbench.visualize, "checkpoints_by_run", lambda named: dict(named))
    monkeypatch.setattr(maskbench.visualize, "write_report", lambda runs, args, section: shown.append((args, section)))
    monkeypatch.setattr(Run, "is_finished", lambda run: run.seed == 1)
    runs = {entry: [plan_bench(entry, seed, args) for seed in (0, 1)] for entry in plan_entries(args, COSTS)[:2]}
    maskbench.write_html(tmp_path / "table", runs, [], [], args)
    ((given, section),) = shown
    assert (given.data_set, given.data_path, given.names) == ("fashion_mnist", "data", ["random", "random-0.6"])
    assert [Path(folder).name for folder in given.runs] == ["seed1", "seed1"]
    assert base64.b64encode(b"a picture").decode() in section


@pytest.mark.slow
def test_equal_compute_from_measured_step_times_to_the_table(tmp_path):
    """With the real queue, and all programs in processes of their own."""
    words = [*TINY, "--strategies", "attention", "--equal", "compute", "--seeds", "0", "--output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.maskbench", *words, "--pretrain", "--epochs", "24"]
    said = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    measured = json.loads((tmp_path / "tiny" / "shapes" / "costs.json").read_text())["costs"]["attention"]
    epochs = 24 if Cost(**measured).like_random else int(24 / measured["time"])  # on a busy machine, any number
    label = "attention" if epochs == 24 else f"attention-{epochs}epochs"
    assert checkpoint(tmp_path / "tiny" / "shapes" / label / "seed0", epochs - 1)["epoch"] == epochs - 1
    assert re.search(rf"^{label} +{epochs} +1 +[\d.]+ ", said.stdout, re.MULTILINE)


@pytest.mark.slow
def test_an_archive_stands_in_for_runs_that_are_elsewhere(bench, program, monkeypatch, tmp_path):
    archive, folder = tmp_path / "archive.jsonl", tmp_path / "out" / "tiny" / "shapes"
    flags = ("--seeds", 0, 1, 2, "--archive", archive)
    _, done = bench(*flags, "--strategies", "random")
    assert len(done) == 6
    accuracy = [100 * probed(folder / "random" / f"seed{seed}")[1]["hits"][1, 2].mean() for seed in range(3)]
    lines = archive.read_text().splitlines()
    shutil.rmtree(tmp_path / "out")

    _, done = bench(*flags, "--strategies", "block")
    assert done == ["main_pretrain", "experiments.probe on shapes"] * 3
    with open(folder / "leaderboard-final-both-all-seeds-0-1-2.csv") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    assert float(rows["random"]["acc1"]) == pytest.approx(np.mean(accuracy), abs=1e-4)
    own = [100 * probed(folder / "block" / f"seed{seed}")[1]["hits"][1, 2].mean() for seed in range(3)]
    assert float(rows["block"]["gain"]) == pytest.approx(np.mean(own) - np.mean(accuracy), abs=1e-4)
    assert archive.read_text().splitlines()[: len(lines)] == lines

    # Of a strategy in another user's file, and of one on request: neither widens the others' intervals unasked.
    records = [record for record in map(json.loads, lines) if "label" in record]
    for record in records:
        for label in ("mine", "released"):
            append_record(archive, {**{name: record[name] for name in record if name != "crc32"}, "label": label})

    shutil.rmtree(tmp_path / "out")
    out, done = bench(*flags, "--strategies", "random", "--table_only", "--html")
    assert (done, f"no finished run is below {folder}" in out) == ([], True)
    assert "archived, but not asked for: mine, released" in out
    assert re.search(r"block +undecided +2 +3 ", out)
    assert re.search(rf"random +baseline +2 +3 +{np.mean(accuracy):.2f}", out)
    other = (*TINY, "--output_dir", tmp_path / "out", *flags)
    code, _, err = program(maskbench, *other, "--table_only", "--pretrain", "--mask_ratio", 0.5)
    assert (code, "random (seed 0) with other flags" in err) == (2, True)
    monkeypatch.setattr(ShapesDataset, "name", lambda self, index: f"{self.split}/another/{index}")
    code, _, err = program(maskbench, *other, "--strategies", "grid")
    assert (code, "results on other images than those of shapes" in err) == (2, True)
    assert not (folder / "grid").exists()


def test_no_other_file_is_taken_for_an_archive(tmp_path):
    (tmp_path / "notes.md").write_text("# Notes\n")
    with pytest.raises(UserError, match=r"notes\.md is not an archive of MaskBench"):
        read_archive(str(tmp_path / "notes.md"))
    (tmp_path / "new.jsonl").touch()
    assert read_archive(str(tmp_path / "new.jsonl")).probes == {}


RESULTS = Path(maskbench.__file__).parent / "results"
PUBLISHED = {"cifar10": ("--data_path", "cifar10"), "fashion_mnist": ("--data_set", "fashion_mnist")}


@pytest.mark.parametrize("data", PUBLISHED)
def test_published_results_are_those_of_todays_strategies(data):
    """Otherwise they would be refused, and could not be compared with."""
    file = RESULTS / f"maskbench-small-{data}.jsonl"
    archive = read_archive(str(file))
    lengths = ("--epochs_factor", 1, 4, "--equal", "epochs", "compute")
    args = arguments(*PUBLISHED[data], *EVERY, *lengths, "--device", "cpu")
    entries = {entry.label: entry for entry in plan_entries(args, COSTS | known_costs(archive.costs, args))}
    assert {("random", seed) for seed in range(3)} < archive.probes.keys()
    for label, seed in archive.probes:
        archive.check(label, seed, maskbench.archived_flags(entries[label], args))
    for line in map(json.loads, file.read_text().splitlines()):
        if "label" in line:
            probe = archive.probes[line["label"], line["seed"]]
            assert 100 * probe.measures["final-both"].mean() == pytest.approx(line["acc1"]["both"], abs=1e-3)


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ("cifar10", ()),
        ("fashion_mnist", ("--seeds", 0, 1, 2)),
        ("cifar10", ("--equal", "compute", "--strategies", "tokens", "attention")),
        ("cifar10", ("--epochs_factor", 4, "--seeds", 0, 1, 2)),
        ("cifar10", ("--strategies", "predictive-partner", "--seeds", *range(5, 13))),
        ("fashion_mnist", ("--strategies", "grid", "--seeds", *range(5, 10))),
    ],
)
def test_the_tables_of_the_docs_are_those_of_the_archives(data, flags):
    args = arguments(*PUBLISHED[data], "--device", "cpu", *flags)
    archive = read_archive(str(RESULTS / f"maskbench-small-{data}.jsonl"))
    costs = known_costs(archive.costs, args)
    entries = dict.fromkeys([*plan_entries(args, costs), *maskbench.archived_entries(archive, costs, args)])
    probes: dict[str, dict[int, ProbedRun]] = {}
    for (label, seed), probed_run in archive.probes.items():
        if seed in args.seeds:
            probes.setdefault(label, {})[seed] = probed_run
    page = (RESULTS.parents[1] / "docs" / "results.md").read_text().replace("**", "")
    rows = [row for row in standings(list(entries), probes, costs, "final-both") if row.gain and row.gain.interval]
    rows = [row for row in rows if "compute" not in flags or row.entry.epochs != 16]
    assert rows
    for row in rows:
        # A single comparison needs no correction: both intervals are the same.
        bounds = dict.fromkeys(f"{low:+.2f} to {high:+.2f}" for low, high in (row.gain.interval, row.gain.simultaneous))
        assert f" | {row.accuracy:.2f} | {row.gain.mean:+.2f} | {' | '.join(bounds)} |" in page, row.entry.label


def test_an_archive_is_of_the_same_images_and_of_the_same_file(tmp_path):
    archive, mine = read_archive(str(tmp_path / "archive.jsonl")), tmp_path / "mine.py"
    archive.add("random", 0, "flags", made_up(0.5, 0), None)
    with pytest.raises(UserError, match="results on other images than those of"):
        archive.add("grid", 0, "flags", made_up(0.5, 0, images=100), None)
    assert read_archive(str(tmp_path / "archive.jsonl")).probes.keys() == {("random", 0)}
    found = []
    for text in ("1 * ask.uniform()", "2 * ask.uniform()"):
        mine.write_text(f"def stripes(ask):\n    return {text}\n")
        args = arguments(*TINY, "--strategies", f"{mine}:stripes")
        found.append(maskbench.archived_flags(plan_entries(args, COSTS)[1], args))
    assert found[0] != found[1]
    assert all("--masking stripes@" in flags and str(tmp_path) not in flags for flags in found)


def test_costs_are_measured_once_beside_random_masks(monkeypatch, tmp_path):
    in_this_process = lambda benches: {name: peak_memory(*bench) for name, bench in benches.items()}  # noqa: E731
    monkeypatch.setattr(costs, "peak_memories", in_this_process)
    args = arguments(*TINY, "--strategies", "ratio", "attention", "--output_dir", tmp_path)
    found = costs.measure_costs({}, args)
    assert found.keys() == {"random", "ratio", "attention"}
    assert found["random"].time == 1
    assert found["random"].gflop < found["ratio"].gflop < found["attention"].gflop
    monkeypatch.setattr(costs, "Contender", None)
    assert costs.measure_costs({}, args) == known_costs({}, args) == found
    other = arguments(*TINY, "--output_dir", tmp_path, "--pretrain", "--input_size", 32)
    assert known_costs({}, other) == {}
    mine = tmp_path / "mine.py"
    mine.write_text("def stripes(ask):\n    return ask.uniform()\n")
    own = arguments(*TINY, "--strategies", f"{mine}:stripes", "--output_dir", tmp_path)
    kept = json.loads(costs.costs_file(args).read_text())
    kept["costs"][identify(f"{mine}:stripes")] = kept["costs"]["ratio"]
    costs.costs_file(args).write_text(json.dumps(kept))
    assert known_costs({}, own)[f"{mine}:stripes"] == found["ratio"]
    mine.write_text("def stripes(ask):\n    return 2 * ask.uniform()\n")
    assert known_costs({}, own).keys() == found.keys()
    for damaged in ("{", '{"settings": "", "costs": []}'):
        costs.costs_file(args).write_text(damaged)
        with pytest.raises(UserError, match="is damaged"):
            known_costs({}, args)


# --- Probes ---


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    run = planned(*TINY, "--output_dir", tmp_path_factory.mktemp("run"))["random"]
    main_pretrain.main(run.pretrain.args())
    return run.folder


def test_features_are_those_of_the_other_evaluations_and_weights_are_averaged(run_folder):
    imgs = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    paths = probe.last_checkpoints(run_folder, 2)
    assert [path.name for path in paths] == ["checkpoint-0.pth", "checkpoint-1.pth"]
    encoders = probe.load_encoders(paths, torch.device("cpu"))
    for name, path in zip("01", paths, strict=True):
        pooled, single = (load_encoder(path, global_pool=pool).forward_features(imgs) for pool in (True, False))
        torch.testing.assert_close(encoders[name](imgs), torch.cat([pooled, single], dim=1))
    weights = [checkpoint(run_folder, epoch)["model"]["blocks.0.attn.qkv.weight"] for epoch in (0, 1)]
    torch.testing.assert_close(encoders["average"].pooled.blocks[0].attn.qkv.weight, (weights[0] + weights[1]) / 2)
    with pytest.raises(UserError, match="--last 1"):
        probe.last_checkpoints(run_folder, 3)


def test_held_out_images_are_all_others_of_the_training_images(run_folder):
    args = Namespace(**checkpoint(run_folder)["args"], run=run_folder)
    images = find_unseen(args)
    seen = {name.replace("pretrain", "train") for name in image_names(build_source(args, "pretrain"))}
    held_out = set(images.names()[: len(images.held_out)])
    assert (len(seen), len(held_out), len(images.names())) == (32, 64, 64 + 19)
    assert held_out | seen == {f"shapes/train/{i}" for i in range(96)}
    args.split_seed = 1
    with pytest.raises(UserError, match="does not hold the images"):
        find_unseen(args)
    args.max_images, args.data_identity = None, None
    assert find_unseen(args).held_out == []


def test_a_run_on_all_training_images_is_cross_fitted_on_the_test_images(program, run_folder, tmp_path):
    flags = planned(*TINY, "--output_dir", tmp_path, "--pretrain", "--max_images", 96)["random"]
    main_pretrain.main(flags.pretrain.args())
    code, _, err = program(probe, *flags.steps[1].flags, "--folds", 3)
    assert (code, err) == (0, "")
    line, arrays = probed(flags.folder)
    assert not arrays["held_out"].any()
    assert line["images"] == {"train": 19, "test": 19, "unreadable": 0}
    assert line["measures"]["final-both"].keys() == {"all", "test"}


def test_too_few_images_to_fit_a_probe_end_in_a_sentence(program, tmp_path):
    run = planned(*TINY, "--output_dir", tmp_path, "--pretrain", "--max_images", 95, "--epochs", 1)["random"]
    main_pretrain.main(run.pretrain.args())
    code, _, err = program(probe, *run.steps[1].flags, "--last", 1)
    assert (code, err.count("\n"), "leaves 1 images to fit probes on, too few" in err) == (2, 1, True)


def test_runs_of_a_seed_share_weights_images_and_crops(tmp_path):
    runs = planned(*TINY, "--strategies", "random", "noise", "attention", "--output_dir", tmp_path)
    batches, weights = [], []
    for run in runs.values():
        args = run.pretrain.args()
        main_pretrain.check_args(args)
        main_pretrain.settle_batch_and_rates(args)
        loader = build_pretrain_loader(args)
        loader.set_epoch(1)
        batches.append(torch.cat([imgs for imgs, _, _ in loader]))
        weights.append(main_pretrain.build_networks(args, torch.device("cpu")).model.state_dict())
    assert len(batches[0]) == 32
    assert all(torch.equal(batch, batches[0]) for batch in batches[1:])
    assert all(torch.equal(own[name], weights[0][name]) for own in weights[1:] for name in own)


def test_no_image_is_classified_by_a_probe_that_was_fitted_on_it():
    """Each image has a feature of its own, from which a probe could read off any label that it has seen."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (60,), generator=generator)
    features = torch.cat([torch.eye(60), torch.randn(60, 1, generator=generator)], dim=1)
    folds = torch.arange(60) % 4 - 1  # a fold of images that no probe is fitted on, and three others
    top5 = cross_fit(features, labels, folds, 2, 1.0, torch.device("cpu"))
    flipped = torch.where(folds == -1, 1 - labels, labels)
    assert torch.equal(top5, cross_fit(features, flipped, folds, 2, 1.0, torch.device("cpu")))
    flipped = torch.where(folds == 1, 1 - labels, labels)
    changed = cross_fit(features, flipped, folds, 2, 1.0, torch.device("cpu"))
    assert torch.equal(top5[folds == 1], changed[folds == 1])
    assert not torch.equal(top5[folds != 1], changed[folds != 1])


# --- Standings ---


def made_up(accuracy: float, seed: int, images: int = 2000) -> ProbedRun:
    """Half of the images are held out; all checkpoints and features hit the same ones."""
    hits = np.random.default_rng(seed).random(images) < accuracy
    return ProbedRun(
        Path("made_up.npz"), f"hash of {images} names", np.arange(images) < images // 2, ["0"], np.tile(hits, (1, 3, 1))
    )


def test_standings_compare_to_the_baseline_of_the_same_length_over_common_seeds():
    entries = [Entry("random", "random", 16, "random"), Entry("grid", "grid", 16, "random")]
    entries += [Entry("random-64epochs", "random", 64, "random-64epochs"), Entry("none", "noise", 16, "random")]
    entries += [Entry("grid-64epochs", "grid", 64, "random-64epochs")]
    chances = {"random": 0.4, "grid": 0.6, "random-64epochs": 0.7, "grid-64epochs": 0.5}
    probes = {name: {s: made_up(p, 10 * at + s) for s in range(4)} for at, (name, p) in enumerate(chances.items())}
    probes["grid"][9] = made_up(0.6, 99)  # of a seed that the baseline lacks
    rows = {row.entry.label: row for row in standings(entries, probes, COSTS, "final-mean")}
    assert list(rows) == ["random-64epochs", "grid", "grid-64epochs", "random"]
    assert (rows["grid"].gain.verdict, rows["grid-64epochs"].gain.verdict) == ("better", "worse")
    assert (rows["random"].gain, rows["random"].verdict) == (None, "baseline")
    alone = standings(entries, {"grid": probes["grid"]}, COSTS, "final-mean")
    assert [(row.gain, row.verdict) for row in alone] == [(None, "")]
    assert (rows["grid"].seeds, rows["grid"].compute, rows["grid-64epochs"].compute) == (4, 1, 1)
    own, base = ([100 * probes[name][s].hits[0, 0].mean() for s in range(4)] for name in ("grid", "random"))
    assert rows["grid"].gain.mean == pytest.approx(np.mean(own) - np.mean(base))

    # Equal compute is another family: it neither widens the intervals of equal epochs, nor has fewer than its members.
    stretched = Entry("tokens-5epochs", "tokens", 5, "random")
    slow = COSTS | {"tokens": Cost(3.0, 2.9, 3.1, 0.5, 0.1), "grid": Cost(2.0, 1.9, 2.1, 0.5, 0.1)}
    with_short = {**probes, "tokens-5epochs": {seed: made_up(0.3, 70 + seed) for seed in range(3)}}
    both = {row.entry.label: row for row in standings([*entries, stretched], with_short, slow, "final-mean")}
    assert both["grid"].gain == rows["grid"].gain
    shared = {row.entry.label: row for row in standings([*entries, stretched], with_short, COSTS, "final-mean")}
    assert shared["grid"].gain.simultaneous[0] < both["grid"].gain.simultaneous[0]
    assert shared["tokens-5epochs"].gain.simultaneous[0] < both["tokens-5epochs"].gain.simultaneous[0]
    assert noise_table([*entries, stretched], with_short).title == "Noise, from 4 seeds of 2 strategies"

    # A family with many strategies, but few of them with enough seeds, does not stand in for a larger correction.
    rivals = [Entry(name, name, 16, "random") for name in ("block", "noise")]
    unfinished = [Entry(f"{name}-5epochs", name, 5, "random") for name in ("tokens", "attention", "predictive")]
    some = {entry.label: probes["grid"] for entry in rivals} | {entry.label: {0: made_up(0, 0)} for entry in unfinished}
    times = COSTS | {name: Cost(2.0, 1.9, 2.1, 0.5, 0.1) for name in ("block", "noise")}
    with_few, without = (
        {row.entry.label: row.gain for row in standings(planned, {**probes, **some}, times, "final-mean")}
        for planned in ([*entries, *rivals, *unfinished], [*entries, *rivals])
    )
    assert with_few["grid"] == without["grid"]

    # A family of its own for each length: the longer runs are not corrected for the number of the shorter ones.
    more = [*entries, Entry("noise", "noise", 16, "random")]
    wider = {r.entry.label: r for r in standings(more, {**probes, "noise": probes["grid"]}, COSTS, "final-mean")}
    assert wider["grid-64epochs"].gain == rows["grid-64epochs"].gain
    assert wider["grid"].gain.simultaneous[1] > rows["grid"].gain.simultaneous[1]

    noise = noise_table(entries, probes)
    assert noise is not None
    assert noise.title == "Noise, from 4 seeds of 2 strategies"
    deviation = np.std(np.array(own) - np.array(base), ddof=1)
    assert noise.rows[0][1][1].number == f"{deviation:.2f}"
    with pytest.raises(UserError, match="--measure last-mean"):
        standings(entries, probes, COSTS, "last-mean")
    few = {**probes, "none": {0: made_up(0.5, 7)}}  # one seed of an entry takes no other's seeds away
    assert noise_table(entries, few).title == noise.title
    probes["grid"][9] = made_up(0.6, 99, images=100)
    with pytest.raises(UserError, match="different images"):
        standings(entries, probes, COSTS, "final-mean")


def test_scales_have_a_probe_that_their_checkpoints_allow():
    for scale in SCALES.values():
        settings = main_pretrain.get_args_parser().parse_args(scale.pretrain.split())
        last = probe.get_args_parser().parse_args(["run", *scale.probe.split()]).last
        assert settings.save_every == 1
        assert settings.keep == 0 or settings.keep >= last
        assert settings.epochs >= last
