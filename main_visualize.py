"""Draw what a run masks and reconstructs: the curriculum on a picture.

Masks and reconstructions from a run's first checkpoint to its last, on a few validation images:
    python main_visualize.py runs/clmae --data_path /data/imagenet

The same for one checkpoint and files of your own, as PDF for a paper:
    python main_visualize.py runs/clmae/checkpoint-399.pth --images cat.jpg dog.jpg --format pdf

Many images' masks at once, how often each place is visible, curves over training from log.txt, and a GIF of one mask:
    python main_visualize.py runs/clmae --data_path /data/imagenet --grid diversity positions --curve --animate
"""

import os
from argparse import Namespace
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from util.arguments import add_data_arguments, check_at_least, check_data_args
from util.cli import ArgumentParser, UserError, logger, run
from util.data.decode import MODES, open_image, to_mode
from util.data.sources import DEFAULT_DATA_PATH, ImageList, Source, build_source, find_split
from util.datasets import build_eval_transform
from util.misc import file_name, generator, pick_device
from util.plots.curves import curve_figure, read_log
from util.plots.masks import Block, animation, diversity_figure, draw_block, masks_figure, positions_figure
from util.plots.snapshot import Snapshot, evenly, load_snapshot, snapshots_of
from util.plots.style import FORMATS, save_figure, short_names

GRIDS = {"masks": (8, masks_figure), "diversity": (64, diversity_figure), "positions": (512, positions_figure)}


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_visualize.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", metavar="CHECKPOINT", nargs="+", help="checkpoints, or runs' folders with some")
    parser.add_argument("--names", nargs="+", default=None, help="titles of the runs; default: those of their folders")

    what = parser.add_argument_group("what to draw (default: --grid masks)")
    what.add_argument(
        "--grid",
        nargs="+",
        default=[],
        choices=list(GRIDS),
        help="masks: images, Z, masks and reconstructions; diversity: many images' masks at once; positions: how often "
        "each place is visible",
    )
    what.add_argument("--curve", action="store_true", help="losses and health of the masks over training, from log.txt")
    what.add_argument("--animate", action="store_true", help="a GIF of the first image's mask over training")
    what.add_argument("--blocks", default=4, type=int, help="checkpoints shown of a run's folder, evenly spread")
    what.add_argument(
        "--true_stats",
        action="store_true",
        help="show predictions of normalised patches with the hidden patches' true mean and spread, which leaks them",
    )
    what.add_argument(
        "--norm_pix_loss", action="store_true", help="for checkpoints that do not tell: patches are normalised"
    )

    images = parser.add_argument_group("images (or a data set, below)")
    images.add_argument("--images", nargs="+", default=[], help="image files, or folders with some")
    images.add_argument("--num_images", default=None, type=int, help="default: 8; diversity 64, positions 512")
    add_data_arguments(parser)

    out = parser.add_argument_group("output")
    out.add_argument("--output_dir", default="./pictures", help="folder of the pictures")
    out.add_argument("--format", nargs="+", default=["png"], choices=FORMATS, help="pdf is for papers")
    out.add_argument("--device", default="cpu", help="cpu is fast enough for a few images")
    out.add_argument("--seed", default=0, type=int, help="of the choice of images, and of the random masks of an MAE")
    return parser


def check_args(args: Namespace) -> None:
    check_data_args(args)
    check_at_least(args, 1, "blocks")
    if args.num_images is not None:
        check_at_least(args, 1, "num_images")
    if missing := [path for path in args.runs if not Path(path).exists()]:
        raise UserError(f"there is no checkpoint or folder {missing[0]}")
    if args.names is None:
        folders = [Path(os.path.abspath(path if Path(path).is_dir() else Path(path).parent)) for path in args.runs]
        distinct = list(dict.fromkeys(folders))
        names = dict(zip(distinct, short_names(distinct), strict=True))
        args.names = [names[folder] for folder in folders]
    if len(args.names) != len(args.runs):
        raise UserError(f"--names has {len(args.names)} names for {len(args.runs)} runs; give one for each")
    if not (args.grid or args.curve or args.animate):
        args.grid = ["masks"]


def open_source(args: Namespace, snapshot: Snapshot) -> Source:
    """`--images`, or a data set: its held-out images if there are any."""
    if args.images:
        return ImageList([(path, 0) for given in args.images for path in image_files(Path(given))], classes=[])
    args.input_size, args.in_chans = list(snapshot.model.patch_embed.img_size), snapshot.model.in_chans
    if args.data_set == "folder":
        path = Path(args.data_path or DEFAULT_DATA_PATH)
        if path == Path(DEFAULT_DATA_PATH) and not path.is_dir():
            raise UserError("which images? Give --images FILE ..., --data_path FOLDER or --data_set shapes")
        unseen = args.split is not None or find_split(path, "val") is not None
    else:
        unseen = True
    return build_source(args, "val" if unseen else "train")


def image_files(path: Path) -> list[str]:
    """A file itself, or all image files in a folder and below."""
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise UserError(f"--images {path}: no image files in this folder")
        return files
    if not path.exists():
        raise UserError(f"--images {path}: no such file or folder")
    return [str(path)]


def read_images(source: Source, most: int, seed: int) -> list[Image.Image]:
    """At most `most` images drawn from the source; unreadable ones are left out and reported."""
    indices = torch.randperm(len(source), generator=generator("pictures", seed))[:most].sort().values.tolist()
    images = [image for index in indices if (image := read_or_report(source, index)) is not None]
    if not images:
        raise UserError("none of the images can be read")
    return images


def read_or_report(source: Source, index: int) -> Image.Image | None:
    try:
        data = source.read(index)
        image = open_image(data) if isinstance(data, bytes) else data
        image.load()
        return image
    except Exception as error:  # on damaged files, decoders raise almost anything
        logger.warning("unreadable image, left out: %s (%s)", source.name(index), error)
        return None


def as_input(images: list[Image.Image], snapshot: Snapshot, device: torch.device) -> torch.Tensor:
    """Images [N, C, H, W] as the snapshot's networks take them."""
    size, in_chans = snapshot.model.patch_embed.img_size, snapshot.model.in_chans
    transform = build_eval_transform(Namespace(input_size=list(size), in_chans=in_chans))
    return torch.stack([transform(to_mode(image, MODES[in_chans])) for image in images]).to(device)


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
    check_args(args)
    runs: dict[str, list[Path]] = {}  # checkpoints under one name are of one run
    for name, path in zip(args.names, args.runs, strict=True):
        runs.setdefault(name, []).extend(snapshots_of(Path(path)))
    written = []
    try:
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
    except OSError as error:
        raise UserError(f"--output_dir {args.output_dir} cannot be written: {error.strerror or error}") from None
    for path in written:
        logger.info("%s", path)


if __name__ == "__main__":
    run(main, get_args_parser())
