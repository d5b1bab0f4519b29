"""From images to batches: transforms, and one seeded loader for any source.

A sample depends only on (seed, epoch, index), not on the number of workers or on interruptions.
"""

import multiprocessing.connection
import random
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torchvision.transforms import InterpolationMode, v2

from util.cli import UserError, logger
from util.crop import Crop, draw_crop, draw_crop_once
from util.data.decode import MODES, exact_crop, jpeg_crop, read_jpeg, to_mode
from util.data.listing import Listing
from util.data.sources import Source, build_source
from util.misc import (
    available_cpus,
    derive_seed,
    gather_objects,
    generator,
    get_rank,
    get_world_size,
    start_loader_process,
)
from util.program import SHM_FULL, shortage

Values = Sequence[float] | None  # of --mean or --std

# --- Transforms ---


@dataclass
class Augmentation:
    """A random crop, resized and randomly mirrored: uint8 [C, H, W], channels last in memory.

    The crop is drawn first, so only the part it needs is decoded. `exact` decodes the whole image; crops stay the same.
    """

    size: tuple[int, int]
    mode: str
    draw: Callable[[int, int, random.Random], Crop]
    exact: bool = False

    def __call__(self, data: bytes | Image.Image, rng: random.Random) -> torch.Tensor:
        """`data` is the content of an image file, or an image."""
        jpeg = read_jpeg(data) if isinstance(data, bytes) and not self.exact else None
        if jpeg is not None:
            pixels = jpeg_crop(jpeg, self.draw(*jpeg.size, rng), self.size, self.mode)
        else:
            image = to_mode(data, self.mode)
            pixels = exact_crop(image, self.draw(image.height, image.width, rng), self.size)
        return (pixels.flip(1) if rng.random() < 0.5 else pixels).permute(2, 0, 1)


def pretrain_augmentation(args: Namespace) -> Augmentation:
    """Upstream's augmentation for pretraining: a crop of 20 to 100% of the area, and a flip."""
    return Augmentation(args.input_size, MODES[args.in_chans], draw_crop, args.exact_decode)


def probe_augmentation(args: Namespace) -> Augmentation:
    """Upstream's augmentation for linear probing: a crop of 8 to 100% of the area, and a flip."""
    return Augmentation(args.input_size, MODES[args.in_chans], draw_crop_once, args.exact_decode)


def build_eval_transform(args: Namespace) -> v2.Transform:
    """Upstream's evaluation transform: resize, then centre crop; up to 224 px the crop is 7/8 of the resized side."""
    crop = (
        v2.Resize(resized_side(args.input_size), interpolation=InterpolationMode.BICUBIC),
        v2.CenterCrop(args.input_size),
    )
    to_float = (
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(*pixel_statistics(args.in_chans, args.mean, args.std)),
    )
    return v2.Compose([*crop, *to_float])


def resized_side(input_size: Sequence[int]) -> int:
    """The length of the shorter side after resizing, before the centre crop."""
    side = max(input_size)
    return int(side * 256 / 224) if side <= 224 else side


def normalise(imgs: torch.Tensor, mean: Values = None, std: Values = None) -> torch.Tensor:
    """uint8 images [B, C, H, W] on any device to the networks' input, float32, as the evaluation transform does."""
    means, stds = (on_device(imgs.device, *values) for values in pixel_statistics(imgs.shape[1], mean, std))
    return imgs.contiguous().div(255).sub_(means).div_(stds)


@cache  # copying these for each batch would sync host and device
def on_device(device: torch.device, *values: float) -> torch.Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


def pixel_statistics(in_chans: int, mean: Values = None, std: Values = None) -> tuple[list[float], list[float]]:
    """`--mean` and `--std` per channel; by default ImageNet's."""
    mean = per_channel("mean", mean, IMAGENET_DEFAULT_MEAN, in_chans)
    return mean, per_channel("std", std, IMAGENET_DEFAULT_STD, in_chans)


