"""Images per second and core of the training loader, against ImageFolder, PIL and torchvision's v1 transforms.

    python -m benchmarks.bench_loader                                  # on JPEGs made for it, about 480 x 405
    python -m benchmarks.bench_loader --data_path FOLDER               # on those below FOLDER
    python -m benchmarks.bench_loader --width 2000 --height 1500       # on JPEGs of a camera's size, made for it

Rounds alternate in one process; ratios are of the same round, of processor time. Then the same through loader
processes, by the clock, with the time the main one needs itself. Set OMP_NUM_THREADS=1: speeds are per core.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

from benchmarks.timing import alternate, ratio
from util.cli import ArgumentParser, UserError, count, logger, number, positive
from util.crop import draw_crop
from util.data import decode
from util.data.arrow import list_rows
from util.data.listing import ImageList, Names
from util.data.sources import Source
from util.datasets import Augmentation, AugmentedDataset, EpochBatches, ImageLoader, collate_augmented
from util.evaluation.tables import show_table
from util.program import run


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_loader", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data_path", default=None, help="folder with JPEGs somewhere below; default: made")
    parser.add_argument("--images", default=128, type=count, help="made, or read of a folder")
    parser.add_argument("--width", default=480, type=count, help="of the images made")
    parser.add_argument("--height", default=405, type=count, help="of the images made")
    parser.add_argument("--input_size", default=224, type=count, help="side of what an image becomes")
    parser.add_argument("--batch_size", default=64, type=count, help="images per batch")
    parser.add_argument("--rounds", default=7, type=count, help="alternating repetitions")
    parser.add_argument(
        "--num_workers",
        default=[0, 1, 2],
        type=number(int, at_least=0, at_most=64),
        nargs="+",
        help="loader processes to try",
    )
    parser.add_argument("--seconds", default=10, type=positive, help="for each number of loader processes")
    return parser


def make_images(folder: Path, args: Namespace) -> None:
    """Like photographs to a decoder: structure at all scales with a spectrum of about 1/f, and some grain."""
    rng, size = np.random.default_rng(0), (args.width, args.height)
    for i in range(args.images):
        image = np.full((args.height, args.width, 3), 128) + rng.normal(0, 3, (args.height, args.width, 1))
        for side in 2 ** np.arange(2, int(np.log2(max(size))) + 1):
            layer = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
            resampling = (Image.Resampling.BICUBIC, Image.Resampling.NEAREST)[i % 2]
            image = image + (np.asarray(layer.resize(size, resampling), np.float32) - 128) * (4 / side) ** 0.75
        pixels = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
        pixels.save(folder / f"{i}.jpg", quality=95, subsampling="4:2:0" if i % 5 == 0 else "4:4:4")


def find_images(folder: Path, most: int) -> list[str]:
    """Evenly spread over all below the folder."""
    paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if not paths:
        raise UserError(f"--data_path {folder}: no images below it")
    return paths[:: max(len(paths) // most, 1)][:most]


class Upstream(ImageFolder):
    """ImageFolder with upstream's transforms, for files that need not lie in class folders."""

    def __init__(self, paths: list[str], size: int):
        self.samples, self.loader, self.target_transform = [(path, 0) for path in paths], pil_loader, None
        crop = v1.RandomResizedCrop(size, scale=(0.2, 1.0), interpolation=v1.InterpolationMode.BICUBIC)
        normalise = v1.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        self.transform = v1.Compose([crop, v1.RandomHorizontalFlip(), v1.ToTensor(), normalise])


def as_table(paths: list[str], folder: str) -> Source:
    """The same files in an Arrow table."""
    from datasets import Dataset, Image

    table = Dataset.from_dict({"image": [{"bytes": Path(path).read_bytes()} for path in paths]})
    table.cast_column("image", Image()).save_to_disk(folder)
    flags = dict.fromkeys(("image_column", "label_column", "file_list", "cache_dir"))
    return list_rows(Namespace(data_path=folder, **flags)).source(np.arange(len(paths)))


def augmented(paths: list[str], size: int, exact: bool = False, source: Source | None = None) -> AugmentedDataset:
    source = source or ImageList(Names.pack(paths))
    return AugmentedDataset(source, Augmentation((size, size), "RGB", draw_crop, exact), seed=0)


