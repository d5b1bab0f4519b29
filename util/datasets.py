"""Data: folders of images, torchvision's small sets, and built-in shapes, behind one seeded loader.

A sample is a function of (seed, epoch, index): the number of workers, or where a run was interrupted, changes nothing.
"""

import errno
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader, Sampler, default_collate
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.transforms import InterpolationMode, v2

from util.crop import RandomResizedCrop
from util.misc import UserError, derive_seed, generator, logger
from util.shapes import ShapesDataset

DATA_SETS = ("folder", "cifar10", "cifar100", "stl10", "fashion_mnist", "shapes")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # how PIL names an image of so many channels


# --- Where images come from: len(source), source[i] -> (PIL image, label), source.classes ---


class ImageList:
    """Image files and their labels; `classes` is empty where the files are in no class folders."""

    def __init__(self, samples: list[tuple[str, int]], classes: list[str]):
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            image = Image.open(file)
            image.load()
        return image, label


def build_source(args: Namespace, split: str):
    """The images of `--data_set`: split "pretrain" (labels play no part), "train" or "val"."""
    if args.data_set == "shapes":
        if split == "val":
            return ShapesDataset(args.input_size, max(args.shapes_images // 5, 1), "val")
        return ShapesDataset(args.input_size, args.shapes_images, "train")
    if not args.data_path:
        raise UserError(f"--data_set {args.data_set} needs --data_path: the folder that holds the images")
    if args.data_set == "folder":
        return folder_source(args, split)
    if args.num_classes or args.class_list or args.split:
        raise UserError(
            f"--num_classes, --class_list and --split choose among folders, not in --data_set {args.data_set}"
        )
    return torchvision_source(args, split)


def folder_source(args: Namespace, split: str) -> ImageList:
    """DATA/train/CLASS/* and DATA/val/CLASS/*, DATA/CLASS/*, or a flat folder of images (for training without labels).

    The training images define the classes; a validation image of no such class is a mistake, not a class of its own.
    """
    data_path = Path(args.data_path)
    train_root = split_folder(data_path, "train")
    root = train_root if split != "val" or args.split else split_folder(data_path, "val")
    if args.split and find_split(data_path, "val"):
        raise UserError(
            f"--split divides a single folder of classes, but {data_path} has {find_split(data_path, 'val')}"
        )
    if not (classes := class_folders(train_root)):
        return flat_source(root, args)
    classes = choose_classes(classes, args)
    if root != train_root and not (args.num_classes or args.class_list):
        strangers = sorted(set(class_folders(root)) - set(classes))
        if strangers:
            raise UserError(f"{root} has classes that {train_root} has not: {', '.join(strangers[:5])}")
    samples = make_dataset(str(root), {name: i for i, name in enumerate(classes)}, IMG_EXTENSIONS, allow_empty=True)
    if args.split:
        samples = split_samples(samples, classes, args, split)
    if not samples:
        raise UserError(f"no images of the chosen classes in {root}")
    return ImageList(samples, classes)


def flat_source(root: Path, args: Namespace) -> ImageList:
    if args.num_classes or args.class_list or args.split:
        raise UserError(f"--num_classes, --class_list and --split need class folders, but {root} has none with images")
    files = sorted(str(path) for path in root.iterdir() if path.suffix.lower() in IMG_EXTENSIONS)
    if not files:
        raise UserError(f"--data_path: no images in {root}, neither directly nor in class folders below it")
    return ImageList([(path, 0) for path in files], classes=[])


def find_split(data_path: Path, split: str) -> Path | None:
    """The folder of a split; the test images may lie in val or in test."""
    names = ("val", "test") if split == "val" else ("train",)
    return next((data_path / name for name in names if (data_path / name).is_dir()), None)


def split_folder(data_path: Path, split: str) -> Path:
    if not data_path.is_dir():
        raise UserError(f"--data_path {data_path} is not a folder")
    if folder := find_split(data_path, split):
        return folder
    if split != "val":
        return data_path
    raise UserError(
        f"--data_path {data_path} has no folder val or test, which an evaluation needs; --split 0.8 divides one folder"
    )


def split_samples(
    samples: list[tuple[str, int]], classes: list[str], args: Namespace, split: str
) -> list[tuple[str, int]]:
    """The `--split` share of each class for training, the rest for testing; a function of (split_seed, class)."""
    chosen = []
    for label, name in enumerate(classes):
        of_class = [sample for sample in samples if sample[1] == label]
        train = min(max(round(args.split * len(of_class)), 1), max(len(of_class) - 1, 1))  # both parts get an image
        order = torch.randperm(len(of_class), generator=generator("split", args.split_seed, name)).tolist()
        part = order[train:] if split == "val" else order[:train]
        chosen += [of_class[i] for i in sorted(part)]
    return chosen


def class_folders(root: Path) -> list[str]:
    """Sorted names of the folders below `root` that hold an image somewhere."""
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [name for name in folders if holds_image(root / name)]


def holds_image(folder: Path) -> bool:
    walk = os.walk(folder, followlinks=True)
    return any(name.lower().endswith(IMG_EXTENSIONS) for _, _, names in walk for name in names)


def choose_classes(classes: list[str], args: Namespace) -> list[str]:
    """All classes, those of `--class_list`, or `--num_classes` of them drawn with `--class_seed`."""
    if args.class_list:
        wanted = read_class_list(args.class_list)
        missing = sorted(set(wanted) - set(classes))
        if missing:
            raise UserError(f"--class_list {args.class_list} names classes without images: {', '.join(missing[:5])}")
        return wanted
    if args.num_classes:
        if not 1 <= args.num_classes <= len(classes):
            raise UserError(f"--num_classes {args.num_classes}: choose from 1 to {len(classes)}, the classes there are")
        order = torch.randperm(len(classes), generator=generator("classes", args.class_seed)).tolist()
        return sorted(classes[i] for i in order[: args.num_classes])
    return classes


def read_class_list(path: str) -> list[str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UserError(f"--class_list {path}: {os.strerror(error.errno or errno.EIO)}") from None
    wanted = sorted({line.strip() for line in lines if line.strip()})
    if not wanted:
        raise UserError(f"--class_list {path} names no class")
    return wanted


def torchvision_source(args: Namespace, split: str):
    if args.data_set == "stl10":  # most of its images have no labels, which is what it is for
        make = datasets.STL10
        part = {"split": {"pretrain": "train+unlabeled", "train": "train", "val": "test"}[split]}
    else:
        sets = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}
        make, part = sets[args.data_set], {"train": split != "val"}
    try:
        return make(args.data_path, download=args.download, **part)
    except RuntimeError as error:
        advice = "add --download to fetch it" if not args.download else "the download did not work"
        raise UserError(f"--data_set {args.data_set} is not in {args.data_path}: {error}; {advice}") from None
    except OSError as error:  # urllib's errors among them
        raise UserError(f"--data_set {args.data_set} cannot be fetched to {args.data_path}: {error}") from None


def describe(source, index: int) -> str:
    """What a user can look for: the file's path, or the set's name and index."""
    return source.samples[index][0] if isinstance(source, ImageList) else f"{type(source).__name__}[{index}]"


def image_names(source, args: Namespace, split: str) -> list[str]:
    """A name for every image, the same wherever the data lies."""
    if isinstance(source, ImageList):
        return [os.path.relpath(path, args.data_path) for path, _ in source.samples]
    return [f"{args.data_set}/{split}/{index}" for index in range(len(source))]


def labels_of(source) -> torch.Tensor:
    """All labels [N], without opening an image."""
    if isinstance(source, ImageList):
        return torch.tensor([label for _, label in source.samples])
    if isinstance(source, ShapesDataset):
        return torch.tensor([source.label(index) for index in range(len(source))])
    return torch.as_tensor(source.labels if hasattr(source, "labels") else source.targets).long()


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
    the indices to draw from, if not all.
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
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_samples // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = torch.randperm(self.num_samples, generator=generator("order", self.seed, self.epoch)).tolist()
        if self.subset is not None:
            order = [self.subset[i] for i in order]
        for batch in range(len(self)):
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
            generator=torch.Generator(),  # its own, so that iterating draws nothing from the global one
        )

    def set_epoch(self, epoch: int) -> None:
        self.batches.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for imgs, labels, bad in self.loader:
            self.bad_images.add([name for names in bad for name in names])
            yield imgs, labels


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
        EpochBatches(len(dataset), args.batch_size, args.seed),
        num_workers=args.num_workers,
        pin_mem=args.pin_mem and args.device.startswith("cuda"),
    )


def build_eval_dataset(args: Namespace, split: str) -> SeededDataset:
    """The split without augmentation, so the epoch in a key plays no part."""
    return build_dataset(args, split, build_eval_transform(args))
