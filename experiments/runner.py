"""Execute a plan: in a local queue, or as SLURM job arrays.

Either way, what is done is skipped, and the same command resumes what was interrupted.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from experiments.plan import Run, Step, data_folder
from util.checkpoint import write_text
from util.cli import ROOT, Interrupted, UserError, logger
from util.lock import locked
from util.misc import available_cpus
from util.training.launcher import ClusterJob, build_executor, submit

PATIENCE = 60  # seconds that SLURM has for an answer
Slot = tuple[dict[str, str], int]  # what one run at a time has to itself: environment, and number of processes


def command(step: Step, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    program = ["-m", step.program] if "." in step.program else [os.path.relpath(ROOT / f"{step.program}.py")]
    return [*(launcher if processes > 1 else []), *program, *step.flags]


def work(runs: list[Run], args: Namespace) -> dict[Run, str]:
    """Do or submit all that is not done yet; returns what failed, and why."""
    if args.cluster == "slurm":
        return submit_all(runs, args)
    return LocalQueue(machine_slots(args.ngpus, args.jobs)).work(runs)


# --- On this machine ---


def machine_slots(ngpus: int, jobs: int | None) -> list[Slot]:
    """With GPUs, as many slots as there are groups of `ngpus`; otherwise `jobs` that share the cores evenly.

    Small models gain little from a second thread: by default each run has a core.
    """
    gpus = torch.cuda.device_count()
    if gpus and ngpus:
        if ngpus > gpus:
            raise UserError(f"--ngpus {ngpus}: this machine has {gpus}; give at most that")
        groups = [range(first, first + ngpus) for first in range(0, gpus - ngpus + 1, ngpus)]
        return [({"CUDA_VISIBLE_DEVICES": ",".join(map(str, group))}, ngpus) for group in groups[:jobs]]
    cores = available_cpus()
    jobs = jobs or cores
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(cores // jobs, 1))
    return [({"OMP_NUM_THREADS": threads}, 1)] * jobs


class LocalQueue:
    """As many runs at a time as there are slots, each in processes of its own.

    The first Ctrl-C (or SIGTERM) lets each program save its state and end; a second one does not wait for that.
    """

    def __init__(self, slots: list[Slot]):
        self.slots = list(slots)  # those that are free
        self.stopping = threading.Event()
        self.children: set[subprocess.Popen] = set()

    def work(self, runs: list[Run]) -> dict[Run, str]:
        """Do all that is not done yet; returns what failed, and why. One failure stops no other run."""
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ThreadPoolExecutor(len(self.slots)) as pool:
                problems = list(pool.map(self.one, runs))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopping.is_set():
            raise Interrupted("stopped; the same command resumes from here", set())
        return {run: problem for run, problem in zip(runs, problems, strict=True) if problem}

    def one(self, run: Run) -> str | None:
        """The steps of a run, one after the other; returns what went wrong."""
        slot = self.slots.pop()
        try:
            with locked(run.folder, ".lock") as lock:
                for step in run.steps:
                    if self.stopping.is_set():
                        return None
                    if not run.is_done(step) and (problem := self.call(run, step, slot, lock)):
                        return problem
            return None
        except UserError as error:
            return str(error)
        finally:
            self.slots.append(slot)

    def call(self, run: Run, step: Step, slot: Slot, lock: list[int]) -> str | None:
        """The program inherits the lock: even if the queue is killed, nothing else starts in its folder meanwhile."""
        log, begun, (environment, processes) = run.folder / f"{step.program}.log", time.monotonic(), slot
        logger.info("%s: %s", run.title, step.title)
        with open(log, "a") as file:
            # A session of its own: Ctrl-C reaches the queue alone, which then asks the programs to save.
            words, env = [sys.executable, *command(step, processes)], {**os.environ, **environment}
            child = subprocess.Popen(words, stdout=file, stderr=file, env=env, start_new_session=True, pass_fds=lock)
        self.children.add(child)
        if self.stopping.is_set():  # since before it was among the children
            self.tell(signal.SIGTERM)
        code = child.wait()
        self.children.remove(child)
        if self.stopping.is_set():
            return None
        if code or not run.is_done(step):
            last_line = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            return f"{step.title} ended with exit code {code}: {last_line} (see {log})"
        logger.info("%s: %s took %.0f s", run.title, step.title, time.monotonic() - begun)
        return None

    def stop(self, _number: int, _frame) -> None:
        again = self.stopping.is_set()
        self.stopping.set()
        logger.warning("stopping %s", "now" if again else "once the programs have saved; repeat to stop at once")
        self.tell(signal.SIGKILL if again else signal.SIGTERM)

    def tell(self, number: signal.Signals) -> None:
        for child in list(self.children):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)


# --- On a cluster: nothing here waits ---


def submit_all(runs: list[Run], args: Namespace) -> dict[Run, str]:
    """Submit what is neither done nor in the queue: an array of pretrainings, and for each evaluation an array that
    waits for them. Returns the runs whose last job ended without a result."""
    failed: dict[Run, str] = {}
    if not runs:
        return failed
    for run in runs:
        free = {step.title: job_of(run, step) for step in run.steps if is_free(run, step)}
        if lost := [f"job {job} ({title})" for title, job in free.items() if job]:
            failed[run] = f"no result from {', '.join(lost)}"
    new = [run for run in runs if is_free(run, run.pretrain)]
    array = submit_array({run: run.pretrain for run in new}, args)
    args = Namespace(**{**vars(args), "nodes": 1})  # enough for an evaluation
    for position in range(1, len(runs[0].steps)):
        waiting: dict[str | None, dict[Run, Step]] = {}
        for run in runs:
            step = run.steps[position]
            if run in new:  # a job of an array waits for its counterpart
                number, _, task = array[0].partition("_")
                condition = f"{'aftercorr' if task else 'afterok'}:{number}"
            elif not is_free(run, step):
                continue
            else:  # an earlier call may have submitted the pretraining, for a recipe without this evaluation
                condition = None if run.is_done(run.pretrain) else f"afterok:{job_of(run, run.pretrain)}"
            waiting.setdefault(condition, {})[run] = step
        for condition, steps in waiting.items():
            submit_array(steps, args, condition)
    return failed


def submit_array(steps: dict[Run, Step], args: Namespace, after: str | None = None) -> list[str]:
    """A job for each step, noted in its run's folder; returns their numbers."""
    if not steps:
        return []
    flags = [step.args() for step in steps.values()]
    for each in flags:  # the device of the job's machines rather than of this one
        each.device = args.device or ("cuda" if args.ngpus else "cpu")
        each.output_dir = str(Path(each.output_dir).resolve())
    program = next(iter(steps.values())).program
    job = Namespace(**{**vars(args), "job_dir": str(data_folder(args) / "slurm" / "%j")})
    job.num_workers = flags[0].num_workers
    jobs = submit(build_executor(program, job, after), [ClusterJob(program, each) for each in flags], job)
    for (run, step), submitted in zip(steps.items(), jobs, strict=True):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(job_file(run, step), f"{submitted.job_id}\n")
    return [submitted.job_id for submitted in jobs]


def is_free(run: Run, step: Step) -> bool:
    """Whether a step is neither done nor in the queue."""
    return not run.is_done(step) and not in_queue(job_of(run, step))


def job_file(run: Run, step: Step) -> Path:
    """Holds the number of the step's last job."""
    features = "" if step.protocol is None else f"-{step.data}-{Path(step.args().output_dir).name}"
    return run.folder / f"{step.program}{features}.job"


def job_of(run: Run, step: Step) -> str | None:
    file = job_file(run, step)
    return file.read_text().strip() if file.exists() else None


def in_queue(job: str | None) -> bool:
    if job is None:
        return False
    squeue = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={job}"]
    try:
        answer = subprocess.run(squeue, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"SLURM does not answer ({error}); try again later") from None
    return job in answer.stdout.split()