def compare_pipelines(paths: list[str], table: Source | None, args: Namespace) -> None:
    batches = [range(i, min(i + args.batch_size, len(paths))) for i in range(0, len(paths), args.batch_size)]
    upstream, size = Upstream(paths, args.input_size), args.input_size

    def theirs(_round: int) -> None:
        for batch in batches:
            default_collate([upstream[index] for index in batch])

    def ours(round_: int, exact: bool = False, source: Source | None = None) -> None:
        dataset = augmented(paths, size, exact, source)
        for batch in batches:
            collate_augmented([dataset[round_, index] for index in batch])

    def without_simplejpeg(round_: int) -> None:
        with mock.patch.object(decode, "simplejpeg", None):
            ours(round_)

    tasks = {"upstream": theirs, "ours": ours, "ours without simplejpeg": without_simplejpeg}
    tasks["ours with --exact_decode"] = lambda round_: ours(round_, exact=True)
    if table is not None:
        tasks["ours from an Arrow table"] = lambda round_: ours(round_, source=table)
    if decode.simplejpeg is None:
        del tasks["ours"]
    times, _ = alternate(tasks, args.rounds, time.process_time)
    rows = [
        [name, f"{len(paths) / statistics.median(seconds):.0f}", ratio(times["upstream"], seconds)]
        for name, seconds in times.items()
    ]
    show_table("pipelines", ["pipeline", "images/s/core", "times upstream"], rows)


def compare_pixels(paths: list[str], args: Namespace) -> None:
    """Fast against exact decoding, for the same crops."""
    fast, exact = (augmented(paths, args.input_size, exact) for exact in (False, True))
    pairs = [(epoch, index) for epoch in range(3) for index in range(len(paths))]
    errors = [(fast[pair][0].double() - exact[pair][0]).abs() for pair in pairs]
    means, most = [error.mean().item() for error in errors], max(error.max().item() for error in errors)
    text = "fast against exact, of 255: mean difference %.3f (worst crop %.2f), largest %.0f"
    logger.info(text, statistics.mean(means), max(means), most)


def measure_workers(paths: list[str], args: Namespace) -> None:
    """By the clock; the processes share the machine's cores with whatever else runs."""
    repeated, rows = paths * max(8 * args.batch_size // len(paths), 1), []
    for workers in args.num_workers:
        upstream = Upstream(repeated, args.input_size)
        theirs = DataLoader(upstream, args.batch_size, num_workers=workers, persistent_workers=workers > 0)
        batches = EpochBatches(len(repeated), args.batch_size, seed=0)
        ours = ImageLoader(augmented(repeated, args.input_size), batches, num_workers=workers)
        (their_speed, _), (speed, main) = (images_per_second(loader, args.seconds) for loader in (theirs, ours))
        rows.append([str(workers), f"{speed:.0f}", f"{their_speed:.0f}", f"{main:.3f}"])
    header = ["loader processes", "images/s", "with upstream's transforms", "ms per image of the main process"]
    show_table("through loader processes, by the clock", header, rows)


def images_per_second(loader: DataLoader | ImageLoader, seconds: float) -> tuple[float, float]:
    """And the main process's own milliseconds per image. The first epoch, in which workers start, does not count."""
    for _ in loader:
        pass
    images, start, own = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        for imgs, *_ in loader:
            images += len(imgs)
    return images / (time.perf_counter() - start), (time.process_time() - own) * 1e3 / images


def main(args: Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if args.data_path is None:
            make_images(Path(made), args)
        paths = find_images(Path(args.data_path or made), args.images)
        sizes = np.array([Image.open(path).size for path in paths])
        kilobytes = np.mean([Path(path).stat().st_size for path in paths]) / 1000
        logger.info("%d images, mean %.0f x %.0f, %.0f kB", len(paths), *sizes.mean(axis=0), kilobytes)
        table = as_table(paths, str(Path(made, "table"))) if find_spec("datasets") else None
        compare_pipelines(paths, table, args)
        compare_pixels(paths, args)
        measure_workers(paths, args)


if __name__ == "__main__":
    run(main, get_args_parser())
