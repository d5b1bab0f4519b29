"""Visualise what a run masks and reconstructs as its curriculum progresses.

Masks and reconstructions from a run's first checkpoint to its last, on a few validation images:
    python main_visualize.py runs/clmae

The same for one checkpoint and your own images, as PDF for a paper:
    python main_visualize.py runs/clmae/checkpoint-399.pth --images cat.jpg dog.jpg --format pdf

Many masks at once, how often each position is visible, curves over training from log.txt, and a GIF of one mask:
    python main_visualize.py runs/clmae --grid diversity positions --curve --animate

All of this for several runs as one HTML file, with a slider over training:
    python main_visualize.py runs/mae runs/clmae --html report.html
"""

from argparse import Namespace

from util.arguments import add_image_arguments
from util.cli import ArgumentParser, UserError, count, file_name, label, logger, plain, seed_number
from util.program import answer_early, run


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_visualize.py", description=str(__doc__).split("\n")[0])
    parser.add_argument("runs", metavar="CHECKPOINT", nargs="+", help="checkpoints, or run folders")
    parser.add_argument("--names", type=label, nargs="+", help="names of the runs; default: their folders' names")

    what = parser.add_argument_group("what to draw (default: --grid masks)")
    what.add_argument(
        "--grid",
        nargs="+",
        default=[],
        choices=["masks", "diversity", "positions"],
        help="masks: with images and reconstructions; diversity: many at once; positions: how often each is visible",
    )
    what.add_argument("--curve", action="store_true", help="losses and mask metrics over training, from log.txt")
    what.add_argument("--animate", action="store_true", help="a GIF of the first image's mask over training")
    what.add_argument(
        "--blocks", type=count, help="checkpoints shown per run folder, evenly spaced; default: 4, or 24 with --html"
    )
    what.add_argument(
        "--true_stats",
        action="store_true",
        help="show predicted patches with the true mean and deviation of the hidden ones, which leaks ground truth",
    )
    what.add_argument(
        "--norm_pix_loss", action="store_true", help="for checkpoints without flags: patches are normalised"
    )

    add_image_arguments(parser, number="8, 64 for diversity, 512 for positions, 6 for --html")

    out = parser.add_argument_group("output")
    out.add_argument("--output_dir", default="./pictures", help="folder for the pictures")
    out.add_argument(
        "--html", metavar="FILE", help="write an interactive, self-contained report of the runs, below 5 MB"
    )
    out.add_argument(
        "--results",
        metavar="DIR",
        nargs="+",
        help="for --html: the runs' evaluation folders, in their order; default: eval/RUN next to the runs, or above",
    )
    out.add_argument("--format", nargs="+", default=["png"], choices=["png", "pdf"], help="pdf is for papers")
    out.add_argument("--device", default="cpu", help="cpu is fast enough for a few images")
    out.add_argument("--seed", default=0, type=seed_number, help="seed for choosing images and for random masks")
    return parser


answer_early(__name__, get_args_parser)

import os
import textwrap
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from util.checkpoint import replaced
from util.data.sources import Source
from util.evaluation.compare import caveats, compare
from util.evaluation.results import RESULTS, EvaluatedRun, read_run
from util.evaluation.tables import Cell, Group, Table, as_html, comparison_tables, html_text, table_notes
from util.misc import set_up_device
from util.plots.curves import curve_figure
from util.plots.masks import Block, animation, diversity_figure, draw_block, masks_figure, positions_figure
from util.plots.report import CHECKPOINTS, POSITION_IMAGES, SHOWN_IMAGES, report_page, report_run
from util.plots.snapshot import (
    as_input,
    checkpoints_by_run,
    evenly,
    load_snapshot,
    name_runs,
    open_source,
    read_images,
)
from util.plots.style import save_figure
from util.training.progress import has_epochs, read_log

GRIDS = {"masks": (8, masks_figure), "diversity": (64, diversity_figure), "positions": (512, positions_figure)}
PLACES = ("output_dir", "log_dir")  # flags that differ between any two runs


def draw_blocks(checkpoints: list[tuple[str, Path]], images: list[Image.Image], args: Namespace) -> list[Block]:
    """What each checkpoint, given with its run's name, does to the images. Only one is in memory at a time."""
    device, blocks = set_up_device(args.device), []
    for name, path in checkpoints:
        snapshot = load_snapshot(path, name, args.norm_pix_loss, device)
        blocks.append(draw_block(snapshot, as_input(images, snapshot, device), args.seed, args.true_stats))
    return blocks


def draw_grids(runs: dict[str, list[Path]], source: Source, args: Namespace) -> list[Path]:
    shown = [(name, path) for name, paths in runs.items() for path in evenly(paths, args.blocks or 4)]
    written = []
    for grid in args.grid:
        most, figure = GRIDS[grid]  # number of images, and how they are drawn
        blocks = draw_blocks(shown, read_images(source, args.num_images or most, args.seed), args)
        written += save_figure(figure(blocks), Path(args.output_dir) / grid, args.format)
    return written


