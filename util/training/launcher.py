"""One launcher for all main programs: submits a program as a cluster job that is requeued until it is done.

    python submitit_pretrain.py --nodes 8 --ngpus 8 --model mae_vit_base --data_path /data/imagenet
    python submitit_eval.py --task knn --finetune runs/clmae --data_path /data/imagenet

A job that times out or is preempted saves its state, is requeued, and resumes from there.
"""

import copy
import importlib
import itertools
import os
import shutil
import signal
import sys
import time
from argparse import Namespace, _ArgumentGroup
from contextlib import suppress
from glob import glob
from pathlib import Path

import submitit
import torch.distributed as dist
from submitit.core import utils
from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError

from util.arguments import DEFAULT_OUTPUT_DIR, settle_shared_args
from util.checkpoint import any_checkpoint
from util.cli import ROOT, ArgumentParser, Interrupted, UserError, count, count_or_zero, logger, positive, setup_logging
from util.hub import is_hub_name
from util.program import end_children, flags_named, is_echo

SIGNAL_DELAY = 120  # seconds between the cluster's warning and the end of the job: time to finish a step and save
PATIENCE = 30 * 60  # seconds that a saved job waits for the cluster to end it; longer than any usual grace period
MOST_TIMEOUTS = 10_000  # requeues after a time-out; in effect unlimited


def add_job_arguments(parser: ArgumentParser) -> None:
    job = parser.add_argument_group("job")
    job.add_argument("--job_dir", default="./output_dir/%j", help="logs, and default --output_dir; %%j: job id")
    add_resource_arguments(job)
    job.add_argument(
        "--cluster",
        default="slurm",
        choices=["slurm", "local", "debug"],
        help="local: processes on this machine; debug: this process, with pdb after an error",
    )
    job.add_argument(
        "--array",
        nargs="+",
        default=[],
        metavar="FLAG=V1,V2",
        help="a job for each value, as in seed=0,1,2; for several flags, each combination",
    )


def add_resource_arguments(job: _ArgumentGroup) -> None:
    """The resources a job requests from the cluster."""
    job.add_argument("--nodes", default=2, type=count, help="number of nodes")
    job.add_argument(
        "--ngpus", default=8, type=count_or_zero, help="GPUs and processes per node; 0: one process, no GPU"
    )
    job.add_argument("--timeout", default=4320, type=count, help="minutes until the job is requeued")
    job.add_argument("--partition", help="partition; default: the cluster's")
    job.add_argument("--account", help="account to charge; default: the cluster's")
    job.add_argument("--qos", help="quality of service; default: the cluster's")
    job.add_argument("--constraint", help="required node features")
    job.add_argument("--use_volta32", action="store_true", help="require the node feature volta32gb")
    job.add_argument("--comment", help="comment for the scheduler")
    job.add_argument("--mem_gb", type=positive, help="memory per node in GB; default: the cluster's")
    job.add_argument("--cpus_per_task", type=count, help="CPUs per process; default: one more than loader processes")


def job_flags() -> set[str]:
    """Names of the flags above, which concern the job, not the run."""
    parser = ArgumentParser()
    add_job_arguments(parser)
    return set(vars(parser.parse_args([])))