def per_channel(name: str, values: Values, imagenet: Sequence[float], in_chans: int) -> list[float]:
    """By default ImageNet's, averaged over channels for grey images, with 0.5 for an alpha channel."""
    if values is None:
        return [sum(imagenet) / 3] if in_chans == 1 else [*imagenet, *[0.5] * (in_chans - 3)]
    if len(values) not in (1, in_chans):
        raise UserError(f"--{name} takes one number, or one for each of {in_chans} channels, not {len(values)}")
    return list(values) * (in_chans // len(values))


# --- Samples and batches ---


class ImageDataset(Dataset):
    """Transformed images, keyed by (epoch, index). An unreadable image is replaced by the next one.

    A sample is (image, label, names of the unreadable images it replaces).
    """

    def __init__(self, source: Source, transform: Callable[..., torch.Tensor], mode: str, max_bad_images: int = 100):
        self.source, self.transform, self.mode, self.max_bad_images = source, transform, mode, max_bad_images

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int, list[str]]:
        _, index = key
        bad = []
        for candidate in range(index, index + min(len(self), self.max_bad_images + 1)):
            candidate %= len(self)
            try:
                return self.view(self.source.read(candidate), key), self.source.label(candidate), bad
            except Exception as error:  # on damaged files, decoders raise almost anything
                bad.append(f"{self.source.name(candidate)} ({type(error).__name__}: {error})")
        return self.view(Image.new(self.mode, (1, 1)), key), 0, bad  # the main process ends the run

    def view(self, data: bytes | Image.Image, key: tuple[int, int]) -> torch.Tensor:
        """The transformed image. Without augmentation the key does not matter."""
        return self.transform(to_mode(data, self.mode))


class AugmentedDataset(ImageDataset):
    """Augmented images for training; each view depends only on (seed, epoch, index)."""

    def __init__(self, source: Source, augmentation: Augmentation, seed: int, max_bad_images: int = 100):
        super().__init__(source, augmentation, augmentation.mode, max_bad_images)
        self.seed = seed

    def view(self, data: bytes | Image.Image, key: tuple[int, int]) -> torch.Tensor:
        return self.transform(data, random.Random(derive_seed("augment", self.seed, *key)))


