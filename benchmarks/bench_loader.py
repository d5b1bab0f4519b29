"""Images per second and core of the training loader, against ImageFolder, PIL and torchvision's v1 transforms.

    python -m benchmarks.bench_loader                                  # on JPEGs made for it, about 480 x 405
    python -m benchmarks.bench_loader --data_path FOLDER               # on those below FOLDER
    python -m benchmarks.bench_loader --width 2000 --height 1500       # on JPEGs of a camera's size, made for it

Rounds alternate in one process; ratios are of the same round, of processor time. Then the same through loader
processes, by the clock, with the time the main one needs itself. Set OMP_NUM_THREADS=1: speeds are per core.
"""

import io
import os
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from benchmarks.timing import alternate, ratio
from util.cli import ArgumentParser, UserError, logger, run
from util.crop import draw_crop
from util.data import decode
from util.data.sources import ImageList
from util.datasets import Augmentation, AugmentedDataset, EpochBatches, ImageLoader, collate_augmented
from util.evaluation.tables import show_table


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_loader", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data_path", default=None, help="folder with JPEGs somewhere below; default: made")
    parser.add_argument("--images", default=128, type=int, help="made, or read of a folder")
    parser.add_argument("--width", default=480, type=int, help="of the images made")
    parser.add_argument("--height", default=405, type=int, help="of the images made")
    parser.add_argument("--quality", default=95, type=int, help="of the JPEGs made")
    parser.add_argument("--input_size", default=224, type=int, help="side of what an image becomes")
    parser.add_argument("--batch_size", default=64, type=int, help="images per batch")
    parser.add_argument("--rounds", default=7, type=int, help="alternating repetitions")
    parser.add_argument("--num_workers", default=[0, 1, 2], type=int, nargs="+", help="loader processes to try")
    parser.add_argument("--seconds", default=10, type=float, help="for each number of loader processes")
    return parser


# --- Images ---