class ClusterJob:
    """A main program and its flags, called by every process of a job."""

    def __init__(self, program: str, args: Namespace):
        self.program, self.args = program, args

    def __call__(self) -> None:
        environment = submitit.JobEnvironment()
        setup_logging(timestamps=True)
        if environment.num_tasks > 1:  # set the environment as torchrun would
            processes = submitit.helpers.TorchDistributedEnvironment()
            # Keep an address that is already set, for clusters whose node names resolve to the wrong network.
            processes.master_addr = os.environ.get("MASTER_ADDR", processes.master_addr)
            processes.export(set_cuda_visible_devices=False, overwrite=True)
        try:
            importlib.import_module(self.program).main(self.own_args(environment.job_id))
            if dist.is_initialized():
                dist.destroy_process_group()
        except Interrupted as stop:
            logger.warning("%s", stop)
            requeue(environment, stop)
        finally:
            end_children()

    def own_args(self, job_id: str) -> Namespace:
        """The flags for this start of the job, which may not be its first: a cluster may also restart a job on its own
        after a node failure. A run with a checkpoint in its folder is resumed, however it began."""
        args = copy.deepcopy(self.args)
        args.output_dir = args.output_dir.replace("%j", job_id)
        begun = args.output_dir and any_checkpoint(Path(args.output_dir))
        if "resume" in args and not getattr(args, "eval", False) and (begun or not args.resume):
            args.resume = "auto"
        return args

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What submitit requeues."""
        return submitit.helpers.DelayedSubmission(self)


def requeue(environment: submitit.JobEnvironment, stop: Interrupted) -> None:
    """Let submitit requeue the job, which has saved its state; then exit.

    The program handled signals itself while it ran; now submitit's handlers are back, and the first process's requeues
    the job. After SIGTERM alone, the cluster decides: it kills a cancelled job, and requeues a preempted one, but only
    if that has not exited by itself.
    """
    asked_to_requeue = signal.Signals[f"SIG{environment.USR_SIG}"]
    if asked_to_requeue in stop.received and callable(signal.getsignal(asked_to_requeue)):
        signal.raise_signal(asked_to_requeue)
    if environment.cluster == "slurm":
        # Also, one process that exits would end the others, perhaps before the first has reached the scheduler.
        time.sleep(PATIENCE)
    sys.exit(Interrupted.exit_code)


def launch(program: str, parser: ArgumentParser, argv: list[str] | None = None) -> list[submitit.Job]:
    """Submit `program`, a module with a `main`, with the flags of `parser` and those of the job."""
    argv = sys.argv[1:] if argv is None else argv
    parser.prog = Path(sys.argv[0]).name
    add_job_arguments(parser)
    setup_logging()
    try:
        args = parser.parse_args(argv)
        variants = [program_args(parser.parse_args([*argv, *flags])) for flags in combinations(args.array)]
        if len(variants) > 1 and "%j" not in variants[0].output_dir:
            raise UserError(f"--array: the runs would share {variants[0].output_dir}; put %j, the job id, in its name")
        with flags_named(parser, args):
            for variant in variants:
                check_before_submission(program, variant)
            return submit(build_executor(program, args), [ClusterJob(program, variant) for variant in variants], args)
    except UserError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)


def check_before_submission(program: str, args: Namespace) -> None:
    """Run the program's own checks of its flags, so that no job waits in a queue only to fail on a typo. Data and
    checkpoints may not be visible from this machine, so if they are missing it only warns."""
    module = importlib.import_module(program)
    own = copy.deepcopy(args)
    settle_shared_args(own)
    if hasattr(module, "check_args"):  # main_knn.py and main_fewshot.py have only argparse's checks
        module.check_args(own)
    if args.data_set == "folder" and not args.data_path.startswith("hf:") and not glob(args.data_path):
        logger.warning("--data_path %s does not exist on this machine; do the cluster's nodes see it?", args.data_path)
    for flag in ("finetune", "init"):
        path = getattr(args, flag, "")
        if path and not is_hub_name(path) and not Path(path).exists():
            logger.warning("--%s %s does not exist on this machine; do the cluster's nodes see it?", flag, path)


def combinations(array: list[str]) -> list[list[str]]:
    """["seed=0,1"] to [["--seed", "0"], ["--seed", "1"]]; for several flags, all combinations."""
    choices = []
    for entry in array:
        name, equals, values = entry.partition("=")
        name = name.removeprefix("--")
        if not name or not equals or not all(values.split(",")):
            raise UserError(f"--array {entry}: give a flag and its values, as in --array seed=0,1,2")
        if name in job_flags():
            raise UserError(f"--array {entry}: --{name} is the same for all runs of an array")
        choices.append([(f"--{name}", value) for value in values.split(",")])
    return [list(itertools.chain(*choice)) for choice in itertools.product(*choices)]


def program_args(args: Namespace) -> Namespace:
    """The program's own flags, without those of the job."""
    if args.output_dir == DEFAULT_OUTPUT_DIR:
        args.output_dir = args.job_dir
    if args.device is None:
        args.device = "cuda" if args.ngpus else "cpu"
    return Namespace(**{name: value for name, value in vars(args).items() if name not in job_flags()})


