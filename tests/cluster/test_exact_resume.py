"""Runs killed with SIGKILL at random moments end as if nothing had happened: same weights, optimizers and log.

A dozen kills by default; KILLS=100 pytest tests/cluster/test_exact_resume.py makes a hundred, KILLS_SEED other ones.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from processes import ROOT, processes_with, torchrun
from small_runs import DATA, SMALL, assert_same_training, checkpoint

import main_finetune
import main_pretrain

KILLS = int(os.environ.get("KILLS", 12)) // 4  # of pretraining and fine-tuning, in one process and in two
EPOCHS = 4 + 2 * KILLS  # long enough that no run ends before its last kill
LENGTH = ("--shapes_images", 240, "--epochs", EPOCHS, "--save_every", 2)
FLAGS = {
    main_pretrain: (*SMALL, *LENGTH, "--global_batch_size", 16),
    main_finetune: ("--model", "vit_micro_patch4", "--input_size", 16, *DATA, *LENGTH, "--drop_path", 0.1),
}


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


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("module", FLAGS)
def test_killed_runs_end_as_if_nothing_had_happened(background, program, two_processes, tmp_path, module, processes):
    name, folder = module.__name__, tmp_path / "run"
    flags = (*FLAGS[module], *(("--batch_size", 16 // processes) if module is main_finetune else ()))
    finish = partial(program, module) if processes == 1 else partial(two_processes, name)
    assert finish(*flags, "--output_dir", tmp_path / "whole")[0] in (0, [0, 0])

    moments, resumed_within_an_epoch = random.Random(f"{name} {processes} {os.environ.get('KILLS_SEED')}"), 0
    for number in range(KILLS):
        command = (ROOT / f"{name}.py", *flags, "--output_dir", folder, "--resume", "auto", "--save_minutes", 0.002)
        command = [*map(str, command), "--num_workers", str(moments.randrange(3))]
        saved_before = last_save(folder)
        process, said = background(torchrun(2, *command) if processes > 1 else [sys.executable, *command])
        at_work = not number or moments.random() < 0.7  # or else still about to begin
        while last_save(folder) == saved_before if at_work else "checkpoint" not in said.read_text():
            if process.poll() is not None:
                break
            time.sleep(0.01)
        if process.poll() is not None:  # kills that come late let a run reach its end
            assert (process.returncode, number > KILLS // 2) == (0, True), said.read_text()
            break
        time.sleep(moments.uniform(0, 0.4))
        kill(process, folder, moments)
        text = said.read_text()
        resumed_within_an_epoch += "resuming from" in text and ", after 0 of its updates" not in text
    assert resumed_within_an_epoch
    assert finish(*flags, "--output_dir", folder, "--resume", "auto")[0] in (0, [0, 0])

    for name in (1, EPOCHS - 1, "last"):
        assert_same_training(checkpoint(folder, name), checkpoint(tmp_path / "whole", name))
    assert (folder / "log.txt").read_bytes() == (tmp_path / "whole" / "log.txt").read_bytes()