def make_images(folder: Path, args: Namespace) -> None:
    """Like photographs to a decoder: edges at all scales with a spectrum of 1/f, some grain, 3/4 of them 4:4:4."""
    rng = np.random.default_rng(0)
    for i in range(args.images):
        width, height = (args.width, args.height) if i % 4 else (args.height, args.width)
        image = np.zeros((height, width, 3), np.float32)
        side = 4
        while side < max(width, height):
            shape = (side * height // width + 1, side, 3) if width > height else (side, side * width // height + 1, 3)
            layer = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
            filters = (Image.Resampling.BICUBIC, Image.Resampling.NEAREST)
            layer = np.asarray(layer.resize((width, height), filters[i % 2]), np.float32) - 128
            grey = layer.mean(axis=2, keepdims=True)
            image += (grey + 0.4 * (layer - grey)) * (4 / side) ** 0.75
            side *= 2
        image += rng.normal(0, 3, (height, width, 1))
        pixels = Image.fromarray(np.clip(image + 128, 0, 255).astype(np.uint8))
        path = folder / "made" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels.save(path, quality=args.quality, subsampling="4:2:0" if i % 5 == 0 else "4:4:4")


def find_images(folder: Path, most: int) -> list[str]:
    """Evenly spread over all below the folder."""
    paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if not paths:
        raise UserError(f"--data_path {folder}: no images below it")
    return paths[:: max(len(paths) // most, 1)][:most]


def describe_images(paths: list[str]) -> str:
    sizes = np.array([Image.open(path).size for path in paths])
    kilobytes = np.mean([os.path.getsize(path) for path in paths]) / 1000
    bits = np.mean([8 * os.path.getsize(path) for path in paths]) / sizes.prod(axis=1).mean()
    shape = " x ".join(f"{side:.0f}" for side in sizes.mean(axis=0))
    return f"{len(paths)} images, mean {shape}, {kilobytes:.0f} kB, {bits:.2f} bits per pixel"


# --- What is compared ---


def upstream_transform(size: int) -> v1.Compose:
    return v1.Compose(
        [
            v1.RandomResizedCrop(size, scale=(0.2, 1.0), interpolation=v1.InterpolationMode.BICUBIC),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ]
    )


class Upstream(ImageFolder):
    """ImageFolder, with a list of files that need not lie in class folders."""

    def __init__(self, paths: list[str], size: int):
        self.samples, self.loader = [(path, 0) for path in paths], pil_loader
        self.transform, self.target_transform = upstream_transform(size), None


def pil_loader(path: str) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def augmented(paths: list[str], size: int, exact: bool) -> AugmentedDataset:
    source = ImageList([(path, 0) for path in paths], classes=[])
    return AugmentedDataset(source, Augmentation((size, size), "RGB", draw_crop, exact), seed=0)


def upstream_round(dataset: Upstream, batches: list[list[int]], _round: int) -> None:
    for batch in batches:
        default_collate([dataset[index] for index in batch])


def our_round(dataset: AugmentedDataset, batches: list[list[int]], round_: int) -> None:
    for batch in batches:
        collate_augmented([dataset[round_, index] for index in batch])


def pillow_round(dataset: AugmentedDataset, batches: list[list[int]], round_: int) -> None:
    """As where simplejpeg is not installed."""
    installed, decode.simplejpeg = decode.simplejpeg, None
    our_round(dataset, batches, round_)
    decode.simplejpeg = installed


def compare_pipelines(paths: list[str], args: Namespace) -> None:
    batches = [list(range(i, min(i + args.batch_size, len(paths)))) for i in range(0, len(paths), args.batch_size)]
    fast, exact = (augmented(paths, args.input_size, exact) for exact in (False, True))
    tasks = {"upstream": partial(upstream_round, Upstream(paths, args.input_size), batches)}
    if decode.simplejpeg is not None:
        tasks["fast"] = partial(our_round, fast, batches)
    tasks["fast, without simplejpeg"] = partial(pillow_round, fast, batches)
    tasks["--exact_decode"] = partial(our_round, exact, batches)
    times, _ = alternate(tasks, args.rounds, time.process_time)
    rows = [
        [name, f"{len(paths) / statistics.median(seconds):.0f}", ratio(times["upstream"], seconds)]
        for name, seconds in times.items()
    ]
    show_table("pipelines", ["pipeline", "images/s/core", "times upstream"], rows)


# --- What the time goes to ---


def profile_stages(paths: list[str], args: Namespace) -> None:
    """Each stage alone, with its input prepared, for the same crops."""
    size, numbers = (args.input_size, args.input_size), range(len(paths))
    data = [Path(path).read_bytes() for path in paths]
    jpegs = [jpeg for content in data if (jpeg := decode.read_jpeg(content))]
    if len(jpegs) < len(paths):
        logger.info("no profile: not all images are ordinary JPEGs")
        return
    boxes = [draw_crop(*jpeg.size, random.Random(i)) for i, jpeg in enumerate(jpegs)]
    images = [decode.to_mode(content, "RGB") for content in data]
    edges = [(left, top, left + width, top + height) for top, left, height, width in boxes]
    crops = [image.crop(edge).resize(size, Image.Resampling.BICUBIC) for image, edge in zip(images, edges, strict=True)]
    scales = [decode.choose_scale(height / size[0], width / size[1]) for _, _, height, width in boxes]
    needed = [top + height for top, _, height, _ in boxes]
    fast = [decode.jpeg_crop(jpegs[i], boxes[i], size, "RGB").permute(2, 0, 1) for i in numbers]
    samples = [(image, 0, []) for image in fast]
    pixels = [decode.decode(jpegs[i], needed[i], 1, "RGB") for i in numbers]
    last = v1.Compose(upstream_transform(args.input_size).transforms[2:])

    def resize(i: int) -> None:
        top, left, height, width = boxes[i]
        crop = torch.from_numpy(pixels[i][top : top + height, left : left + width].copy())[None].permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(crop, size, mode="bicubic", antialias=True)

    stages: dict[str, Callable[[int], object]] = {
        "upstream: decode": lambda i: Image.open(io.BytesIO(data[i])).convert("RGB"),
        "upstream: crop and resize": lambda i: images[i].crop(edges[i]).resize(size, Image.Resampling.BICUBIC),
        "upstream: to tensor, normalise": lambda i: last(crops[i]),
        "ours: read the file": lambda i: Path(paths[i]).read_bytes(),
        "ours: header, draw the crop": lambda i: (
            decode.read_jpeg(data[i]),
            draw_crop(*jpegs[i].size, random.Random(i)),
        ),
        "ours: decode all": lambda i: decode.decode(jpegs[i], jpegs[i].stored[0], 1, "RGB"),
        "ours: decode what is needed": lambda i: decode.decode(jpegs[i], needed[i], scales[i], "RGB"),
        "ours: crop and resize": resize,
        "ours: batch": lambda i: collate_augmented(samples[: args.batch_size]) if i % args.batch_size == 0 else None,
    }
    tasks = {name: lambda _, stage=stage: [stage(i) for i in numbers] for name, stage in stages.items()}
    times, _ = alternate(tasks, args.rounds, time.process_time)
    rows = [[name, f"{1e3 * statistics.median(seconds) / len(paths):.3f}"] for name, seconds in times.items()]
    show_table("where the time goes", ["stage", "ms per image"], rows)


# --- How exact it is ---


def compare_pixels(paths: list[str], args: Namespace) -> None:
    """Fast against exact, for the same crops."""
    fast, exact = (augmented(paths, args.input_size, exact) for exact in (False, True))
    mean, largest, quality = [], [], []
    for epoch in range(3):
        for index in range(len(paths)):
            difference = fast[epoch, index][0].double() - exact[epoch, index][0]
            mean.append(difference.abs().mean().item())
            largest.append(difference.abs().max().item())
            quality.append(10 * np.log10(255**2 / max(difference.square().mean().item(), 1e-3)))
    logger.info(
        "fast against exact, of 255: mean difference %.3f (of the worst crop %.2f), largest %.0f",
        *(statistics.mean(mean), max(mean), max(largest)),
    )
    logger.info(
        "PSNR of fast against exact: median %.1f dB, worst crop %.1f dB", statistics.median(quality), min(quality)
    )


# --- Loader processes ---


def measure_workers(paths: list[str], args: Namespace) -> None:
    """By the clock; the processes share the machine's cores with whatever else runs."""
    repeated = paths * max(8 * args.batch_size // len(paths), 1)
    rows = []
    for workers in args.num_workers:
        theirs = DataLoader(
            Upstream(repeated, args.input_size), args.batch_size, num_workers=workers, persistent_workers=workers > 0
        )
        dataset = augmented(repeated, args.input_size, exact=False)
        ours = ImageLoader(dataset, EpochBatches(len(dataset), args.batch_size, seed=0), num_workers=workers)
        (their_speed, _), (speed, main) = (images_per_second(loader, args) for loader in (theirs, ours))
        rows.append([str(workers), f"{speed:.0f}", f"{their_speed:.0f}", f"{main:.3f}"])
    header = ["loader processes", "images/s", "with upstream's transforms", "ms per image of the main process"]
    show_table("through loader processes, by the clock", header, rows)


def images_per_second(loader: DataLoader | ImageLoader, args: Namespace) -> tuple[float, float]:
    """And the main process's own milliseconds per image. The first epoch, in which workers start, does not count."""
    for _ in loader:
        pass
    images, start, own = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < args.seconds:
        for imgs, _, _ in loader:
            images += len(imgs)
    return images / (time.perf_counter() - start), (time.process_time() - own) * 1e3 / images


def main(args: Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if args.data_path is None:
            make_images(Path(made), args)
        paths = find_images(Path(args.data_path or made), args.images)
        logger.info("%s, to %d x %d", describe_images(paths), args.input_size, args.input_size)
        compare_pipelines(paths, args)
        profile_stages(paths, args)
        compare_pixels(paths, args)
        measure_workers(paths, args)


if __name__ == "__main__":
    run(main, get_args_parser())
