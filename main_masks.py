"""Measure masks: those of finished runs over their checkpoints, or any from elsewhere.

Runs at five checkpoints each, with an autoencoder that never saw the masks as the judge of their difficulty:
    python main_masks.py runs/clmae runs/predictive --judge runs/mae

Masks from elsewhere, as an .npz with `images` (file names) and `mask` [N, L] or [N, h, w] (0 is keep, 1 is remove):
    python main_masks.py masks.npz --judge runs/mae

Prints a table, and writes masks.json and masks.png (how often each position is visible, and curves over training).
util/evaluation/forensics.py explains the columns; lines below the table flag likely problems.
"""

from argparse import Namespace

from util.arguments import add_image_arguments
from util.cli import ArgumentParser, UserError, count, label, logger, seed_number
from util.program import answer_early, run


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_masks.py", description=str(__doc__).split("\n")[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, checkpoints, or .npz files of masks")
    parser.add_argument("--names", type=label, nargs="+", help="names of the runs; default: their folders' names")
    parser.add_argument("--judge", help="run or checkpoint of a vanilla MAE on the same data, to measure difficulty")
    parser.add_argument("--moments", default=5, type=count, help="checkpoints per run, evenly spaced; 1: the last")
    add_image_arguments(parser, number="1000")
    parser.add_argument("--output_dir", default="./masks", help="masks.json and masks.png; '' writes nothing")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", default=0, type=seed_number, help="seed for choosing images and for random masks")
    return parser


answer_early(__name__, get_args_parser)

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from masking import hashed_uniform, mask_health
from models_mae import grid_size
from util.checkpoint import write_text
from util.data.listing import Names
from util.data.sources import ImageList
from util.datasets import pixel_statistics
from util.evaluation.features import file_hash
from util.evaluation.forensics import BLOCK, difficulty, edge_contrast, edge_scores, mirror_correlation, verdicts
from util.evaluation.results import read_arrays
from util.evaluation.tables import show_table
from util.misc import set_up_device
from util.plots.masks import forensics_figure
from util.plots.snapshot import (
    Snapshot,
    as_input,
    checkpoints_by_run,
    evenly,
    load_snapshot,
    name_runs,
    open_source,
    read_images,
    snapshots_of,
)
from util.plots.style import save_figure

COLUMNS = ("target", "visible", "distinct", "hamming", "place", "unseen", "mirror", "edge", "own", "judge")


@dataclass
class Measured:
    """The masks of a run at one checkpoint: metrics by name, and how often each position [h, w] is visible."""

    run: str
    file: str  # checkpoint or .npz
    sha256: str  # of that file
    epoch: int | None  # complete epochs; None without a run
    lambda_cl: float | None
    metrics: dict[str, float]
    look: list[str]  # what to look into
    positions: list[list[float]]


