"""Where images come from: class folders, Arrow tables, torchvision's small data sets, built-in shapes, or your own
`Source`."""

import fcntl
import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torchvision import datasets

from util.arguments import DEFAULT_DATA_PATH
from util.checkpoint import reason_of
from util.cli import UserError
from util.data.listing import ImageList, Listing, list_images, read_regular
from util.data.shapes import ShapesDataset
from util.misc import generator


class Source(Protocol):
    """Images with labels and names: all that loaders, evaluations and caches need."""

    classes: list[str]  # empty if the images are unlabelled

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | Image.Image:
        """The content of an image file, or an image."""
        ...

    def label(self, index: int) -> int:
        """Without opening the image."""
        ...

    def name(self, index: int) -> str:
        """The same wherever the data is stored: for messages, saved predictions, and to check the data on resuming."""
        ...

    def fingerprint(self) -> str:
        """Identifies the content: the key of cached features, so it must change whenever an image or label does."""
        ...


def labels_of(source: Source) -> torch.Tensor:
    """All labels [N]."""
    return torch.tensor([source.label(index) for index in range(len(source))], dtype=torch.int64)


def image_names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


class TorchvisionSet:
    """One of torchvision's data sets, held in memory; `title` is the prefix of its images' names."""

    def __init__(self, images: Any, labels: Any, title: str):  # torchvision's data sets have no common type
        self.images, self.labels, self.title = images, torch.as_tensor(labels).tolist(), title
        self.classes = images.classes

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Image.Image:
        return self.images[index][0]

    def label(self, index: int) -> int:
        return self.labels[index]

    def name(self, index: int) -> str:
        return f"{self.title}/{index}"

    def fingerprint(self) -> str:
        pixels = np.ascontiguousarray(self.images.data).tobytes()
        return hashlib.sha256(pixels + labels_of(self).numpy().tobytes()).hexdigest()


class Subset:
    """The images of a source at `indices`."""

    def __init__(self, source: Source, indices: list[int]):
        self.source, self.classes = source, source.classes
        self.indices = np.array(indices, np.int64)  # shared with loader processes, unlike a list's numbers

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes | Image.Image:
        return self.source.read(int(self.indices[index]))

    def label(self, index: int) -> int:
        return self.source.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint()} {self.indices.tolist()}".encode()).hexdigest()


def build_source(
    args: Namespace, split: str, classes: list[str] | None = None, listing: Listing | None = None
) -> Source:
    """The images of `--data_set`, at most `--max_images`; split "pretrain" (labels are not used), "train" or "val".

    `classes` restricts a folder to these, instead of `--num_classes` and `--class_list`. `listing` is the folder's;
    without it, the folder is listed now, which all processes must join.
    """
    source = whole_source(args, split, classes, listing)
    if args.max_images is None or args.max_images >= len(source):
        return source
    draw = generator("max_images", args.split_seed, "val" if split == "val" else "train")
    return Subset(source, sorted(torch.randperm(len(source), generator=draw)[: args.max_images].tolist()))


