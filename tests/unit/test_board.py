"""Trackers: all receive the same data, a resumed run sends nothing twice, and none of them ends a run."""

import importlib.util
import json
import sqlite3
import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from processes import ENVIRONMENT, processes_with, run_to_end
from small_runs import SMALL, log_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from util.board import Board

PICTURE = torch.zeros(3, 4, 6)
CALLS = ("init", "Image", "log", "finish")


class Fake(ModuleType):
    """Has the interface of wandb and trackio; remembers its calls, and fails in one of them."""

    def __init__(self, name: str, failing: str = ""):
        super().__init__(name)
        self.failing, self.calls = failing, []

    def __getattr__(self, call):
        if call not in CALLS:
            raise AttributeError(call)

        def answer(*args, **kwargs):
            self.calls.append((call, args, kwargs))
            if call == self.failing:
                raise RuntimeError(f"{call} is broken")
            return f"an image of {args[0].shape}" if call == "Image" else None

        return answer

    def points(self, name):
        return [kwargs["step"] for call, args, kwargs in self.calls if call == "log" and name in args[0]]


@pytest.fixture
def fake(monkeypatch):
    def install(name, failing=""):
        module = Fake(name, failing)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def arguments(folder):
    return Namespace(output_dir=str(folder), log_dir=str(folder), seed=3, classes=["a", "b"])


def show(board, *steps):
    for step in steps:
        board.add_scalar("train_loss", step / 2, step)
        board.add_image("masks", PICTURE, step)
    board.flush()


def test_values_of_a_step_are_sent_together_with_settings_and_pictures(fake, tmp_path):
    modules = [fake("wandb"), fake("trackio")]
    with Board() as board:
        board.open(["wandb", "trackio"], arguments(tmp_path), 0)
        show(board, 500, 1000)
        board.add_scalar("test/acc1", 7.0, 2)  # on another axis: late, but not lost
    for module in modules:
        (_, _, given), *calls = module.calls
        assert (given["project"], given["config"]["seed"], "classes" in given["config"]) == ("clmae", 3, False)
        assert ("id" in given, "dir" in given) == (module.__name__ == "wandb",) * 2
        sent = [(args[0], kwargs["step"]) for call, args, kwargs in calls if call == "log"]
        image = "an image of (4, 6, 3)"
        expected = [({"train_loss": step / 2, "masks": image}, step) for step in (500, 1000)]
        assert sent == [*expected, ({"test/acc1": 7.0}, 1000)]
        assert calls[-1][0] == "finish"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("failing", CALLS)
def test_a_tracker_that_fails_is_named_once_and_dropped(name, failing, fake, tmp_path, clmae_log):
    module = fake(name, failing)
    with Board() as board:
        board.open(["tensorboard", name], arguments(tmp_path), 0)
        show(board, 500, 1000)
    assert [record.getMessage() for record in clmae_log.records] == [
        f"--track {name} failed ({failing} is broken); the run continues without it"
    ]
    assert [call for call, _, _ in module.calls].count(failing) == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [500, 1000]


def test_a_resumed_run_continues_its_experiment_without_double_points(fake, tmp_path):
    names = []
    for begin, steps in ((0, (500, 1000, 1500)), (1000, (1500, 2000)), (0, (500,))):
        module = fake("wandb")
        with Board() as board:
            board.open(["wandb"], arguments(tmp_path), begin)
            show(board, *steps)
        names.append((module.calls[0][2]["id"], module.points("train_loss")))
    (first, _), (second, points), (third, anew) = names
    assert first == second, "the same experiment"
    assert points == [2000], "1500 was sent before the run was killed"
    assert third != first, "a run that starts from the beginning is another one"
    assert anew == [500]


def test_a_run_is_tracked_by_all_and_survives_one(cli, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Namespace(origin="here"))
    wandb, trackio = fake("wandb"), fake("trackio", "log")
    flags = (*SMALL, "--output_dir", tmp_path, "--track", "wandb", "trackio")
    code, _, err = cli(*flags)
    assert code == 0
    assert err.count("WARNING: --track trackio failed (log is broken); the run continues without it") == 1
    for name in ("train_loss", "mask/edge", "image, score, mask, reconstruction"):
        assert wandb.points(name) == [1000, 2000]
    assert not trackio.points("mask/edge")[1:]
    assert not list(tmp_path.glob("events*")), "TensorBoard was not asked for"
    assert cli(*SMALL, "--output_dir", tmp_path / "none", "--track")[0] == 0
    assert not list((tmp_path / "none").glob("events*"))
    assert len(log_lines(tmp_path / "none")) == 2


def test_a_missing_package_is_an_error_at_the_start(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "out", "--track", "wandb")
    assert code == 2
    assert "--track wandb needs a package that is not installed: pip install wandb" in err
    assert not (tmp_path / "out").exists()


TWICE = """
import sys
import util.board
assert not {"wandb", "trackio"} & set(sys.modules), "imported only when asked for"
import main_pretrain
from util.cli import setup_logging
setup_logging()
for epochs in ("1", "2"):
    main_pretrain.main(main_pretrain.get_args_parser().parse_args([*sys.argv[1:], "--epochs", epochs]))
"""


@pytest.mark.slow
def test_the_real_ones_offline(tmp_path):
    """A run and its resumption; nothing that they started outlives them."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    out, database = tmp_path / "out", tmp_path / "trackio"
    environment = {**ENVIRONMENT, "WANDB_MODE": "offline", "TRACKIO_DIR": str(database), "HF_HUB_OFFLINE": "1"}
    flags = (*SMALL, "--output_dir", out, "--track", "wandb", "trackio", "--resume", "auto", "--allow_changes")
    done = run_to_end([sys.executable, "-c", TWICE, *flags], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--track" not in done.stderr
    assert not processes_with(str(tmp_path))
    number = json.loads((out / "wandb.json").read_text())["id"]
    assert [path.name.rsplit("-", 1)[1] for path in (out / "wandb").glob("offline-run-*")] == [number] * 2
    assert len(list((out / "wandb").glob("offline-run-*/files/media/images/*.png"))) == 2
    rows = sqlite3.connect(database / "clmae.db").execute("select run_name, step, metrics from metrics").fetchall()
    assert [row[1] for row in rows] == [1000, 2000]
    assert len({row[0] for row in rows}) == 1
    losses = [json.loads(row[2])["train_loss"] for row in rows]
    assert losses == [pytest.approx(line["train_loss"]) for line in log_lines(out)]
    assert len(list(database.rglob("*.png"))) == 2