def draw_animations(runs: dict[str, list[Path]], source: Source, args: Namespace) -> list[Path]:
    """A GIF for each run that has several checkpoints."""
    written = []
    for name, paths in runs.items():
        if len(paths) < 2:
            raise UserError(f"--animate: {name} has one checkpoint; a run with --save_every 1 keeps one per epoch")
        gif = Path(args.output_dir) / f"{file_name(name)}.gif"
        animation(draw_blocks([(name, path) for path in paths], read_images(source, 1, args.seed), args), gif)
        written.append(gif)
    return written


def write_report(runs: dict[str, list[Path]], args: Namespace, results: str | None = None) -> Path:
    """All runs in one HTML file; `results` (HTML) replaces the tables of their evaluations."""
    device, path = set_up_device(args.device), Path(args.html)
    folders = {
        name: Path(given) if Path(given).is_dir() else Path(given).parent
        for name, given in zip(args.names, args.runs, strict=True)
    }
    # First, because it may fail, and the rest takes longer.
    sections = {"RESULTS": results_section(folders, args.results) if results is None else results}
    source = open_source(args, load_snapshot(next(iter(runs.values()))[0], "", args.norm_pix_loss))
    images = read_images(source, args.num_images or SHOWN_IMAGES, args.seed)
    more = read_images(source, POSITION_IMAGES, args.seed)
    reported = []
    for name, paths in runs.items():
        shown = evenly(paths, args.blocks or CHECKPOINTS)
        logger.info("%s: %d checkpoints", plain(name), len(shown))
        snapshots = (load_snapshot(path, name, args.norm_pix_loss, device) for path in shown)
        log = read_log(folders[name]) if has_epochs(folders[name]) else []
        reported.append(report_run(name, snapshots, images, more, log, device, args.seed, args.true_stats))
    sections["SETTINGS"] = settings_section({run.name: run.settings for run in reported})
    page = report_page(reported, sections, len(more))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(page.encode())
    return path


def results_section(runs: dict[str, Path], given: list[str] | None) -> str:
    """Tables of the runs' evaluations as HTML, with the first run as the baseline; '' if there are none."""
    if given is not None and len(given) != len(runs):
        raise UserError(f"--results has {len(given)} folders for {len(runs)} runs; give one for each")
    places = map(Path, given) if given else map(evaluation_beside, runs.values())
    found = [read_run(name, at) if at else EvaluatedRun(name, {}, []) for name, at in zip(runs, places, strict=True)]
    if not (rows := compare(found)):
        return ""
    notes = table_notes(list(runs), rows) + [f"caution: {warning}" for warning in caveats(found)]
    return tables_section(comparison_tables(rows, list(runs)), notes)


def tables_section(tables: Iterable[Table], notes: Iterable[str]) -> str:
    listed = "".join(f"<li>{html_text(note)}</li>" for note in notes)
    return "\n".join([*map(as_html, tables), f"<ul>{listed}</ul>"])


def evaluation_beside(run: Path) -> Path | None:
    """The folder with a run's results.jsonl, where README.md and `make demo` put it."""
    folder = Path(os.path.abspath(run))
    places = (folder, folder / "eval", *(above / "eval" / folder.name for above in folder.parents[:2]))
    return next((place for place in places if (place / RESULTS).is_file()), None)


def settings_section(runs: dict[str, dict]) -> str:
    """The flags in which the runs differ, then all flags, as HTML."""
    flags = dict.fromkeys(name for settings in runs.values() for name in settings)
    rows = [(name, [str(settings.get(name, "-")) for settings in runs.values()]) for name in flags]
    differing = [row for row in rows if len(set(row[1])) > 1 and row[0] not in PLACES]

    def table(title: str, rows: list[tuple[str, list[str]]]) -> str:
        body = [([name], [Cell(textwrap.shorten(value, 60)) for value in values]) for name, values in rows]
        return as_html(Table(title, ["flag"], [Group("", list(runs))], body))

    folded = f"<details><summary>All settings</summary>{table('All settings', rows)}</details>" if rows else ""
    return (table("Where the runs differ", differing) if differing else "") + folded


def main(args: Namespace) -> None:
    name_runs(args)
    if not (args.grid or args.curve or args.animate or args.html):
        args.grid = ["masks"]
    runs = checkpoints_by_run(zip(args.names, args.runs, strict=True))
    written = [write_report(runs, args)] if args.html else []
    if args.grid or args.curve or args.animate:
        if not args.output_dir:
            raise UserError("--output_dir is empty; name a folder for the pictures")
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    if args.grid or args.animate:
        first = next(iter(runs.values()))[0]
        source = open_source(args, load_snapshot(first, "", args.norm_pix_loss))
        written += draw_grids(runs, source, args)
    if args.animate:
        written += draw_animations(runs, source, args)
    if args.curve:
        logs = {name: read_log(Path(path)) for name, path in zip(args.names, args.runs, strict=True)}
        written += save_figure(curve_figure(logs), Path(args.output_dir) / "curves", args.format)
    for path in written:
        logger.info("%s", path)


if __name__ == "__main__":
    run(main, get_args_parser())