def whole_source(args: Namespace, split: str, classes: list[str] | None, listing: Listing | None) -> Source:
    listing = listing or list_images(args)
    if listing is not None:
        return folder_source(args, split, classes, listing)
    if args.data_set == "shapes":
        images = max(args.shapes_images // 5, 1) if split == "val" else args.shapes_images
        return ShapesDataset(args.input_size, images, split)
    return torchvision_source(args, split)


def folder_source(args: Namespace, split: str, chosen: list[str] | None, listing: Listing) -> ImageList:
    """DATA/train/CLASS/* and DATA/val/CLASS/*, DATA/CLASS/*, or a flat folder of images (for training without labels).

    The training images define the classes, and those of held-out images must agree.
    """
    place = split_place(args, split, listing)
    training = listing.place("train") or ""
    if not (available := listing.classes(training)):
        return flat_source(args, place, listing)
    classes = chosen or choose_classes(available, args)
    if place != training:
        choice = bool(chosen or args.num_classes or args.class_list)
        refuse_other_classes(listing, training, place, classes if choice else None)
    files = [listing.files_of(os.path.join(place, name)) for name in classes]
    if args.split:
        files = [part_of(each, name, args, split) for each, name in zip(files, classes, strict=True)]
    labels = np.repeat(np.arange(len(classes)), [len(each) for each in files])
    if not len(labels):
        raise UserError(f"no images of the chosen classes in {os.path.join(listing.root, place)}")
    return listing.source(np.concatenate(files), labels, classes)


def split_place(args: Namespace, split: str, listing: Listing) -> str:
    """The folder that holds the images of `split`, below `--data_path`."""
    held_out = listing.place("val")
    if args.split and held_out:
        there = os.path.join(listing.root, held_out)
        raise UserError(f"--split divides a single folder of classes, but there is {there}")
    if split != "val" or args.split:
        return listing.place("train") or ""
    if held_out is None:
        raise UserError(
            f"--data_path {listing.root} has no folder val or test with images to evaluate on; "
            "--split 0.8 divides a single folder"
        )
    return held_out


def flat_source(args: Namespace, place: str, listing: Listing) -> ImageList:
    folder = os.path.join(listing.root, place)
    if args.num_classes or args.class_list or args.split:
        flags = "--num_classes, --class_list and --split"
        raise UserError(f"{flags} need class folders, but {folder} has none with images")
    files = listing.files_of(place)
    if not len(files):
        raise UserError(f"--data_path: no images in {folder}, neither directly nor in class folders below it")
    return listing.source(files)


def refuse_other_classes(listing: Listing, training: str, held_out: str, chosen: list[str] | None) -> None:
    """All class folders, or all chosen ones, must agree: others would be ignored, or never be predicted correctly."""
    theirs = set(listing.classes(held_out))
    ours = set(chosen or listing.classes(training))
    differing = {training: ours - theirs, held_out: set() if chosen else theirs - ours}
    said = [f"only {place} has {', '.join(sorted(names)[:5])}" for place, names in differing.items() if names]
    if said:
        raise UserError(
            f"--data_path {listing.root}: the class folders with images differ: {' and '.join(said)}; "
            "make them agree, or name those to use in a --class_list"
        )


def part_of(files: np.ndarray, name: str, args: Namespace, split: str) -> np.ndarray:
    """The `--split` share of a class for training, the rest for testing; depends only on split_seed and class."""
    train = min(max(round(args.split * len(files)), 1), max(len(files) - 1, 1))  # both parts get an image
    order = torch.randperm(len(files), generator=generator("split", args.split_seed, name)).numpy()
    return files[np.sort(order[train:] if split == "val" else order[:train])]


def choose_classes(classes: list[str], args: Namespace) -> list[str]:
    """All classes, those of `--class_list`, or `--num_classes` of them drawn with `--class_seed`."""
    if args.class_list:
        wanted = read_class_list(args.class_list)
        missing = sorted(set(wanted) - set(classes))
        if missing:
            raise UserError(f"--class_list {args.class_list} names classes without images: {', '.join(missing[:5])}")
        return [name for name in classes if name in wanted]
    if args.num_classes:
        if not 1 <= args.num_classes <= len(classes):
            raise UserError(f"--num_classes {args.num_classes}: choose from 1 to {len(classes)}, or 0 for all classes")
        order = torch.randperm(len(classes), generator=generator("classes", args.class_seed))
        return [classes[i] for i in order[: args.num_classes].sort().values.tolist()]
    return classes


def read_class_list(path: str) -> list[str]:
    try:
        lines = os.fsdecode(read_regular(path)).split("\n")  # folder names, which need not be UTF-8
    except OSError as error:
        raise UserError(f"--class_list {path}: {reason_of(error)}") from None
    if any("\0" in line for line in lines):
        raise UserError(f"--class_list {path} is not a text file; it needs a class folder's name per line")
    wanted = sorted({line.strip() for line in lines if line.strip()})
    if not wanted:
        raise UserError(f"--class_list {path} names no class")
    return wanted


def torchvision_source(args: Namespace, split: str) -> TorchvisionSet:
    name, root = args.data_set, args.data_path
    if not root or root == DEFAULT_DATA_PATH:
        raise UserError(f"--data_set {name} needs --data_path: the folder that holds it, or that --download fills")
    title = f"{name}/{split}"
    try:
        with in_turn(root) if args.download else nullcontext():
            if name == "stl10":  # its unlabelled images are used for pretraining
                part = {"pretrain": "train+unlabeled", "train": "train", "val": "test"}[split]
                stl10 = datasets.STL10(root, split=part, download=args.download)
                return TorchvisionSet(stl10, stl10.labels, title)
            sets = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}
            images = sets[name](root, train=split != "val", download=args.download)
            return TorchvisionSet(images, images.targets, title)
    except RuntimeError as error:
        advice = "the download failed" if args.download else "add --download to fetch it"
        raise UserError(f"--data_set {name} is not in {root}: {error}; {advice}") from None
    except OSError as error:  # includes urllib's
        raise UserError(f"--data_set {name} cannot be fetched to {root}: {error}") from None


@contextmanager
def in_turn(folder: str) -> Iterator[None]:
    """Processes that download to the same folder wait for one another: the first downloads, the others check."""
    with ExitStack() as stack:
        with suppress(OSError):  # some file systems have no locks; a read-only folder can only be checked
            os.makedirs(folder, exist_ok=True)
            file = stack.enter_context(open(os.path.join(folder, ".download.lock"), "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
