"""From images to batches: transforms, and one seeded loader over any source.

A sample is a function of (seed, epoch, index): the number of workers, or where a run was interrupted, changes nothing.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, Sampler, default_collate
from torchvision.transforms import InterpolationMode, v2

from util.cli import UserError, logger
from util.crop import Crop, draw_crop, draw_crop_once
from util.data.decode import MODES, exact_crop, jpeg_crop, read_jpeg, to_mode
from util.data.sources import build_source, describe, read
from util.misc import derive_seed, gather_objects, generator, get_rank, get_world_size, outlive_signals

# --- What is done to an image ---


@dataclass
class Augmentation:
    """A random crop, resized, and mirrored in half of the cases: uint8 [C, H, W], of which the channels lie together.

    The crop is drawn first, and then no more is decoded than it needs. `exact` decodes all, and changes no crop.
    """

    size: tuple[int, int]
    mode: str
    draw: Callable[[int, int, random.Random], Crop]
    exact: bool = False

    def __call__(self, data: bytes | Image.Image, rng: random.Random) -> torch.Tensor:
        """`data` is a file's content, or an image."""
        jpeg = read_jpeg(data) if isinstance(data, bytes) and not self.exact else None
        if jpeg is not None:
            pixels = jpeg_crop(jpeg, self.draw(*jpeg.size, rng), self.size, self.mode)
        else:
            image = to_mode(data, self.mode)
            pixels = exact_crop(image, self.draw(image.height, image.width, rng), self.size)
        return (pixels.flip(1) if rng.random() < 0.5 else pixels).permute(2, 0, 1)


def pretrain_augmentation(args: Namespace) -> Augmentation:
    """Upstream's for pretraining: a crop of 20 to 100 % of the area, and a flip."""
    return Augmentation(tuple(args.input_size), MODES[args.in_chans], draw_crop, args.exact_decode)


def probe_augmentation(args: Namespace) -> Augmentation:
    """Upstream's for linear probing: a crop of 8 to 100 % of the area, and a flip."""
    return Augmentation(tuple(args.input_size), MODES[args.in_chans], draw_crop_once, args.exact_decode)


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


def normalise(imgs: torch.Tensor) -> torch.Tensor:
    """What the evaluation's transform does to pixels, for a batch of bytes [B, C, H, W] on any device; float32."""
    mean, std = statistics_on(imgs.device, imgs.shape[1])
    return imgs.contiguous().div(255).sub_(mean).div_(std)


@cache  # a copy to the device per batch would make the host wait
def statistics_on(device: torch.device, in_chans: int) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in pixel_statistics(in_chans))
    return mean, std


def pixel_statistics(in_chans: int) -> tuple[list[float], list[float]]:
    """ImageNet's mean and standard deviation; their averages for grey images; 0.5 for an alpha channel."""
    mean, std = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)
    if in_chans == 1:
        return [sum(mean) / 3], [sum(std) / 3]
    return mean + [0.5] * (in_chans - 3), std + [0.5] * (in_chans - 3)


# --- Samples and batches ---


class ImageDataset:
    """Transformed images, keyed by (epoch, index). An unreadable one is replaced by the next, and the sample says so.

    A sample is (image, label, names of the unreadable images that were met on the way to it).
    """

    def __init__(self, source, transform: Callable[..., torch.Tensor], mode: str, max_bad_images: int = 100):
        self.source, self.transform, self.mode, self.max_bad_images = source, transform, mode, max_bad_images

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int, list[str]]:
        _, index = key
        bad = []
        for candidate in range(index, index + min(len(self), self.max_bad_images + 1)):
            candidate %= len(self)
            try:
                data, label = read(self.source, candidate)
                return self.view(data, key), label, bad
            except Exception as error:  # decoders of damaged files raise almost anything
                bad.append(f"{describe(self.source, candidate)} ({type(error).__name__}: {error})")
        return self.view(Image.new(self.mode, (1, 1)), key), 0, bad  # the run is to fail

    def view(self, data: bytes | Image.Image, key: tuple[int, int]) -> torch.Tensor:
        """What a sample shows of a file's content, or of an image. Without augmentation the key plays no part."""
        return self.transform(to_mode(data, self.mode))


class AugmentedDataset(ImageDataset):
    """Images for training, as the augmentation gives them; each view of one is a function of (seed, epoch, index)."""

    def __init__(self, source, augmentation: Augmentation, seed: int, max_bad_images: int = 100):
        super().__init__(source, augmentation, augmentation.mode, max_bad_images)
        self.seed = seed

    def view(self, data: bytes | Image.Image, key: tuple[int, int]) -> torch.Tensor:
        return self.transform(data, random.Random(derive_seed("augment", self.seed, *key)))


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

    def __init__(self, dataset: ImageDataset, fate: str):
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


Samples = list[tuple[torch.Tensor, int, list[str]]]
Batch = tuple[torch.Tensor, torch.Tensor, list[list[str]]]


class ImageLoader:
    """Batches (imgs uint8 [B, C, H, W], labels [B]) of one epoch after another; counts the images that cannot be read.

    `normalise` makes them the networks' input, on the device. `collate_fn` is for images in another form.
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
        self.bad_images = BadImages(dataset, fate="replaced by another")
        self.loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            pin_memory=pin_mem,
            collate_fn=collate_fn or collate_augmented,
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


def collate(samples: Samples) -> Batch:
    """In loader processes, default_collate writes to the memory that they share with the main one."""
    images, labels, bad = zip(*samples, strict=True)
    return default_collate(list(images)), default_collate(list(labels)), list(bad)


def collate_augmented(samples: Samples) -> Batch:
    """The same for images whose channels lie together; exchanging that here would cost more than all of the above."""
    images, labels, bad = collate([(image.permute(1, 2, 0), label, bad) for image, label, bad in samples])
    return images.permute(0, 3, 1, 2), labels, bad


def build_pretrain_loader(args: Namespace) -> ImageLoader:
    source = build_source(args, "pretrain")
    dataset = AugmentedDataset(source, pretrain_augmentation(args), args.seed, args.max_bad_images)
    return ImageLoader(
        dataset,
        EpochBatches(len(dataset), args.batch_size, args.seed, get_rank(), get_world_size()),
        num_workers=args.num_workers,
        pin_mem=args.pin_mem and args.device.startswith("cuda"),
    )


def count_steps(data_loader: ImageLoader, args: Namespace) -> int:
    """Updates per epoch; a last, incomplete one is left out."""
    steps = len(data_loader) // args.accum_iter
    if steps == 0:
        images, batch = len(data_loader.dataset), args.batch_size * get_world_size() * args.accum_iter
        raise UserError(f"{images} images do not fill one batch of {batch}; lower --batch_size or --accum_iter")
    return steps


def build_eval_dataset(args: Namespace, split: str) -> ImageDataset:
    """The split without augmentation, so the epoch in a key plays no part."""
    return ImageDataset(
        build_source(args, split), build_eval_transform(args), MODES[args.in_chans], args.max_bad_images
    )
