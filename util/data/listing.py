"""The images in `--data_path`: listed once, and kept in arrays that loaders share."""

import hashlib
import os
import stat
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from util.arguments import DEFAULT_DATA_PATH
from util.checkpoint import reason_of, replaced
from util.cli import UserError, logger
from util.misc import is_main_process, on_first_process

FILES = "files.txt"  # beside a run's checkpoints
HELD_OUT = ("val", "test")
REPORT_SECONDS = 30  # between reports of a long scan

Directories = dict[str, list[str]]  # names of image files by the path of their folder; "" is --data_path


class Names:
    """Strings in one array of bytes, which loader processes share with the main process. They would copy a list of
    strings, page by page, because Python stores reference counts in the strings."""

    def __init__(self, text: np.ndarray, starts: np.ndarray, ends: np.ndarray):
        self.text, self.starts, self.ends = text, starts, ends

    @classmethod
    def pack(cls, strings: Iterable[str]) -> "Names":
        encoded = [os.fsencode(string) for string in strings]  # not all names are UTF-8
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = lengths.cumsum()
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends - lengths, ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.text[self.starts[index] : self.ends[index]].tobytes())

    def take(self, indices: np.ndarray) -> "Names":
        return Names(self.text, self.starts[indices], self.ends[indices])


class ImageList:
    """Image files, with paths relative to `root`; labels default to 0."""

    def __init__(self, names: Names, labels: np.ndarray | None = None, classes: Sequence[str] = (), root: str = ""):
        self.names, self.classes, self.root = names, list(classes), root
        self.labels = np.zeros(len(names), np.int64) if labels is None else labels

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return read_regular(os.path.join(self.root, self.name(index)))

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        """A hash of names, labels and file status: reading the files would take as long as an evaluation."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            known = file_status(os.path.join(self.root, self.name(index)))
            digest.update(f"{self.name(index)}\0{self.label(index)}\0{known}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def file_status(path: str) -> tuple[int, ...]:
    """Changes with the content; empty for a broken link, which is reported as unreadable later."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ino


@dataclass(frozen=True)
class Listing:
    """The image files below `root`. Those of the class folder `folders[i]` are `names[bounds[i] : bounds[i + 1]]`.

    A class folder is train/CLASS or val/CLASS (or test/CLASS), or CLASS if there is no train. Images outside class
    folders are listed under train, val (or test), or "". Folders are in label order.
    """

    root: str
    names: Names
    folders: list[str]
    bounds: np.ndarray
    splits: list[str]

    def place(self, split: str) -> str | None:
        """The folder of the split "train" or "val"; "" is the root."""
        if not self.splits:
            return "" if split == "train" else None
        return self.splits[0] if split == "train" else next(iter(self.splits[1:]), None)

    def classes(self, place: str) -> list[str]:
        """Names of the class folders in `place` that have images."""
        start = os.path.join(place, "")
        return [folder.removeprefix(start) for folder in self.folders if folder.startswith(start) and folder != place]

    def files_of(self, folder: str) -> np.ndarray:
        """Indices in `names` of the folder's files."""
        if folder not in self.folders:
            return np.arange(0)
        at = self.folders.index(folder)
        return np.arange(self.bounds[at], self.bounds[at + 1])

    def source(self, files: np.ndarray, labels: np.ndarray | None = None, classes: Sequence[str] = ()) -> ImageList:
        """The images at the indices `files`."""
        return ImageList(self.names.take(files), labels, classes, self.root)

    def save(self, path: Path) -> None:
        """One line per file, in the format of `--file_list`."""
        if (self.names.text == ord("\n")).any():
            logger.warning("%s is not written: an image name contains a line break", path)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as file:
                file.write(os.fsencode("".join(f"{name}\n" for name in self.names)))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {reason_of(error)}") from None


def list_images(args: Namespace) -> Listing | None:
    """The images of `--data_path`, for all processes at once; None if `--data_set` is not a folder."""
    from util.data.arrow import list_rows, names_tables, table_files

    if args.data_set != "folder":
        return None
    listing = None if names_tables(args.data_path) else on_first_process(partial(scan_or_read, args))
    if listing is None or (not len(listing.names) and table_files(listing.root)):
        return list_rows(args)
    if args.image_column or args.label_column:
        raise UserError(f"--image_column and --label_column are for tables, but {args.data_path} has image files")
    return listing


