"""One run at a time per folder: a second run is refused and told which process holds it.

The system's lock (flock) goes with its process, however that ends: what a kill leaves behind blocks nobody. On file
systems without it, a file with a heartbeat stands in, and counts for nothing once the heartbeat has stopped.
"""

import datetime
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from util.checkpoint import is_alive, write_text
from util.cli import UserError
from util.misc import on_first_process

PATIENCE = 10  # seconds: processes whose torchrun was killed save first, and their successors may be here already
HEARTBEAT = 30  # seconds
STALE = 10 * HEARTBEAT
SETTLE = 2  # seconds after which a file that several have taken over belongs to the last of them


@contextmanager
def sole_run(output_dir: str, name: str = ".run.lock") -> Iterator[None]:
    """While entered, no other run enters with this folder. The first process takes the lock for all of its run."""
    with ExitStack() as stack:
        if output_dir:
            on_first_process(lambda: stack.enter_context(locked(Path(output_dir), name, PATIENCE)))
        yield


@contextmanager
def locked(folder: Path, name: str, patience: float = 0) -> Iterator[list[int]]:
    """Holds the lock `name` of a folder; if another process does, and after `patience` seconds still does, that is
    named. Gives the open files that a child has to inherit to hold it, too."""
    path, end = folder / name, time.monotonic() + patience
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (lock := take(path)) is None:
            if time.monotonic() >= end:
                user = shown_owner(path)
                raise UserError(
                    f"--output_dir {folder} is in use by {user}; wait for it to finish, or choose another folder"
                )
            time.sleep(0.1)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written: {error.strerror}") from None
    try:
        yield lock.files
    finally:
        lock.release()


def take(path: Path) -> "SystemLock | Heartbeat | None":
    file = open(path, "a+")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # this file system has no locks
        file.close()
        return Heartbeat.take(heartbeat_of(path), path)
    return SystemLock(file)


open_locks: set[int] = set()
# Loader processes outlive a killed run for seconds, and would hold what they inherit.
os.register_at_fork(after_in_child=lambda: [os.close(open_locks.pop()) for _ in range(len(open_locks))])


class SystemLock:
    """The file stays: another process may have opened it to lock it next."""

    def __init__(self, file: TextIO):
        self.file, self.files = file, [file.fileno()]
        open_locks.update(self.files)
        with suppress(OSError):  # on a full disk, it is a lock all the same
            file.truncate(0)
            file.write(owner())
            file.flush()

    def release(self) -> None:
        open_locks.difference_update(self.files)
        with suppress(OSError):  # of what a full disk did not take
            self.file.close()


class Heartbeat:
    """A file that exists while it is held, and whose time shows that its process lives."""

    def __init__(self, path: Path, text: str):
        self.path, self.text, self.ended = path, text, threading.Event()
        self.files: list[int] = []  # a child cannot inherit it
        threading.Thread(target=self.beat, daemon=True).start()

    @classmethod
    def take(cls, path: Path, clock: Path) -> "Heartbeat | None":
        """`clock` is any file beside it: the times of a shared disk are its server's, not this machine's."""
        text = owner()
        try:
            with open(path, "x") as file:
                file.write(text)
        except FileExistsError:
            os.utime(clock)
            if is_held(path, clock.stat().st_mtime):
                return None
            write_text(path, text)
            time.sleep(SETTLE)
            if path.read_text() != text:
                return None
        return cls(path, text)

    def beat(self) -> None:
        while not self.ended.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        self.ended.set()
        with suppress(OSError):
            if self.path.read_text() == self.text:
                self.path.unlink()


def heartbeat_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.alive")


def is_held(path: Path, now: float) -> bool:
    try:
        holder = json.loads(path.read_text())
        gone = holder["host"] == socket.gethostname() and not is_alive(holder["pid"])
    except (OSError, ValueError, LookupError, TypeError):  # not written yet, or removed meanwhile
        gone = False
    return path.exists() and not gone and now - path.stat().st_mtime < STALE


def owner() -> str:
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})


def shown_owner(path: Path) -> str:
    for file in (heartbeat_of(path), path):
        with suppress(OSError, ValueError, LookupError, TypeError):
            holder = json.loads(file.read_text())
            return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return "another process"