def build_executor(program: str, args: Namespace, after: str | None = None) -> submitit.AutoExecutor:
    """The executor that submits `program`; a SLURM job starts when the condition `after` is met, as in afterok:123."""
    if args.cluster == "slurm" and shutil.which("srun") is None:
        raise UserError("there is no SLURM here (no srun); use --cluster local, or torchrun without a cluster")
    if args.cluster != "slurm" and args.nodes > 1:
        raise UserError(f"--cluster {args.cluster} runs on this machine only: use --nodes 1")
    if args.cluster == "debug" and args.ngpus > 1:
        raise UserError("--cluster debug runs in this process only: use --ngpus 1, or 0")
    # A job starts in the current folder, which need not be the project's.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    executor = submitit.AutoExecutor(args.job_dir, cluster=args.cluster, slurm_max_num_timeout=MOST_TIMEOUTS)
    cpus = args.cpus_per_task or args.num_workers + 1
    constraint = "&".join(filter(None, [args.constraint, "volta32gb" if args.use_volta32 else None]))
    slurm = {
        **{name: getattr(args, name) for name in ("partition", "account", "qos", "comment")},
        "constraint": constraint or None,
        "signal_delay_s": min(SIGNAL_DELAY, 60 * args.timeout // 4),
        # A process that fails ends all the others at once. And a step has to request its CPUs again.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}"],
        # A condition that can no longer be met would leave the job in the queue forever.
        "additional_parameters": {"dependency": after, "kill_on_invalid_dep": "yes"} if after else None,
    }
    common = {
        "name": program.removeprefix("main_"),
        "nodes": args.nodes,
        "tasks_per_node": max(args.ngpus, 1),
        "gpus_per_node": args.ngpus or None,
        "cpus_per_task": cpus,
        "mem_gb": args.mem_gb,
        "timeout_min": args.timeout,
    }
    given = common | {f"slurm_{name}": value for name, value in slurm.items()}
    executor.update_parameters(**{name: value for name, value in given.items() if value is not None})
    return executor


def submit(executor: submitit.AutoExecutor, runs: list[ClusterJob], args: Namespace) -> list[submitit.Job]:
    """SLURM takes all runs at once; on this machine they run one after another, as its devices are not allocated."""
    if args.cluster != "slurm":
        return [wait_for(executor.submit(run), args) for run in runs]
    try:
        with executor.batch():  # more than one run is a job array
            jobs = [executor.submit(run) for run in runs]
    except (FailedSubmissionError, FailedJobError) as error:
        raise UserError(f"the job was not accepted: {error}") from None
    for job in jobs:
        describe_job(job, args)
    return jobs


def wait_for(job: submitit.Job, args: Namespace) -> submitit.Job:
    describe_job(job, args)
    try:
        job.results()
    except UncompletedJobError as error:
        raise UserError(f"job {job.job_id} failed: {failure(job) or error}") from None
    finally:
        with suppress(OSError):  # submitit creates an empty folder of that literal name
            Path(args.job_dir).rmdir()
    return job


def failure(job: submitit.Job) -> str | None:
    """The traceback of the process that failed first, if it left one. The others only report a lost connection."""
    tracebacks = []
    for task in range(job.num_tasks):
        file = job.task(task).paths.result_pickle
        if file.exists():
            outcome, result = utils.pickle_load(file)
            tracebacks += [result] if outcome == "error" else []
    return min(tracebacks, key=is_echo, default=None)


def describe_job(job: submitit.Job, args: Namespace) -> None:
    logger.info("job %s", job.job_id)
    logger.info("  logs    %s", job.paths.folder)
    logger.info("  follow  tail -F %s", job.paths.stdout)
    if args.cluster == "slurm":
        logger.info("  state   squeue -j %s    end: scancel %s", job.job_id, job.job_id)
