"""Repeat a table or figure of the paper: pretrain, evaluate, and show the results beside the paper's.

    python -m experiments.run --list
    python -m experiments.run losses --scale full --cluster slurm --data_path /data/imagenet --partition NAME
    python -m experiments.run losses --scale small --data_set cifar10 --data_path data --seeds 0 1 2

With no images and no network, in a few minutes; --pretrain comes last, and its flags go to all pretrainings:
    python -m experiments.run main_results --scale small --data_set shapes --pretrain --epochs 2

What is done is skipped and what was interrupted goes on, so the same command may be given again at any time.
"""

import os
import platform
import shlex
import sys
import textwrap
from argparse import REMAINDER, Namespace
from pathlib import Path

import torch

import main_pretrain
import main_visualize
from experiments import cluster
from experiments.local import LocalQueue, machine_slots
from experiments.plan import Run, Step, check_settings, data_folder, expand
from experiments.recipe import Recipe, load_recipe, recipe_names, recipe_text
from experiments.scale import SCALES, data_name, source_flags
from experiments.table import build_tables
from util.arguments import DATA_SETS
from util.checkpoint import write_text
from util.cli import ArgumentParser, UserError, logger, run
from util.data.sources import build_source
from util.evaluation.tables import SIGNIFICANT, Table, as_markdown, as_text
from util.training.launcher import add_resource_arguments


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="files of experiments/recipes, in this order")
    parser.add_argument("--list", action="store_true", help="tell what each recipe runs, costs, and should reach")
    parser.add_argument("--dry_run", action="store_true", help="show the commands, and run nothing")
    parser.add_argument("--table_only", action="store_true", help="show the table of what is there, and run nothing")

    what = parser.add_argument_group("what to run")
    what.add_argument("--scale", default="small", choices=list(SCALES), help="the paper's, or a laptop's")
    what.add_argument("--seeds", default=[0], type=int, nargs="+", help="a pretraining for each; gives deviations")
    what.add_argument("--data_set", default="folder", choices=DATA_SETS, help="to pretrain on; shapes is built in")
    what.add_argument("--data_path", default=None, help="where it lies")
    what.add_argument("--download", action="store_true", help="let torchvision fetch it to there first")
    what.add_argument("--downstream_path", default=None, help="folder with the downstream sets (docs/datasets.md)")
    what.add_argument(
        "--features", default="cls_token", choices=["cls_token", "global_pool"], help="what evaluations see of an image"
    )
    what.add_argument("--output_dir", default="./output_dir/experiments", help="runs, tables and figures")
    what.add_argument(
        "--pretrain", default=[], nargs=REMAINDER, metavar="FLAG", help="all that follows: flags for main_pretrain.py"
    )

    where = parser.add_argument_group("where to run it")
    where.add_argument("--cluster", default="local", choices=["local", "slurm"], help="this machine, or job arrays")
    where.add_argument("--jobs", default=None, type=int, help="local: runs at a time; default: as devices allow")
    where.add_argument("--device", default=None, help="default: cuda if there is one, else cpu")
    add_resource_arguments(where)
    parser.set_defaults(nodes=1, ngpus=None)
    return parser


def check_args(args: Namespace) -> None:
    if not args.recipes:
        raise UserError(f"which recipe? There are {', '.join(recipe_names())}; --list describes them")
    if len(set(args.seeds)) < len(args.seeds):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: each seed once")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} must be at least 1")
    if args.ngpus is None:
        here = torch.cuda.device_count()
        largest = 8 if args.cluster == "slurm" else here
        args.ngpus = largest if args.scale == "full" else min(largest, 1)


def fetch(example: Run) -> None:
    """Download the data once, before many programs want it at the same time."""
    args = example.pretrain.args()
    main_pretrain.check_args(args)
    args.download = True
    for split in ("pretrain", "val"):
        build_source(args, split)


def show_commands(runs: list[Run], args: Namespace) -> None:
    """What a user would type instead, in this order; what is done already is marked."""
    for each in runs:
        for step in each.steps:
            logger.info("%s%s", "# done: " if each.is_done(step) else "", job_command(step, args))


def job_command(step: Step, args: Namespace) -> str:
    flags = shlex.join(step.flags)
    if args.cluster == "local":
        launcher = "python" if args.ngpus < 2 else f"torchrun --standalone --nproc_per_node={args.ngpus}"
        return f"{launcher} {step.program}.py {flags}"
    task, nodes = step.program.removeprefix("main_"), args.nodes if step.protocol is None else 1
    script = "submitit_pretrain.py" if step.protocol is None else f"submitit_eval.py --task {task}"
    partition = f" --partition {args.partition}" if args.partition else ""
    return f"python {script} --nodes {nodes} --ngpus {args.ngpus}{partition} {flags}"


