"""Repeat a table or figure of the paper: pretrain, evaluate, and show the results alongside the paper's.

    python -m experiments.run --list
    python -m experiments.run losses --scale full --cluster slurm --data_path /data/imagenet --partition NAME
    python -m experiments.run losses --scale small --data_set cifar10 --data_path data --seeds 0 1 2

With no images and no network, in a few minutes; --pretrain comes last, and its flags go to all pretrainings:
    python -m experiments.run main_results --scale small --data_set shapes --pretrain --epochs 2

The same command skips what is done and resumes what was interrupted.
"""

import platform
import shlex
import sys
import textwrap
from argparse import REMAINDER, Namespace, _ArgumentGroup
from pathlib import Path

import torch

import main_pretrain
import main_visualize
from experiments.plan import Run, Step, data_folder, data_name, expand, source_flags
from experiments.recipes import RECIPES, SCALES, Recipe
from experiments.runner import command, work
from experiments.table import build_tables
from util.arguments import DATA_SETS
from util.checkpoint import write_text
from util.cli import ArgumentParser, UserError, count, logger, seed_number
from util.data.sources import build_source
from util.evaluation.tables import SIGNIFICANT, Table, as_markdown, as_text, markdown
from util.program import run
from util.training.launcher import add_resource_arguments


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.run", description="Repeat a table or figure of the paper")
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="names of recipes, in this order")
    parser.add_argument("--list", action="store_true", help="list recipes with cost and expected results")
    what = add_run_arguments(parser, list(SCALES), "./output_dir/experiments")
    what.add_argument("--downstream_path", default=None, help="folder with the downstream sets (docs/datasets.md)")
    what.add_argument("--features", default="cls_token", choices=["cls_token", "global_pool"], help="to evaluate")
    return parser


def add_run_arguments(parser: ArgumentParser, scales: list[str], output_dir: str) -> _ArgumentGroup:
    """What every program that plans runs takes; returns the group of what to run."""
    parser.add_argument("--dry_run", action="store_true", help="print the commands without running them")
    parser.add_argument("--table_only", action="store_true", help="show the results so far without running anything")

    what = parser.add_argument_group("what to run")
    what.add_argument("--scale", default="small", choices=scales, help="full: for a cluster; others: for a laptop")
    what.add_argument("--seeds", default=[0], type=seed_number, nargs="+", help="one pretraining per seed")
    what.add_argument("--data_set", default="folder", choices=DATA_SETS, help="to pretrain on; shapes is built in")
    what.add_argument("--data_path", default=None, help="folder of the data set")
    what.add_argument("--download", action="store_true", help="download it to --data_path first")
    what.add_argument("--output_dir", default=output_dir, help="runs, tables and figures")
    what.add_argument(
        "--pretrain", default=[], nargs=REMAINDER, metavar="FLAG", help="flags for every pretraining; must come last"
    )

    where = parser.add_argument_group("where to run it")
    where.add_argument("--cluster", default="local", choices=["local", "slurm"], help="this machine, or job arrays")
    where.add_argument("--jobs", default=None, type=count, help="local: runs at a time; default: one per core or GPU")
    where.add_argument("--device", default=None, help="default: cuda if there is one, else cpu")
    add_resource_arguments(where)
    parser.set_defaults(nodes=1, ngpus=None)
    return what


def check_args(args: Namespace) -> None:
    choices = f"choose from {', '.join(RECIPES)}; --list describes them"
    if not args.recipes:
        raise UserError(f"RECIPE is missing; {choices}")
    if unknown := [name for name in args.recipes if name not in RECIPES]:
        raise UserError(f"there is no recipe {unknown[0]}; {choices}")
    settle_run_args(args)


def settle_run_args(args: Namespace) -> None:
    """Of the flags that all planning programs share."""
    if len(set(args.seeds)) < len(args.seeds):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: give each seed once")
    if args.ngpus is None:
        largest = 8 if args.cluster == "slurm" else torch.cuda.device_count()
        args.ngpus = largest if args.scale == "full" else min(largest, 1)


def overview(name: str, recipe: Recipe) -> str:
    """What a recipe runs, costs and should reach."""
    numbers = {variant.name: variant.reported("nearest neighbour", "imagenet200") for variant in recipe.variants}
    paper = "; ".join(f"{variant}: {' / '.join(pair)}" for variant, pair in numbers.items() if "-" not in pair)
    hours = sum(variant.hours for variant in recipe.variants)
    lines = [f"{recipe.title}. {recipe.about}"]
    lines += [f"Paper, nearest neighbour on ImageNet-200, Acc@1 / Acc@5: {paper}."] if paper else []
    lines += [f"Pretraining at full scale: {len(recipe.variants)} run(s), {hours} h on eight A100 (computed)."]
    flags = "--data_path /data/imagenet" + (" --downstream_path /data" if recipe.downstream else "")
    lines += [f"python -m experiments.run {name} --scale full {flags}"]
    return "\n    ".join([name, *(part for line in lines for part in textwrap.wrap(line, 112))]) + "\n"


