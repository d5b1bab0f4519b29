"""Where images come from: folders, torchvision's small sets, and built-in shapes, each as a labelled list.

A source has len(source), source[i] -> (PIL image, label), and source.classes.
"""

import errno
import os
from argparse import Namespace
from pathlib import Path

import torch
from PIL import Image
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from util.cli import UserError
from util.data.decode import open_image
from util.data.shapes import ShapesDataset
from util.misc import generator

DATA_SETS = ("folder", "cifar10", "cifar100", "stl10", "fashion_mnist", "shapes")


class ImageList:
    """Image files and their labels; `classes` is empty where the files are in no class folders."""

    def __init__(self, samples: list[tuple[str, int]], classes: list[str]):
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        data, label = self.read(index)
        image = open_image(data)
        image.load()
        return image, label

    def read(self, index: int) -> tuple[bytes, int]:
        """The file's content, and its label."""
        path, label = self.samples[index]
        with open(path, "rb", buffering=0) as file:
            return file.read(), label


class Subset:
    """Some images of a source that is held in memory."""

    def __init__(self, source, indices: list[int]):
        self.source, self.indices, self.classes = source, indices, source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.source[self.indices[index]]


def build_source(args: Namespace, split: str):
    """The images of `--data_set`: split "pretrain" (labels play no part), "train" or "val"; at most `--max_images`."""
    source = whole_source(args, split)
    if args.max_images is None or args.max_images >= len(source):
        return source
    draw = generator("max_images", args.split_seed, "val" if split == "val" else "train")
    chosen = sorted(torch.randperm(len(source), generator=draw)[: args.max_images].tolist())
    if isinstance(source, ImageList):
        return ImageList([source.samples[index] for index in chosen], source.classes)
    return Subset(source, chosen)


def whole_source(args: Namespace, split: str):
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


def read(source, index: int) -> tuple[bytes | Image.Image, int]:
    """The content of an image's file where there is one, or else the image; and its label."""
    return source.read(index) if isinstance(source, ImageList) else source[index]


def describe(source, index: int) -> str:
    """What a user can look for: the file's path, or the set's name and index."""
    if isinstance(source, Subset):
        return describe(source.source, source.indices[index])
    return source.samples[index][0] if isinstance(source, ImageList) else f"{type(source).__name__}[{index}]"


def image_names(source, args: Namespace, split: str) -> list[str]:
    """A name for every image, the same wherever the data lies."""
    if isinstance(source, Subset):
        names = image_names(source.source, args, split)
        return [names[index] for index in source.indices]
    if isinstance(source, ImageList):
        root = os.path.join(Path(args.data_path), "")
        # The prefix is there, but for links and "..": and relpath would take 8 s for ImageNet.
        return [
            path[len(root) :] if path.startswith(root) else os.path.relpath(path, args.data_path)
            for path, _ in source.samples
        ]
    return [f"{args.data_set}/{split}/{index}" for index in range(len(source))]


def labels_of(source) -> torch.Tensor:
    """All labels [N], without opening an image."""
    if isinstance(source, Subset):
        return labels_of(source.source)[source.indices]
    if isinstance(source, ImageList):
        return torch.tensor([label for _, label in source.samples])
    if isinstance(source, ShapesDataset):
        return torch.tensor([source.label(index) for index in range(len(source))])
    return torch.as_tensor(source.labels if hasattr(source, "labels") else source.targets).long()