def work(runs: list[Run], args: Namespace) -> dict[Run, str]:
    """Do, or submit, what is not done; returns the runs that failed."""
    if args.cluster == "slurm":
        return cluster.submit_all(runs, args)
    return LocalQueue(machine_slots(args.ngpus, args.jobs)).work(runs)


def report(name: str, recipe: Recipe, runs: list[Run], failed: dict[Run, str], args: Namespace) -> None:
    """Show the tables, and write them and the figures below the data's folder."""
    folder = data_folder(args)
    tables = build_tables(recipe, runs, args)
    logger.info("%s", "\n\n".join([f"\n{recipe.title}", *map(as_text, tables)]))
    finished = [each for each in runs if each not in failed and each.checkpoint().exists()]
    parts = [f"# {recipe.title}", describe(name, runs[0], finished, args), *map(as_markdown, tables)]
    parts += ["\n".join(f"- {note}" for note in notes(runs, failed, tables))]
    path = folder / f"{name}-{args.features}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    logger.info("\n%s", "\n".join([*notes(runs, failed, tables), f"written to {path}"]))
    if recipe.pictures:
        draw(recipe, runs, folder / name, args)


def describe(name: str, example: Run, finished: list[Run], args: Namespace) -> str:
    """What the figures were obtained with."""
    settings = example.pretrain.args()
    commits = sorted({str(each.settings().get("commit")) for each in finished})
    hardware = processor() if args.cluster == "local" else f"{args.nodes} x {args.ngpus} GPUs of a cluster"
    return (
        f"`python -m experiments.run {name}`, scale {args.scale}, data {data_name(args)}; {settings.model}, "
        f"{settings.epochs} epochs, seeds {', '.join(map(str, args.seeds))}, features {args.features}. "
        f"Commit {', '.join(commits) or 'none yet'}; {hardware}; torch {torch.__version__}."
    )


def processor() -> str:
    """The GPU, or else the CPU, that this machine has."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of a CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def notes(runs: list[Run], failed: dict[Run, str], tables: list[Table]) -> list[str]:
    found = ["±: one standard deviation over pretraining seeds"] if len({each.seed for each in runs}) > 1 else []
    if any(group.heading.startswith("over ") for table in tables for group in table.groups):
        found.append(
            "gain: mean over seeds, each against the baseline's same seed; p: exact two-sided McNemar test on the same "
            f"images, the largest of all seeds; *: p < {SIGNIFICANT} and the same direction with every seed"
        )
    if any(group.heading == "paper:" for table in tables for group in table.groups):
        found.append("paper: ImageNet-200, ViT-B unless the row says otherwise")
    found += [f"failed: {each.title}: {problem}" for each, problem in failed.items()]
    missing = [each.title for each in runs if each not in failed and not all(map(each.is_done, each.steps))]
    return found + ([f"not finished: {', '.join(missing)}"] if missing else [])


def draw(recipe: Recipe, runs: list[Run], folder: Path, args: Namespace) -> None:
    """The recipe's figures, of the first seed that has finished every run."""
    for seed in args.seeds:
        chosen = [each for each in runs if each.seed == seed and "random" not in each.variant.flags]
        if all(each.checkpoint().exists() for each in chosen):
            names = [each.variant.name for each in chosen]
            flags = [*(str(each.folder) for each in chosen), "--names", *names, *recipe.pictures]
            flags += [*source_flags(args), "--output_dir", str(folder)]
            main_visualize.main(main_visualize.get_args_parser().parse_args(flags))
            return


def main(args: Namespace) -> None:
    if args.list:
        for name in recipe_names():
            logger.info("%s\n%s\n", name, textwrap.indent(recipe_text(name), "    "))
        return
    check_args(args)
    failures = 0
    for name, recipe in [(name, load_recipe(name)) for name in args.recipes]:
        runs = expand(recipe, args)
        for each in runs:
            check_settings(each)
        if args.dry_run:
            show_commands(runs, args)
            continue
        if args.download:
            fetch(runs[0])
        failed = {} if args.table_only else work(runs, args)
        report(name, recipe, runs, failed, args)
        failures += len(failed)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    run(main, get_args_parser())