def measure(
    name: str,
    path: Path,
    mask: torch.Tensor,
    imgs: torch.Tensor,
    judge: Snapshot | None,
    args: Namespace,
    snapshot: Snapshot | None = None,
) -> Measured:
    """Measure masks [N, L] of normalised images [N, C, H, W], from a run's `snapshot` or of unknown origin."""
    values, grid = None if snapshot is None else module_values(snapshot, imgs), grid_of(mask, imgs)
    noise = hashed_uniform(torch.arange(len(imgs), device=imgs.device), args.seed, mask.shape[1])
    keep_prob = None if snapshot is None else snapshot.masking.keep_prob(values)
    metrics = {key: value.item() for key, value in mask_health(mask, keep_prob).items()}
    metrics["edge"] = edge_contrast(edge_scores(imgs, imgs.shape[-1] // grid[1]), mask).item()
    if snapshot is not None:
        metrics["own"] = difficulty(snapshot.model, imgs, mask, noise)
        if values is not None and (mirrored := module_values(snapshot, imgs.flip(-1))) is not None:
            metrics["mirror"] = mirror_correlation(values, mirrored, grid).item()
    if judge is not None:
        metrics["judge"] = difficulty(judge.model, imgs, mask, noise)
    weight, epoch, look = None, None, verdicts(metrics, len(mask))
    if snapshot is not None:
        settings, weight = snapshot.masking.settings, snapshot.lambda_cl
        epoch = None if snapshot.epoch is None else snapshot.epoch + 1
        metrics["target"] = 1 - snapshot.mask_ratio
        look = verdicts(metrics, len(mask), weight, settings.lambda_cl(1), settings.masking)
    positions = (1 - mask).mean(dim=0).reshape(grid).tolist()
    return Measured(name, str(path), file_hash(path), epoch, weight, metrics, look, positions)


def grid_of(mask: torch.Tensor, imgs: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of square patches that fit masks [N, L] and images [N, C, H, W]."""
    (height, width), number = imgs.shape[-2:], mask.shape[1]
    for columns in range(1, number + 1):
        if number % columns == 0 and width % columns == 0 and (number // columns) * (width // columns) == height:
            return number // columns, columns
    raise UserError(f"masks of {number} patches do not fit images of {height} x {width} pixels in square patches")


@torch.no_grad()
def module_values(snapshot: Snapshot, imgs: torch.Tensor) -> torch.Tensor | None:
    module = snapshot.masking.module
    return None if module is None else torch.cat([module(part) for part in imgs.split(BLOCK)])


def measure_run(name: str, paths: list[Path], judge: Snapshot | None, args: Namespace) -> list[Measured]:
    device, images, found = set_up_device(args.device), None, []
    for path in evenly(paths, args.moments):
        snapshot = load_snapshot(path, name, device=device)
        if judge is not None and input_of(snapshot) != input_of(judge):
            raise UserError(f"{path} and --judge {args.judge} differ in size, patches or statistics of their images")
        images = images or read_images(open_source(args, snapshot), args.num_images or 1000, args.seed)
        imgs = as_input(images, snapshot, device)
        parts = enumerate(imgs.split(BLOCK))
        mask = torch.cat([snapshot.mask(part, args.seed, first=at * BLOCK).mask for at, part in parts])
        found.append(measure(name, path, mask, imgs, judge, args, snapshot))
    return found


def input_of(snapshot: Snapshot) -> tuple:
    """What two autoencoders have to share to be asked about the same images and masks."""
    model = snapshot.model
    return model.img_size, grid_size(model), pixel_statistics(model.in_chans, *snapshot.statistics)


def measure_file(name: str, path: Path, judge: Snapshot | None, args: Namespace) -> Measured:
    """Masks from an .npz. Image names may be relative to the file, or to --data_path."""
    arrays = read_arrays(path, {"images": "U", "mask": "biuf"}, "give an .npz with `images` and `mask`")
    names, mask = arrays["images"].ravel().tolist(), torch.from_numpy(np.atleast_2d(arrays["mask"]).astype(np.float32))
    mask = mask.flatten(1)
    if len(names) != len(mask) or not bool(((mask == 0) | (mask == 1)).all()):
        raise UserError(f"{path}: `mask` needs a row of zeros (keep) and ones (remove) for each of {len(names)} images")
    if judge is None:
        raise UserError(f"{path}: masks without a run need --judge RUN, which also sets the image size")
    if (ours := mask.shape[1]) != (theirs := judge.model.patch_embed.num_patches):
        raise UserError(f"{path} has masks of {ours} patches, but images of --judge {args.judge} have {theirs}")
    roots = [Path(), path.parent, *([Path(args.data_path)] if args.data_path else [])]
    files = [next((root / each for root in roots if os.path.isfile(root / each)), None) for each in names]
    if None in files:
        raise UserError(f"{path} names {names[files.index(None)]}, found neither next to it nor in --data_path")
    images = read_images(ImageList(Names.pack(map(str, files))), len(files), args.seed)
    if len(images) != len(files):
        raise UserError(f"{path}: some of its images cannot be read")
    device = set_up_device(args.device)
    return measure(name, path, mask.to(device), as_input(images, judge, device), judge, args)


def load_judge(args: Namespace) -> Snapshot | None:
    if args.judge is None:
        return None
    path = Path(args.judge)
    if not path.exists():
        raise UserError(f"--judge: there is no checkpoint or folder {path}")
    judge = load_snapshot(snapshots_of(path)[-1], "judge", device=set_up_device(args.device))
    if judge.masking.learned is not None:
        raise UserError(f"--judge {path} was trained with a masking module; give a run of --masking random")
    return judge


def main(args: Namespace) -> None:
    given = args.names is not None
    name_runs(args)
    judge = load_judge(args)
    found: list[Measured] = []
    named = list(zip(args.names, args.runs, strict=True))
    for name, path in ((name, Path(path)) for name, path in named if Path(path).suffix == ".npz"):
        found.append(measure_file(name if given else path.stem, path, judge, args))
    runs = checkpoints_by_run((name, path) for name, path in named if Path(path).suffix != ".npz")
    for name, paths in runs.items():
        found += measure_run(name, paths, judge, args)
    report(found)
    if args.output_dir:
        write_measures(found, Path(args.output_dir))


def report(found: list[Measured]) -> None:
    columns = [name for name in COLUMNS if any(name in each.metrics for each in found)]
    rows = [
        [
            each.run,
            "-" if each.epoch is None else str(each.epoch),
            "-" if each.lambda_cl is None else f"{each.lambda_cl:+.2f}",
            *(f"{each.metrics[name]:.3f}" if name in each.metrics else "-" for name in columns),
            "check" if each.look else "ok",
        ]
        for each in found
    ]
    show_table("masks", ["run", "epoch", "lambda_CL", *columns, "verdict"], rows)
    for each in found:
        moment = "" if each.epoch is None else f", epoch {each.epoch}"
        for sentence in each.look:
            logger.info("check: %s%s: %s", each.run, moment, sentence)


def write_measures(found: list[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "masks.json", json.dumps([asdict(each) for each in found], indent=1) + "\n")
    save_figure(forensics_figure([asdict(each) for each in found]), folder / "masks", ["png"])
    logger.info("%s, %s", folder / "masks.json", folder / "masks.png")


if __name__ == "__main__":
    run(main, get_args_parser())
