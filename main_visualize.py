"""Draw what a run masks and reconstructs: the curriculum on a picture.

Masks and reconstructions from a run's first checkpoint to its last, on a few validation images:
    python main_visualize.py runs/clmae

The same for one checkpoint and files of your own, as PDF for a paper:
    python main_visualize.py runs/clmae/checkpoint-399.pth --images cat.jpg dog.jpg --format pdf

Many masks at once, how often each position is visible, curves over training from log.txt, and a GIF of one mask:
    python main_visualize.py runs/clmae --grid diversity positions --curve --animate
"""

from argparse import Namespace

from util.arguments import add_image_arguments
from util.cli import ArgumentParser, UserError, answer_early, count, file_name, logger, run, seed_number


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_visualize.py", description=str(__doc__).split("\n")[0])
    parser.add_argument("runs", metavar="CHECKPOINT", nargs="+", help="checkpoints, or runs' folders with some")
    parser.add_argument("--names", nargs="+", help="titles of the runs; default: those of their folders")

    what = parser.add_argument_group("what to draw (default: --grid masks)")
    what.add_argument(
        "--grid",
        nargs="+",
        default=[],
        choices=["masks", "diversity", "positions"],
        help="masks: with images and reconstructions; diversity: many at once; positions: how often each is visible",
    )
    what.add_argument("--curve", action="store_true", help="losses and health of the masks over training, from log.txt")
    what.add_argument("--animate", action="store_true", help="a GIF of the first image's mask over training")
    what.add_argument("--blocks", default=4, type=count, help="checkpoints shown of a run's folder, evenly spread")
    what.add_argument(
        "--true_stats",
        action="store_true",
        help="show predictions of normalised patches with the hidden patches' true mean and spread, which leaks them",
    )
    what.add_argument(
        "--norm_pix_loss", action="store_true", help="for checkpoints that do not tell: patches are normalised"
    )

    add_image_arguments(parser, number="8; diversity 64, positions 512")

    out = parser.add_argument_group("output")
    out.add_argument("--output_dir", default="./pictures", help="folder of the pictures")
    out.add_argument("--format", nargs="+", default=["png"], choices=["png", "pdf"], help="pdf is for papers")
    out.add_argument("--device", default="cpu", help="cpu is fast enough for a few images")
    out.add_argument("--seed", default=0, type=seed_number, help="of the choice of images and of random masks")
    return parser


answer_early(__name__, get_args_parser)

from pathlib import Path

from PIL import Image

from util.data.sources import Source
from util.misc import pick_device
from util.plots.curves import curve_figure
from util.plots.masks import Block, animation, diversity_figure, draw_block, masks_figure, positions_figure
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
from util.training.progress import read_log

GRIDS = {"masks": (8, masks_figure), "diversity": (64, diversity_figure), "positions": (512, positions_figure)}


def draw_blocks(checkpoints: list[tuple[str, Path]], images: list[Image.Image], args: Namespace) -> list[Block]:
    """What each checkpoint, given with its run's name, does to the images. One checkpoint is in memory at a time."""
    device, blocks = pick_device(args.device), []
    for name, path in checkpoints:
        snapshot = load_snapshot(path, name, args.norm_pix_loss, device)
        blocks.append(draw_block(snapshot, as_input(images, snapshot, device), args.seed, args.true_stats))
    return blocks


def draw_grids(runs: dict[str, list[Path]], source: Source, args: Namespace) -> list[Path]:
    shown = [(name, path) for name, paths in runs.items() for path in evenly(paths, args.blocks)]
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
            raise UserError(f"--animate: {name} has one checkpoint; a run with --save_every 1 keeps one of each epoch")
        gif = Path(args.output_dir) / f"{file_name(name)}.gif"
        animation(draw_blocks([(name, path) for path in paths], read_images(source, 1, args.seed), args), gif)
        written.append(gif)
    return written


def main(args: Namespace) -> None:
    name_runs(args)
    if not (args.grid or args.curve or args.animate):
        args.grid = ["masks"]
    runs = checkpoints_by_run(args)
    written = []
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