def fetch(example: Run) -> None:
    """Download the data once, before many programs want it at the same time."""
    args = example.pretrain.args()
    main_pretrain.check_args(args)
    args.download = True
    for split in ("pretrain", "val"):
        build_source(args, split)


def typed_command(each: Run, step: Step, args: Namespace) -> str:
    """What a user would type instead."""
    done, pretrain = "# done: " if each.is_done(step) else "", step is each.pretrain
    if args.cluster == "local" or "." in step.program:
        return done + shlex.join(["python", *command(step, args.ngpus)])
    script = "submitit_pretrain.py" if pretrain else f"submitit_eval.py --task {step.program.removeprefix('main_')}"
    partition = f" --partition {args.partition}" if args.partition else ""
    nodes = args.nodes if pretrain else 1
    return f"{done}python {script} --nodes {nodes} --ngpus {args.ngpus}{partition} {shlex.join(step.flags)}"


def report(name: str, runs: list[Run], failed: dict[Run, str], args: Namespace) -> None:
    """Show the tables, and write them and the figures below the data's folder."""
    recipe, folder, tables = RECIPES[name], data_folder(args), build_tables(runs)
    found = notes(runs, failed, tables)
    logger.info("%s", "\n\n".join([f"\n{recipe.title}", *map(as_text, tables)]))
    finished = [each for each in runs if each not in failed and each.checkpoint().exists()]
    parts = [f"# {recipe.title}", conditions(name, runs[0], finished, args), *map(as_markdown, tables)]
    parts += ["\n".join(f"- {markdown(note)}" for note in found)] if found else []
    path = folder / f"{name}-{args.features}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n\n".join(parts) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another --output_dir") from None
    logger.info("\n%s", "\n".join([*found, f"written to {path}"]))
    if recipe.pictures:
        draw(recipe, runs, folder / name, args)


def conditions(name: str, example: Run, finished: list[Run], args: Namespace) -> str:
    """What the numbers were obtained with."""
    settings, commits = example.pretrain.args(), sorted({str(each.settings().get("commit")) for each in finished})
    local = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    hardware = local if args.cluster == "local" else f"{args.nodes} x {args.ngpus} GPUs of a cluster"
    return (
        f"`python -m experiments.run {name}`, scale {args.scale}, data {markdown(data_name(args))}; {settings.model}, "
        f"{settings.epochs} epochs, seeds {', '.join(map(str, args.seeds))}, features {args.features}. "
        f"Commit {', '.join(commits) or 'none yet'}; {hardware}; torch {torch.__version__}."
    )


def notes(runs: list[Run], failed: dict[Run, str], tables: list[Table]) -> list[str]:
    headings = {group.heading for table in tables for group in table.groups}
    found = ["±: one standard deviation over pretraining seeds"] if len({each.seed for each in runs}) > 1 else []
    if any(heading.startswith("over ") for heading in headings):
        found.append(
            "gain: mean over seeds, over MAE of the same size and seed; p: exact two-sided McNemar test, the largest "
            f"of all seeds and probes; *: p < {SIGNIFICANT} and the same direction in all of them"
        )
    if "paper:" in headings:
        found.append("paper: pretrained on ImageNet-200, ViT-B unless the row says otherwise")
    found += [f"failed: {each.title}: {problem}" for each, problem in failed.items()]
    missing = [each.title for each in runs if each not in failed and not each.is_finished()]
    return found + ([f"not finished: {', '.join(missing)}"] if missing else [])


def draw(recipe: Recipe, runs: list[Run], folder: Path, args: Namespace) -> None:
    """The recipe's figures, of the first seed that has finished every run."""
    for seed in args.seeds:
        chosen = [each for each in runs if each.seed == seed and not each.variant.baseline]
        if all(each.checkpoint().exists() for each in chosen):
            names = [each.variant.name for each in chosen]
            flags = [*(str(each.folder) for each in chosen), "--names", *names, *recipe.pictures.split()]
            flags += [*source_flags(args), "--output_dir", str(folder)]
            main_visualize.main(main_visualize.get_args_parser().parse_args(flags))
            return


def main(args: Namespace) -> None:
    if args.list:
        logger.info("\n%s", "\n".join(overview(name, recipe) for name, recipe in RECIPES.items()))
        return
    check_args(args)
    failures = 0
    for name in args.recipes:
        runs = expand(RECIPES[name], args)
        for each in runs:
            each.check_settings()
        if args.dry_run:
            logger.info("\n%s", "\n".join(typed_command(each, step, args) for each in runs for step in each.steps))
            continue
        if args.download:
            fetch(runs[0])
        failed = {}
        if not args.table_only:
            failed = work(runs, args)
        report(name, runs, failed, args)
        failures += len(failed)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    run(main, get_args_parser())
