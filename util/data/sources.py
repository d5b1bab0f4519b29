"""Where images come from: class folders, torchvision's small sets, built-in shapes, or any `Source` of your own."""

import hashlib
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from util.arguments import DEFAULT_DATA_PATH
from util.cli import UserError
from util.data.shapes import ShapesDataset
from util.misc import generator


class Source(Protocol):
    """Images with labels and names. Loaders, evaluations and caches ask nothing else of one."""

    classes: list[str]  # empty if the images are unlabelled

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | Image.Image:
        """The content of an image file, or an image."""
        ...

    def label(self, index: int) -> int:
        """Without opening the image."""
        ...

    def name(self, index: int) -> str:
        """The same wherever the data lies: for messages, saved predictions, and to recognise the data on resuming."""
        ...

    def fingerprint(self) -> str:
        """Identifies the content: it keys cached features, so it has to change whenever an image or a label does."""
        ...


def labels_of(source: Source) -> torch.Tensor:
    """All labels [N]."""
    return torch.tensor([source.label(index) for index in range(len(source))], dtype=torch.int64)


def image_names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


class ImageList:
    """Image files as (path, label), with paths relative to `root`."""

    def __init__(self, samples: list[tuple[str, int]], classes: list[str], root: str | Path = ""):
        self.samples, self.classes, self.root = samples, classes, str(root)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> bytes:
        with open(os.path.join(self.root, self.name(index)), "rb", buffering=0) as file:
            return file.read()

    def label(self, index: int) -> int:
        return self.samples[index][1]

    def name(self, index: int) -> str:
        return self.samples[index][0]

    def fingerprint(self) -> str:
        """A hash of names, file sizes and labels: reading every file would take as long as the evaluation."""
        digest = hashlib.sha256()
        for name, label in self.samples:
            size = file_size(os.path.join(self.root, name))
            digest.update(f"{name}\0{size}\0{label}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def file_size(path: str) -> int:
    """In bytes; -1 for a broken link, which is reported as unreadable later."""
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


class TorchvisionSet:
    """One of torchvision's sets, held in memory; `title` starts its images' names."""

    def __init__(self, images: Any, labels: Any, title: str):  # torchvision's sets have no type in common
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
        self.source, self.indices, self.classes = source, indices, source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes | Image.Image:
        return self.source.read(self.indices[index])

    def label(self, index: int) -> int:
        return self.source.label(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint()} {self.indices}".encode()).hexdigest()


def build_source(args: Namespace, split: str, classes: list[str] | None = None) -> Source:
    """The images of `--data_set`, at most `--max_images`; split "pretrain" (labels are not used), "train" or "val".

    `classes` restricts a folder to these, in place of `--num_classes` and `--class_list`.
    """
    source = whole_source(args, split, classes)
    if args.max_images is None or args.max_images >= len(source):
        return source
    draw = generator("max_images", args.split_seed, "val" if split == "val" else "train")
    return Subset(source, sorted(torch.randperm(len(source), generator=draw)[: args.max_images].tolist()))


def whole_source(args: Namespace, split: str, classes: list[str] | None) -> Source:
    if args.data_set == "folder":
        return folder_source(args, split, classes)
    if args.data_set == "shapes":
        images = max(args.shapes_images // 5, 1) if split == "val" else args.shapes_images
        return ShapesDataset(args.input_size, images, split)
    if args.num_classes or args.class_list or args.split:
        raise UserError(f"--num_classes, --class_list and --split need class folders, not --data_set {args.data_set}")
    return torchvision_source(args, split)


def folder_source(args: Namespace, split: str, chosen: list[str] | None) -> ImageList:
    """DATA/train/CLASS/* and DATA/val/CLASS/*, DATA/CLASS/*, or a flat folder of images (for training without labels).

    The training images define the classes; a validation image of any other class is a mistake.
    """
    data_path = data_root(args)
    train_root = split_folder(data_path, "train")
    root = train_root if split != "val" or args.split else split_folder(data_path, "val")
    if args.split and (held_out := find_split(data_path, "val")):
        raise UserError(f"--split divides a single folder of classes, but there is {held_out}")
    if not (available := class_folders(train_root)):
        if args.num_classes or args.class_list or args.split:
            flags = "--num_classes, --class_list and --split"
            raise UserError(f"{flags} need class folders, but {root} has none with images")
        files = sorted(str(path) for path in root.iterdir() if path.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise UserError(f"--data_path: no images in {root}, neither directly nor in class folders below it")
        return relative_list([(path, 0) for path in files], [], data_path)
    classes = chosen or choose_classes(available, args)
    if root != train_root and not (chosen or args.num_classes or args.class_list):
        unknown = sorted(set(class_folders(root)) - set(classes))
        if unknown:
            raise UserError(f"{root} has classes that {train_root} does not have: {', '.join(unknown[:5])}")
    samples = make_dataset(str(root), {name: i for i, name in enumerate(classes)}, IMG_EXTENSIONS, allow_empty=True)
    if args.split:
        samples = split_samples(samples, classes, args, split)
    if not samples:
        raise UserError(f"no images of the chosen classes in {root}")
    return relative_list(samples, classes, data_path)


def relative_list(samples: list[tuple[str, int]], classes: list[str], root: Path) -> ImageList:
    """With paths that start with `root`: cutting it off is enough, and relpath would take 8 s for ImageNet."""
    start = 0 if root == Path() else len(os.path.join(root, ""))
    return ImageList([(path[start:], label) for path, label in samples], classes, root)


def data_root(args: Namespace) -> Path:
    path = Path(args.data_path or DEFAULT_DATA_PATH)
    if path.is_dir():
        return path
    default = path == Path(DEFAULT_DATA_PATH)
    advice = f"; link your data there (ln -s /data/imagenet {DEFAULT_DATA_PATH}) or pass --data_path" if default else ""
    raise UserError(f"--data_path {path} is not a folder{advice}")


def find_split(data_path: Path, split: str) -> Path | None:
    """The folder of a split; test images may be in val or in test."""
    names = ("val", "test") if split == "val" else ("train",)
    return next((data_path / name for name in names if (data_path / name).is_dir()), None)


def split_folder(data_path: Path, split: str) -> Path:
    if folder := find_split(data_path, split):
        return folder
    if split == "val":
        raise UserError(
            f"--data_path {data_path} has no folder val or test to evaluate on; --split 0.8 divides a single folder"
        )
    folders = [entry.name for entry in os.scandir(data_path) if entry.is_dir()]
    held_out = sorted(name for name in folders if name.lower() in ("val", "test"))
    if held_out:  # as class folders, these would be trained on
        raise UserError(f"--data_path {data_path} has {held_out[0]} but no train; rename its training folder to train")
    return data_path


def split_samples(
    samples: list[tuple[str, int]], classes: list[str], args: Namespace, split: str
) -> list[tuple[str, int]]:
    """The `--split` share of each class for training, the rest for testing; depends on split_seed and class only."""
    by_class: list[list[tuple[str, int]]] = [[] for _ in classes]
    for sample in samples:
        by_class[sample[1]].append(sample)
    chosen = []
    for name, of_class in zip(classes, by_class, strict=True):
        train = min(max(round(args.split * len(of_class)), 1), max(len(of_class) - 1, 1))  # both parts get an image
        order = torch.randperm(len(of_class), generator=generator("split", args.split_seed, name)).tolist()
        part = order[train:] if split == "val" else order[:train]
        chosen += [of_class[i] for i in sorted(part)]
    return chosen


def available_classes(args: Namespace) -> list[str]:
    """All class folders of the training images below `--data_path`."""
    return class_folders(split_folder(data_root(args), "train"))


def class_folders(root: Path) -> list[str]:
    """Sorted names of the folders in `root` with an image at any depth."""

    def holds_image(folder: str) -> bool:
        walk = os.walk(folder, followlinks=True)
        return any(name.lower().endswith(IMG_EXTENSIONS) for _, _, names in walk for name in names)

    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and holds_image(entry.path))


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
            raise UserError(f"--num_classes {args.num_classes}: choose from 1 to {len(classes)}, or 0 for all classes")
        order = torch.randperm(len(classes), generator=generator("classes", args.class_seed)).tolist()
        return sorted(classes[i] for i in order[: args.num_classes])
    return classes


def read_class_list(path: str) -> list[str]:
    try:
        lines = os.fsdecode(Path(path).read_bytes()).split("\n")  # names of folders, which need not be UTF-8
    except OSError as error:
        raise UserError(f"--class_list {path}: {error.strerror}") from None
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
        if name == "stl10":  # its point is its many unlabelled images
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
