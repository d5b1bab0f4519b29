"""When a run is saved, and that training continues meanwhile."""

import copy
import os
import signal
import threading
from argparse import Namespace
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

import util.checkpoint
from util.checkpoint import LAST, load_checkpoint
from util.cli import Interrupted, UserError
from util.misc import NativeScalerWithGradNormCount
from util.training import saver as module
from util.training.resume import TrainingState
from util.training.saver import Saver, StopRequest

LOG = SimpleNamespace(epoch=0, state_dict=dict)


@pytest.fixture
def clock(monkeypatch):
    """The time in minutes, as tests set it."""
    now = SimpleNamespace(minutes=0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 60.0 * now.minutes))
    return now


@pytest.fixture
def writes(monkeypatch):
    """(file, epoch, step) of each write. Writes wait while the disk is not `free`, and fail for names in `full`."""
    disk = SimpleNamespace(free=threading.Event(), full=set(), seen=[])
    disk.free.set()

    def save(path, state, original=util.checkpoint.save_checkpoint):
        assert disk.free.wait(60)
        disk.seen.append((path.name, state["epoch"], state["step"]))
        if path.name in disk.full:
            raise UserError(f"cannot write the checkpoint {path} (No space left on device)")
        original(path, state)

    monkeypatch.setattr(util.checkpoint, "save_checkpoint", save)
    return disk


def build_saver(folder, stop=None, **flags):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    state = TrainingState(network, optimizer, NativeScalerWithGradNormCount("cpu", enabled=False))
    train(state)
    args = Namespace(**{"output_dir": str(folder), "epochs": 6, "save_minutes": 15, "save_every": 4, "keep": 0} | flags)
    return Saver(state, stop or StopRequest(), None, args)


def train(state):
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()


def run(saver, clock, minutes):
    """Epochs of two updates, each of which takes `minutes`."""
    with saver:
        for epoch in range(saver.args.epochs):
            for step in (2 * epoch + 1, 2 * epoch + 2):
                clock.minutes += minutes
                saver.after_update(step, SimpleNamespace(epoch=epoch, state_dict=dict))
            saver.after_epoch(epoch, step)


def test_saved_by_the_clock_every_few_epochs_and_at_the_end(tmp_path, clock, writes):
    run(build_saver(tmp_path), clock, minutes=3)  # due after five updates, counted from the last save
    numbered = [("checkpoint-3.pth", 3, 8), ("checkpoint-5.pth", 5, 12)]
    assert writes.seen == [(LAST, 1, 5), *numbered]
    assert (tmp_path / LAST).samefile(tmp_path / "checkpoint-5.pth")

    writes.seen.clear()
    run(build_saver(tmp_path), clock, minutes=0)
    assert writes.seen == numbered
    writes.seen.clear()
    run(build_saver(tmp_path, save_minutes=0), clock, minutes=20)
    after_epochs = [(LAST, epoch, 2 * epoch + 2) for epoch in (0, 1, 2, 4)]
    assert sorted(writes.seen) == sorted([*after_epochs, *numbered]), "0 is after every epoch, and only then"


def test_training_goes_on_while_its_state_is_written(tmp_path, clock, writes):
    writes.free.clear()
    with build_saver(tmp_path, save_minutes=1) as saver:
        before = copy.deepcopy(saver.state.state_dict())
        clock.minutes = 1
        saver.after_update(1, LOG)
        train(saver.state)
        assert not writes.seen
        writes.free.set()
    written = load_checkpoint(tmp_path / LAST)
    assert torch.equal(written["model"]["weight"], before["model"]["weight"])
    assert torch.equal(written["optimizer"]["state"][0]["exp_avg"], before["optimizer"]["state"][0]["exp_avg"])
    assert not torch.equal(written["model"]["weight"], saver.state.model.weight)
    assert written["model"]._metadata == saver.state.model.state_dict()._metadata


def test_a_signal_while_a_checkpoint_is_written_loses_neither(tmp_path, clock, writes):
    writes.free.clear()
    with StopRequest() as stop, build_saver(tmp_path, stop, save_minutes=1) as saver:
        clock.minutes = 1
        saver.after_update(1, LOG)
        train(saver.state)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, writes.free.set).start()
        with pytest.raises(Interrupted, match="stopped by SIGTERM after step 2"):
            saver.after_update(2, LOG)
    assert writes.seen == [(LAST, -1, 1), (LAST, -1, 2)]
    written = load_checkpoint(tmp_path / LAST)
    assert written["step"] == 2
    assert torch.equal(written["model"]["weight"], saver.state.model.weight)


def test_an_error_waits_for_the_checkpoint_being_written(tmp_path, clock, writes):
    writes.free.clear()
    with suppress(KeyboardInterrupt), build_saver(tmp_path, save_minutes=1) as saver:
        clock.minutes = 1
        saver.after_update(1, LOG)
        threading.Timer(0.1, writes.free.set).start()
        raise KeyboardInterrupt
    assert load_checkpoint(tmp_path / LAST)["step"] == 1


def test_a_full_disk_ends_the_run_only_where_no_later_save_can_make_up_for_it(tmp_path, clock, writes, clmae_log):
    writes.full = {LAST, "checkpoint-5.pth"}
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*checkpoint-5.pth"):
        run(build_saver(tmp_path), clock, minutes=3)
    assert clmae_log.text.count("checkpoint-last.pth (No space left on device); training continues") == 1
    assert (tmp_path / LAST).samefile(tmp_path / "checkpoint-3.pth")
