"""Runs as jobs of a SLURM cluster: an array of pretrainings, and arrays of evaluations that wait for them.

Nothing here waits. The same command, given again, leaves alone what is in the queue, submits once more what ended
without a result, and shows the table so far.
"""

import copy
import json
import subprocess
from argparse import Namespace
from pathlib import Path

from experiments.plan import Run, Step, data_folder
from util.checkpoint import write_text
from util.cli import UserError
from util.training.launcher import Run as Job
from util.training.launcher import build_executor, submit

JOBS = "jobs.json"  # in a run's folder: the number of each step's last job
PATIENCE = 60  # seconds that SLURM has for an answer


def submit_all(runs: list[Run], args: Namespace) -> dict[Run, str]:
    """Submit what is neither done nor in the queue; returns runs whose last job ended without a result, and why not."""
    failed = {run: f"no result from {', '.join(lost)}" for run in runs if (lost := lost_jobs(run))}
    new = [run for run in runs if is_free(run, run.pretrain)]
    array = submit_array(new, [run.pretrain for run in new], args)
    for position in range(len(runs[0].evaluations)):
        follow(new, position, args, after_each(array))
        done = [run for run in runs if run.is_done(run.pretrain)]
        follow([run for run in done if is_free(run, run.evaluations[position])], position, args)
        for run in runs:  # pretrainings that an earlier call submitted, for a recipe without this evaluation
            if run not in new and run not in done and is_free(run, run.evaluations[position]):
                follow([run], position, args, f"afterok:{job_of(run, run.pretrain)}")
    return failed


def follow(runs: list[Run], position: int, args: Namespace, after: str | None = None) -> None:
    """Submit the evaluations at a position of the runs' lists. They are small: a node is enough."""
    submit_array(runs, [run.evaluations[position] for run in runs], Namespace(**{**vars(args), "nodes": 1}), after)


def submit_array(runs: list[Run], steps: list[Step], args: Namespace, after: str | None = None) -> list[str]:
    """A job for each step, and a note of it in its run's folder; returns their numbers."""
    if not runs:
        return []
    program, flags = steps[0].program, [job_args(step, args) for step in steps]
    job = Namespace(**{**vars(args), "job_dir": str(data_folder(args) / "slurm" / "%j")})
    job.num_workers = flags[0].num_workers
    jobs = submit(build_executor(program, job, after), [Job(program, each) for each in flags], job)
    for run, step, submitted in zip(runs, steps, jobs, strict=True):
        note_job(run, step, submitted.job_id)
    return [submitted.job_id for submitted in jobs]


def job_args(step: Step, args: Namespace) -> Namespace:
    """A step's flags, with the device of the job's machines rather than of this one."""
    flags = copy.copy(step.args())
    flags.device = args.device or ("cuda" if args.ngpus else "cpu")
    flags.output_dir = str(Path(flags.output_dir).resolve())
    return flags


def after_each(array: list[str]) -> str | None:
    """The condition that lets each job of a second array start when its counterpart of the first has succeeded."""
    if not array:
        return None
    number, _, task = array[0].partition("_")
    return f"aftercorr:{number}" if task else f"afterok:{number}"


def is_free(run: Run, step: Step) -> bool:
    """Whether a step is neither done nor in the queue."""
    return not run.is_done(step) and not in_queue(job_of(run, step))


def lost_jobs(run: Run) -> list[str]:
    """Steps whose job is no longer in the queue, without having left a result."""
    return [
        f"job {job} ({step.title})"
        for step in run.steps
        if (job := job_of(run, step)) and not run.is_done(step) and not in_queue(job)
    ]


def job_of(run: Run, step: Step) -> str | None:
    file = run.folder / JOBS
    return json.loads(file.read_text()).get(key_of(step)) if file.exists() else None


def note_job(run: Run, step: Step, job: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    file = run.folder / JOBS
    jobs = json.loads(file.read_text()) if file.exists() else {}
    write_text(file, json.dumps(jobs | {key_of(step): job}, indent=1) + "\n")


def key_of(step: Step) -> str:
    features = "" if step.protocol is None else f", {Path(step.args().output_dir).name}"
    return f"{step.title}{features}"


def in_queue(job: str | None) -> bool:
    if job is None:
        return False
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={job}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"SLURM does not answer ({error}); try again later") from None
    return job in answer.stdout.split()
