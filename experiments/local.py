"""A queue of runs on this machine: as many at a time as it has devices for, each in processes of its own.

The first Ctrl-C (or SIGTERM) lets each program save its state and end; a second one does not wait for that. Whatever
ended the queue, the same command goes on where it was.
"""

import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.plan import Run, Step
from util.cli import Interrupted, UserError, logger

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Slot:
    """What one run at a time has to itself."""

    environment: dict[str, str]
    processes: int = 1


def machine_slots(ngpus: int, jobs: int | None) -> list[Slot]:
    """With GPUs, as many slots as there are groups of `ngpus`; otherwise `jobs` that share the cores evenly.

    Small models gain little from a second thread: by default each run has a core.
    """
    gpus = torch.cuda.device_count()
    if gpus and ngpus:
        if ngpus > gpus:
            raise UserError(f"--ngpus {ngpus}: this machine has {gpus}")
        groups = [range(first, first + ngpus) for first in range(0, gpus - ngpus + 1, ngpus)]
        return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(map(str, group))}, ngpus) for group in groups[:jobs]]
    cores = len(os.sched_getaffinity(0))
    jobs = jobs or cores
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(cores // jobs, 1))
    return [Slot({"OMP_NUM_THREADS": threads})] * jobs


def command(step: Step, processes: int) -> list[str]:
    script = [str(ROOT / f"{step.program}.py"), *step.flags]
    if processes == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *script]


class LocalQueue:
    def __init__(self, slots: list[Slot]):
        self.slots: queue.Queue[Slot] = queue.Queue()
        for slot in slots:
            self.slots.put(slot)
        self.width = len(slots)
        self.stopping = threading.Event()
        self.children: set[subprocess.Popen] = set()
        self.lock = threading.Lock()

    def work(self, runs: list[Run]) -> dict[Run, str]:
        """Do all that is not done yet; returns what failed, with a sentence on why. One failure stops no other run."""
        with ThreadPoolExecutor(self.width) as pool, self.orderly_end():
            problems = list(pool.map(self.one, runs))
        if self.stopping.is_set():
            raise Interrupted("stopped; the same command goes on from here", set())
        return {run: problem for run, problem in zip(runs, problems, strict=True) if problem}

    def one(self, run: Run) -> str | None:
        """The steps of a run, one after the other; returns what went wrong."""
        slot = self.slots.get()
        try:
            with own_folder(run.folder) as lock:
                if lock is None:
                    return "another process is at work in its folder"
                for step in run.steps:
                    if self.stopping.is_set():
                        return None
                    if not run.is_done(step) and (problem := self.call(run, step, slot, lock)):
                        return problem
            return None
        except UserError as error:
            return str(error)
        finally:
            self.slots.put(slot)

    def call(self, run: Run, step: Step, slot: Slot, lock: int) -> str | None:
        log, begun = run.folder / f"{step.program}.log", time.monotonic()
        logger.info("%s: %s", run.title, step.title)
        with open(log, "a") as file:
            # A session of its own: Ctrl-C reaches the queue alone, which then asks the programs to save.
            child = subprocess.Popen(
                command(step, slot.processes),
                stdout=file,
                stderr=file,
                env={**os.environ, **slot.environment},
                start_new_session=True,
                pass_fds=[lock],
            )
        with self.lock:
            self.children.add(child)
        if self.stopping.is_set():  # since before it was among the children
            self.tell(signal.SIGTERM)
        code = child.wait()
        with self.lock:
            self.children.remove(child)
        if self.stopping.is_set():
            return None
        if code or not run.is_done(step):
            return f"{step.title} ended with exit code {code}: {last_words(log)} (see {log})"
        logger.info("%s: %s took %.0f s", run.title, step.title, time.monotonic() - begun)
        return None

    @contextmanager
    def orderly_end(self):
        def stop(_number: int, _frame) -> None:
            again = self.stopping.is_set()
            self.stopping.set()
            logger.warning("stopping: %s", "now" if again else "programs save their state; once more: at once")
            self.tell(signal.SIGKILL if again else signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tell(self, number: signal.Signals) -> None:
        for child in list(self.children):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)


@contextmanager
def own_folder(folder: Path):
    """A lock on a run's folder, or None if another queue has it. The programs inherit it: even if a queue is killed,
    nothing else starts in a folder while its program lives."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    with open(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        yield file.fileno()


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