class EpochBatches(Sampler):
    """Batches of (epoch, index) keys, in an order that depends only on (seed, epoch).

    Each rank takes its slice of a global batch, so the same images form a batch for any number of ranks. An incomplete
    global batch is dropped, as upstream, and so is an incomplete accumulation. `subset` holds the indices to draw from,
    if not all. The length is that of an epoch. Iteration begins at `start` = (epoch, batch) and runs through all
    `epochs` without a break, so loaders prefetch the next epoch while one ends.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        subset: list[int] | None = None,
        epochs: int = 1,
        accum_iter: int = 1,
    ):
        self.num_samples = num_samples if subset is None else len(subset)
        self.batch_size, self.seed, self.subset = batch_size, seed, None if subset is None else torch.tensor(subset)
        self.rank, self.world_size, self.epochs, self.accum_iter = rank, world_size, epochs, accum_iter
        self.start = (0, 0)

    def __len__(self) -> int:
        return self.num_samples // (self.batch_size * self.world_size * self.accum_iter) * self.accum_iter

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        first_epoch, first_batch = self.start
        for epoch in range(first_epoch, self.epochs):
            yield from self.of_epoch(epoch, first_batch if epoch == first_epoch else 0)

    def of_epoch(self, epoch: int, first_batch: int = 0) -> Iterator[list[tuple[int, int]]]:
        order = torch.randperm(self.num_samples, generator=generator("order", self.seed, epoch))
        if self.subset is not None:
            order = self.subset[order]
        for batch in range(first_batch, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield [(epoch, index) for index in order[start : start + self.batch_size].tolist()]


class BadImages:
    """Reports each unreadable image once, and ends the run when there are too many."""

    def __init__(self, dataset: ImageDataset, fate: str):
        self.total, self.limit, self.fate = len(dataset), dataset.max_bad_images, fate
        self.names: set[str] = set()

    def add(self, bad: list[str]) -> None:
        for name in sorted(set(bad) - self.names):
            self.names.add(name)
            logger.warning("unreadable image, %s: %s; %d so far", self.fate, name, len(self.names))
        if bad and len(self.names) >= self.total:
            raise UserError(f"none of the {self.total} images can be read; the first: {bad[0]}")
        if len(self.names) > self.limit:
            raise UserError(
                f"{len(self.names)} images cannot be read, more than --max_bad_images {self.limit} allows; "
                f"the last: {bad[-1]}"
            )


Samples = list[tuple[torch.Tensor, int, list[str]]]
Batch = tuple[torch.Tensor, torch.Tensor, list[list[str]]]


class ImageLoader:
    """Batches (imgs uint8 [B, C, H, W], labels [B], indices [B] in the data set) of one epoch at a time; keeps track of
    unreadable images.

    `normalise` turns the images into the networks' input, on the device. `collate_fn` is for images in other formats.
    """

    def __init__(
        self,
        dataset: AugmentedDataset,
        batches: EpochBatches,
        *,
        num_workers: int = 0,
        pin_mem: bool = False,
        collate_fn: Callable[[Samples], Batch] | None = None,
    ):
        self.dataset, self.batches = dataset, batches
        self.start, self._next = (0, 0), None
        self.bad_images = BadImages(dataset, fate="replaced by another")
        collate_fn = collate_fn or collate_augmented
        self.fetcher = Fetcher(dataset, batches, collate_fn, num_workers=num_workers, pin_mem=pin_mem)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set what to iterate over next; batches before `first_batch` are not loaded."""
        self.start = (epoch, first_batch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        epoch, first_batch = self.start
        if self.start != self._next:  # otherwise the workers have already started on it
            self.batches.start = self.start
            self.fetcher.restart()
        for batch, keys in enumerate(self.batches.of_epoch(epoch, first_batch), start=first_batch + 1):
            imgs, labels, bad = self.fetcher.fetch(keys)
            self._next = (epoch, batch) if batch < len(self) else (epoch + 1, 0)
            self.bad_images.add([name for names in bad for name in names])
            index = torch.tensor([index for _, index in keys])
            yield imgs, labels, index.pin_memory() if labels.is_pinned() else index

    def share_bad_images(self) -> None:
        """Combine all processes' counts: the first process logs, and the limit applies to the total."""
        self.bad_images.add([name for names in gather_objects(sorted(self.bad_images.names)) for name in names])


class Fetcher:
    """Batches of samples, one by one, in the order of `batches`, loaded by worker processes.

    If these fail, this process loads that batch and all later ones, and `fault` says why. Samples are the same wherever
    they are loaded, so a run can continue to the next point at which it can be saved.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batches: Iterable[list[tuple[int, int]]],
        collate_fn: Callable[[Samples], Batch],
        *,
        num_workers: int = 0,
        pin_mem: bool = False,
    ):
        self.dataset, self.collate_fn = dataset, collate_fn
        self.fault: str | None = None
        self.num_workers = min(num_workers, available_cpus())  # more would only compete, and torch warns about them
        self._processes = []
        self._stream: Any = None  # torch's iterator
        self._loader = DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate_fn,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=start_loader_process,
            pin_memory=pin_mem,
            generator=torch.Generator(),  # leaves the global generator untouched
        )

    def restart(self) -> None:
        """Start from the first batch, which may have changed."""
        if self.fault is None:
            self._attempt(self._start)

    def fetch(self, keys: list[tuple[int, int]]) -> Batch:
        """The next batch, whose keys are known to be `keys`."""
        batch = self._attempt(lambda: next(self._stream)) if self.fault is None else None
        return batch or self.collate_fn([self.dataset[key] for key in keys])

    def _start(self) -> None:
        self._stream = iter(self._loader)
        if self.num_workers:
            self._processes = self._stream._workers
            if not isinstance(self._stream._workers_done_event, OneSidedEvent):
                self._stream._workers_done_event = OneSidedEvent(self._stream._workers_done_event)
            # When a worker ends, torch would raise an error in the middle of whatever this process is doing. Waiting
            # for a batch also reveals it, within five seconds.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _attempt(self, action: Callable[[], Batch | None]) -> Batch | None:
        try:
            return action()
        except Exception as error:  # torch raises almost anything; a bug of our own recurs in this process
            if not self.num_workers:
                raise
            self.fault = self._cause(error)
            logger.warning("%s", self.fault)
            self._abandon()
            # Torch cannot clean up a half-built iterator, and what it then reports does not reveal the cause.
            report, sys.unraisablehook = sys.unraisablehook, lambda _: None
            error.__traceback__ = None
            sys.unraisablehook = report
            return None

    def _abandon(self) -> None:
        """End the workers without torch's own clean-up, which may wait forever for a lock that a killed worker held."""
        if self._stream is not None:
            for worker in self._stream._workers:
                worker.kill()
            self._stream._shutdown = True

    def _cause(self, error: Exception) -> str:
        """A sentence, with advice. How a process ended is more telling than the error that follows."""
        sentinels = [each.sentinel for each in self._processes]
        ended = multiprocessing.connection.wait(sentinels, timeout=1) if sentinels else []
        for each in self._processes:
            each.join(1 if each.sentinel in ended else 0)  # a sentinel may be a moment ahead of the exit code
        ended_by = [-each.exitcode for each in self._processes if each.exitcode]
        if signal.SIGBUS in ended_by:  # memory that is mapped but not available
            return SHM_FULL
        if cause := shortage(error):
            return cause
        if signal.SIGKILL in ended_by:
            return "a loader process was killed, probably for lack of memory: lower --num_workers or --batch_size"
        return (
            f"loader processes failed ({type(error).__name__}: {str(error).partition(chr(10))[0]}); try --num_workers 0"
        )


class OneSidedEvent:
    """For the one process that sets an event shared with others: it knows the state, and need not wait for the event's
    lock to ask. A killed loader process may have held it, and torch asks when it finds one dead."""

    def __init__(self, event: Any):
        self._event, self._is_set = event, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._event.set()


def collate(samples: Samples) -> Batch:
    """In workers, default_collate writes straight to shared memory."""
    images, labels, bad = zip(*samples, strict=True)
    return default_collate(list(images)), default_collate(list(labels)), list(bad)


def collate_augmented(samples: Samples) -> Batch:
    """Keeps images channels last: reordering on the CPU would cost more than the rest of collating."""
    images, labels, bad = collate([(image.permute(1, 2, 0), label, bad) for image, label, bad in samples])
    return images.permute(0, 3, 1, 2), labels, bad


def build_pretrain_loader(args: Namespace, listing: Listing | None = None) -> ImageLoader:
    """`listing` as in `build_source`."""
    source = build_source(args, "pretrain", listing=listing)
    return build_train_loader(source, pretrain_augmentation(args), args.seed, args)


def build_train_loader(
    source: Source,
    augmentation: Augmentation,
    seed: int,
    args: Namespace,
    subset: list[int] | None = None,
    collate_fn: Callable[[Samples], Batch] | None = None,
) -> ImageLoader:
    """This process's share of every batch; `subset` as in `EpochBatches`, `collate_fn` as in `ImageLoader`."""
    dataset = AugmentedDataset(source, augmentation, seed, args.max_bad_images)
    batches = EpochBatches(
        len(dataset), args.batch_size, seed, get_rank(), get_world_size(), subset, args.epochs, args.accum_iter
    )
    pin_mem = args.pin_mem and str(args.device).startswith("cuda")
    return ImageLoader(dataset, batches, num_workers=args.num_workers, pin_mem=pin_mem, collate_fn=collate_fn)


def count_steps(data_loader: ImageLoader, args: Namespace) -> int:
    """Updates per epoch; an incomplete last one is dropped."""
    steps = len(data_loader) // args.accum_iter
    if steps == 0:
        images, batch = len(data_loader.dataset), args.batch_size * get_world_size() * args.accum_iter
        raise UserError(f"{images} images do not fill one batch of {batch}; lower --batch_size or --accum_iter")
    return steps


def build_eval_dataset(
    args: Namespace, split: str, classes: list[str] | None = None, listing: Listing | None = None
) -> ImageDataset:
    """The split without augmentation, so the epoch in a key does not matter; other arguments as in `build_source`."""
    source = build_source(args, split, classes, listing)
    return ImageDataset(source, build_eval_transform(args), MODES[args.in_chans], args.max_bad_images)
