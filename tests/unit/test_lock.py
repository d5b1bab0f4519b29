"""A folder has one run at a time, and a dead run holds no lock."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from util import lock
from util.cli import UserError
from util.lock import locked, sole_run

NAME = ".run.lock"
HOLDER = """
import sys, time
from pathlib import Path
from util.lock import locked
with locked(Path(sys.argv[1]), ".run.lock"):
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    time.sleep(100)
"""


def no_flock(*_):
    raise OSError(95, "Operation not supported")


@pytest.fixture(params=["flock", "heartbeat"])
def kind(request, monkeypatch):
    monkeypatch.setattr(lock, "SETTLE", 0.05)
    if request.param == "heartbeat":
        monkeypatch.setattr(fcntl, "flock", no_flock)
    return request.param


@contextlib.contextmanager
def another_process(folder):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def enter(folder, patience=0.0):
    with locked(folder, NAME, patience):
        pass


def test_the_second_is_told_who_the_first_is(tmp_path, kind):
    with locked(tmp_path / "out", NAME):
        first = f"process {os.getpid()} on {re.escape(socket.gethostname())}, since 20"
        with pytest.raises(UserError, match=f"--output_dir {tmp_path}/out is in use by {first}"):
            enter(tmp_path / "out")
        enter(tmp_path / "other")
    enter(tmp_path / "out")


def test_a_killed_run_holds_nothing(tmp_path):
    with another_process(tmp_path) as process:
        with pytest.raises(UserError, match=f"in use by process {process.pid} on"):
            enter(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        enter(tmp_path)


def test_one_that_is_about_to_end_is_waited_for(tmp_path, kind):
    with contextlib.ExitStack() as first:
        first.enter_context(locked(tmp_path, NAME))
        timer = lock.threading.Timer(0.3, first.close)
        timer.start()
        enter(tmp_path, patience=60)
        timer.join()


def test_loaders_that_outlive_a_run_hold_nothing(tmp_path):
    """A run is killed; its loaders, forked while it held the lock, take seconds to notice."""
    with contextlib.ExitStack() as run:
        run.enter_context(locked(tmp_path, NAME))
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        loader = context.Process(target=lambda: (begun.set(), time.sleep(100)))
        loader.start()
        begun.wait()
    try:
        enter(tmp_path)
    finally:
        loader.kill()
        loader.join()


def test_a_heartbeat_that_stopped_counts_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SETTLE", 0.05)
    monkeypatch.setattr(fcntl, "flock", no_flock)
    alive = tmp_path / f"{NAME}.alive"
    gone = subprocess.Popen(["true"])
    gone.wait()
    here, elsewhere = socket.gethostname(), "another-machine"
    alive.write_text(json.dumps({"host": here, "pid": gone.pid, "since": "today"}))
    enter(tmp_path)  # its process is gone
    assert not alive.exists()

    alive.write_text(json.dumps({"host": elsewhere, "pid": 1, "since": "today"}))
    with pytest.raises(UserError, match="in use by process 1 on another-machine, since today"):
        enter(tmp_path)
    long_ago = time.time() - lock.STALE - 1
    os.utime(alive, (long_ago, long_ago))
    enter(tmp_path)

    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    with locked(tmp_path, NAME):
        os.utime(alive, (long_ago, long_ago))
        while alive.stat().st_mtime == long_ago:
            time.sleep(0.01)
        with pytest.raises(UserError, match="in use"):
            enter(tmp_path)


def test_of_two_who_take_over_a_stale_file_one_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_flock)
    alive = tmp_path / f"{NAME}.alive"
    alive.write_text("{}")
    os.utime(alive, (0, 0))
    monkeypatch.setattr(time, "sleep", lambda _: alive.write_text("the other was later"))
    with pytest.raises(UserError, match="in use"):
        enter(tmp_path)


def test_the_first_process_takes_the_lock_for_its_run(tmp_path, monkeypatch):
    """If it is too late, all of them end: `on_first_process` sees to that."""
    monkeypatch.setattr(lock, "PATIENCE", 0)
    with sole_run(str(tmp_path)):
        with pytest.raises(UserError, match="in use by process"), sole_run(str(tmp_path)):
            pass
        monkeypatch.setattr(lock, "on_first_process", lambda work: None)  # as for the others
        with sole_run(str(tmp_path)):
            pass
    monkeypatch.undo()
    with sole_run(str(tmp_path)), sole_run(""), sole_run(""):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir .*file/out cannot be written: Not a directory"):
        enter(tmp_path / "file" / "out")
