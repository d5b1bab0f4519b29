"""Runs killed with SIGKILL at random moments end as if nothing had happened: same weights, optimizers and log."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import ROOT, processes_with, run_to_end, torchrun
from small_runs import SMALL, assert_same_training, checkpoint

KILLS = 6  # in one process, and as many under torchrun
FLAGS = (
    *(*SMALL, "--shapes_images", 480, "--epochs", 10),
    *("--global_batch_size", 16, "--save_every", 2, "--save_minutes", 0.002),
)


def command(processes: int, folder: Path, *flags) -> list[str]:
    program = (ROOT / "main_pretrain.py", *FLAGS, "--output_dir", folder, *flags)
    return torchrun(processes, *program) if processes > 1 else [sys.executable, *map(str, program)]


def last_save(folder: Path) -> int:
    file = folder / "checkpoint-last.pth"
    return file.stat().st_mtime_ns if file.exists() else 0


def kill(process: subprocess.Popen, folder: Path, moments: random.Random) -> None:
    """All processes of the run at once or, as often, just one: a process of several, or a loader."""
    everyone = processes_with(str(folder))
    victims = [moments.choice(everyone)] if moments.random() < 0.5 else everyone
    for pid in victims:
        with suppress(ProcessLookupError):  # a loader may have gone with its parent
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)
    for _ in range(600):  # loaders notice within seconds that they are alone
        if not processes_with(str(folder)):
            return
        time.sleep(0.1)
    raise AssertionError("processes are left over")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Runs of one and of two processes, each made when it is first asked for."""
    made = {}

    def run(processes: int) -> Path:
        if processes not in made:
            folder = made[processes] = tmp_path_factory.mktemp("whole") / "run"
            done = run_to_end(command(processes, folder, "--num_workers", 1))
            assert done.returncode == 0, done.stderr
        return made[processes]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_runs_end_as_if_nothing_had_happened(background, uninterrupted, tmp_path, processes):
    folder, moments, resumed_within_an_epoch = tmp_path / "run", random.Random(processes), 0
    for _ in range(KILLS):
        flags = ("--resume", "auto", "--num_workers", moments.randrange(3))
        saved_before = last_save(folder)
        process, said = background(command(processes, folder, *flags))
        at_work = moments.random() < 0.7  # or else still about to begin
        while last_save(folder) == saved_before if at_work else "checkpoint" not in said.read_text():
            assert process.poll() is None, said.read_text()
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.7))
        kill(process, folder, moments)
        text = said.read_text()
        resumed_within_an_epoch += "resuming from" in text and ", after 0 of its updates" not in text
    assert resumed_within_an_epoch
    done = run_to_end(command(processes, folder, "--resume", "auto", "--num_workers", 1))
    assert done.returncode == 0, done.stderr

    whole = uninterrupted(processes)
    for name in (1, 9, "last"):
        assert_same_training(checkpoint(folder, name), checkpoint(whole, name))
    assert (folder / "log.txt").read_bytes() == (whole / "log.txt").read_bytes()