def save_beside(listing: Listing | None, args: Namespace) -> None:
    """Save the listing to `--output_dir`, where a resumed run may read it."""
    if listing is not None and args.output_dir and is_main_process():
        listing.save(Path(args.output_dir) / FILES)


def scan_or_read(args: Namespace) -> Listing:
    """The listing in `--file_list`, if it exists; otherwise the folder is scanned, and the file written."""
    root, path = data_root(args), Path(args.file_list) if args.file_list else None
    if path is not None and path.exists():
        listing = arrange(root, read_file_list(path))
        logger.info("%d images listed in %s; %s is not scanned", len(listing.names), path, root)
        return listing
    listing = arrange(root, scan(root))
    if path is not None:
        listing.save(path)
    return listing


def data_root(args: Namespace) -> str:
    path = Path(args.data_path or DEFAULT_DATA_PATH)
    if path.is_dir():
        return str(path)
    default = path == Path(DEFAULT_DATA_PATH)
    advice = f"; link your data there (ln -s /data/imagenet {DEFAULT_DATA_PATH}) or pass --data_path" if default else ""
    raise UserError(f"--data_path {path} is not a folder{advice}")


def scan(root: str) -> Directories:
    """Each folder is listed once, however many links point to it, and at its smallest depth: a link from one class
    folder to another must not change labels."""
    found, seen, left_out = {}, set(), []
    level, reported = [""], time.monotonic()
    while level:
        below = []
        for directory in level:
            path = os.path.join(root, directory)
            try:
                status = os.stat(path)
                if (status.st_dev, status.st_ino) in seen:
                    left_out.append(path)
                    continue
                seen.add((status.st_dev, status.st_ino))
                images, folders = list_directory(path)
            except OSError as error:
                raise UserError(f"--data_path: {path} cannot be listed: {error.strerror}") from None
            if directory == "" and (splits := split_folders(folders, root)):
                images, folders = [], splits
            if images:
                found[directory] = images
            below += [os.path.join(directory, name) for name in folders]
            if time.monotonic() > reported + REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("scanning %s: %d images so far", root, sum(map(len, found.values())))
        level = below
    if left_out:
        logger.warning("folders reachable by several paths are listed once; left out: %s", ", ".join(left_out[:5]))
    return found


def list_directory(path: str) -> tuple[list[str], list[str]]:
    """Names of its images and of its folders. Only links need a stat call."""
    images, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
                folders.append(entry.name)
            elif entry.name.lower().endswith(IMG_EXTENSIONS):
                images.append(entry.name)
    return images, sorted(folders)


def split_folders(folders: Iterable[str], root: str) -> list[str]:
    """The folders of training and held-out images, if there are any; otherwise `folders` are classes."""
    if "train" in folders:
        return ["train", *[name for name in HELD_OUT if name in folders][:1]]
    held_out = sorted(name for name in folders if name.lower() in HELD_OUT)
    if held_out:  # as class folders, these would be trained on
        raise UserError(f"--data_path {root} has {held_out[0]} but no train; rename its training folder to train")
    return []


def arrange(root: str, directories: Directories) -> Listing:
    """By class folder, then in the order of torchvision's ImageFolder."""
    splits = split_folders({path.split("/")[0] for path in directories}, root)
    files = defaultdict(list)
    for path in sorted(directories):
        parts = path.split("/")
        folder = "/".join(parts[: 2 if parts[0] in splits else 1])
        files[folder] += [os.path.join(path, name) for name in sorted(directories[path])]
    folders = sorted(files)
    bounds = np.cumsum([0, *(len(files[folder]) for folder in folders)])
    return Listing(root, Names.pack(chain(*(files[folder] for folder in folders))), folders, bounds, splits)


def read_file_list(path: Path) -> Directories:
    try:
        lines = os.fsdecode(read_regular(path)).split("\n")
    except OSError as error:
        raise UserError(f"--file_list {path} cannot be read: {reason_of(error)}") from None
    directories = defaultdict(list)
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        if line.startswith("/") or not line.lower().endswith(IMG_EXTENSIONS):
            raise UserError(f"--file_list {path}, line {number}: {line[:80]!r} is not an image path below --data_path")
        directory, _, name = line.rpartition("/")
        directories[directory].append(name)
    return directories


def read_regular(path: str | Path) -> bytes:
    """The content of a file. Pipes and devices are rejected: reading one may never end."""
    with open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        return file.read()
