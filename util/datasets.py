"""From images to batches: transforms, and one seeded loader over any source.

A sample is a function of (seed, epoch, index): the number of workers, or where a run was interrupted, changes nothing.
"""

from argparse import Namespace
from collections.abc import Iterator

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, Sampler, default_collate
from torchvision.transforms import InterpolationMode, v2

from util.crop import RandomResizedCrop
from util.interrupt import outlive_signals
from util.misc import UserError, derive_seed, gather_objects, generator, get_rank, get_world_size, logger
from util.sources import build_source, describe

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # how PIL names an image of so many channels


# --- What is done to an image ---


def build_pretrain_transform(args: Namespace) -> v2.Transform:
    """Upstream's augmentation for pretraining: a crop of 20 to 100 % of the area, and a flip."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(args.input_size, scale=(0.2, 1.0), interpolation=InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            *to_normalised_tensor(args.in_chans),
        ]
    )


def build_probe_transform(args: Namespace) -> v2.Transform:
    """Upstream's augmentation for linear probing: a crop of 8 to 100 % of the area, and a flip."""
    return v2.Compose(
        [
            RandomResizedCrop(args.input_size, interpolation=InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            *to_normalised_tensor(args.in_chans),
        ]
    )


def build_eval_transform(args: Namespace) -> v2.Transform:
    """Upstream's for evaluation: resize, then the centre crop; up to 224 px the crop is 7/8 of the side."""
    side = max(args.input_size)
    resized = int(side * 256 / 224) if side <= 224 else side
    return v2.Compose(
        [
            v2.Resize(resized, interpolation=InterpolationMode.BICUBIC),
            v2.CenterCrop(args.input_size),
            *to_normalised_tensor(args.in_chans),
        ]
    )


def to_normalised_tensor(in_chans: int) -> list[v2.Transform]:
    mean, std = pixel_statistics(in_chans)
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


def pixel_statistics(in_chans: int) -> tuple[list[float], list[float]]:
    """ImageNet's mean and standard deviation; their averages for grey images; 0.5 for an alpha channel."""
    mean, std = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)
    if in_chans == 1:
        return [sum(mean) / 3], [sum(std) / 3]
    return mean + [0.5] * (in_chans - 3), std + [0.5] * (in_chans - 3)


# --- Samples and batches ---


class SeededDataset:
    """Transformed samples, keyed by (epoch, index). An unreadable image is replaced, and the sample says so.

    A sample is (image, label, names of the unreadable images that were met on the way to it).
    """

    def __init__(self, source, transform: v2.Transform, mode: str, seed: int, max_bad_images: int = 100):
        self.source, self.transform, self.mode, self.seed = source, transform, mode, seed
        self.max_bad_images = max_bad_images

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int, list[str]]:
        epoch, index = key
        image, label, bad = self.load_or_replace(index)
        # torchvision's transforms draw from torch's global generator: seed it for this sample, and only here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed("augment", self.seed, epoch, index))
            return self.transform(image), label, bad

    def load_or_replace(self, index: int) -> tuple[Image.Image, int, list[str]]:
        """The image at `index`, or the next readable one; gives up, with a black image, where the run is to fail."""
        bad = []
        for candidate in range(index, index + min(len(self), self.max_bad_images + 1)):
            candidate %= len(self)
            try:
                image, label = self.source[candidate]
                return image.convert(self.mode), label, bad
            except Exception as error:  # decoders of damaged files raise almost anything
                bad.append(f"{describe(self.source, candidate)} ({type(error).__name__}: {error})")
        return Image.new(self.mode, (1, 1)), 0, bad


class EpochBatches(Sampler):
    """Batches of (epoch, index) keys, in an order that is a function of (seed, epoch).

    A global batch is a run of the shuffled order, and each rank takes its own slice of it, so that the same images form
    a batch whatever the number of ranks. What does not fill a global batch is dropped, as upstream does. `subset` holds
    the indices to draw from, if not all. Iterating starts at `first_batch`; the length is that of the whole epoch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        subset: list[int] | None = None,
    ):
        self.num_samples = num_samples if subset is None else len(subset)
        self.batch_size, self.seed, self.subset = batch_size, seed, subset
        self.rank, self.world_size = rank, world_size
        self.epoch = self.first_batch = 0

    def __len__(self) -> int:
        return self.num_samples // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = torch.randperm(self.num_samples, generator=generator("order", self.seed, self.epoch)).tolist()
        if self.subset is not None:
            order = [self.subset[i] for i in order]
        for batch in range(self.first_batch, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield [(self.epoch, index) for index in order[start : start + self.batch_size]]


class BadImages:
    """Names each unreadable image once, and ends the run when there are too many."""

    def __init__(self, dataset: SeededDataset, fate: str):
        self.total, self.limit, self.fate = len(dataset), dataset.max_bad_images, fate
        self.names: set[str] = set()

    def add(self, bad: list[str]) -> None:
        for name in sorted(set(bad) - self.names):
            logger.warning("unreadable image, %s: %s", self.fate, name)
        self.names.update(bad)
        if bad and len(self.names) >= self.total:
            raise UserError(f"none of the {self.total} images can be read; the first: {bad[0]}")
        if len(self.names) > self.limit:
            raise UserError(
                f"{len(self.names)} images cannot be read, more than --max_bad_images {self.limit} allows; "
                f"the last: {bad[-1]}"
            )


class ImageLoader:
    """Batches (imgs [B, C, H, W], labels [B]) of one epoch after another; counts the images that cannot be read."""

    def __init__(self, dataset: SeededDataset, batches: EpochBatches, *, num_workers: int = 0, pin_mem: bool = False):
        self.dataset, self.batches = dataset, batches
        self.bad_images = BadImages(dataset, fate="replaced by another")
        self.loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            pin_memory=pin_mem,
            collate_fn=collate,
            persistent_workers=num_workers > 0,
            worker_init_fn=outlive_signals,
            generator=torch.Generator(),  # its own, so that iterating draws nothing from the global one
        )

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose what the next iteration goes through; batches before the first are not even loaded."""
        self.batches.epoch, self.batches.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for imgs, labels, bad in self.loader:
            self.bad_images.add([name for names in bad for name in names])
            yield imgs, labels

    def share_bad_images(self) -> None:
        """Once more for all processes together: the first one speaks, and the limit is for the whole."""
        self.bad_images.add([name for names in gather_objects(sorted(self.bad_images.names)) for name in names])


def collate(samples: list[tuple[torch.Tensor, int, list[str]]]) -> tuple[torch.Tensor, torch.Tensor, list[list[str]]]:
    images, labels, bad = zip(*samples, strict=True)
    return torch.stack(images), default_collate(list(labels)), list(bad)


def build_dataset(args: Namespace, split: str, transform: v2.Transform) -> SeededDataset:
    source = build_source(args, split)
    return SeededDataset(source, transform, MODES[args.in_chans], args.seed, args.max_bad_images)


def build_pretrain_loader(args: Namespace) -> ImageLoader:
    dataset = build_dataset(args, "pretrain", build_pretrain_transform(args))
    return ImageLoader(
        dataset,
        EpochBatches(len(dataset), args.batch_size, args.seed, get_rank(), get_world_size()),
        num_workers=args.num_workers,
        pin_mem=args.pin_mem and args.device.startswith("cuda"),
    )


def build_eval_dataset(args: Namespace, split: str) -> SeededDataset:
    """The split without augmentation, so the epoch in a key plays no part."""
    return build_dataset(args, split, build_eval_transform(args))
