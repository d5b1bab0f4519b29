"""Images in tables, through Hugging Face's `datasets`: hub names, Parquet files, WebDataset shards, `save_to_disk`.

The library converts other formats to Arrow once, and memory-maps the tables, which loader processes share.
"""

import glob
import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from util.cli import UserError, logger
from util.data.listing import ImageList, Listing, Names, file_status, read_regular
from util.misc import on_first_process

Table = Any  # datasets.Dataset, of a package that may be missing
HUB = "hf:"
BUILDERS = {".parquet": "parquet", ".tar": "webdataset"}  # file suffixes, and their `datasets` builders
SAVED = (("dataset_dict.json",), ("state.json", "dataset_info.json"))  # what `save_to_disk` leaves
CACHE = ".arrow"  # beside such files
HELD_OUT = ("validation", "val", "valid", "dev", "test")  # the first of these that exists is evaluated on
SPLIT = re.compile(rf"(?<![a-z])(train|{'|'.join(HELD_OUT)})(?![a-z])", re.IGNORECASE)  # in a file name
LABELS = ("label", "cls", "json.label", "json.cls")  # names of label columns without a label type


class ArrowImages(ImageList):
    """Rows of `table`, whose only column holds the content of image files."""

    def __init__(self, table: Table, rows: np.ndarray, names: Names, labels: np.ndarray | None, classes: Sequence):
        super().__init__(names, labels, classes)
        self.table, self.rows = table, rows

    def read(self, index: int) -> bytes:
        value = self.table[int(self.rows[index])].column(0)[0].as_py()
        image = value if isinstance(value, dict) else {"bytes": value}
        if image["bytes"] is not None:
            return image["bytes"]
        if not image.get("path"):
            raise OSError("the row has no image")
        return read_regular(image["path"])  # from an image folder downloaded from the Hub

    def fingerprint(self) -> str:
        """A hash of rows, labels, and the tables' file status."""
        files = [file_status(file["filename"]) for file in self.table.cache_files]
        known = repr((self.table.column_names, files)).encode()
        return hashlib.sha256(known + self.rows.tobytes() + self.labels.tobytes()).hexdigest()


@dataclass(frozen=True)
class RowListing(Listing):
    """A listing in which `names[i]` belongs to row `rows[i]`. Its folders are SPLIT/CLASS, or SPLIT without labels."""

    table: Table
    rows: np.ndarray

    def source(self, files: np.ndarray, labels: np.ndarray | None = None, classes: Sequence[str] = ()) -> ArrowImages:
        return ArrowImages(self.table, self.rows[files], self.names.take(files), labels, classes)

    def save(self, path: Path) -> None:
        """Tables are not scanned, so a saved list would save no time."""


# --- From --data_path to tables ---


def names_tables(path: str) -> bool:
    """Does not look into folders: these are scanned for images first, which may have archives beside them."""
    return path.startswith(HUB) or Path(path).suffix in BUILDERS or is_saved(path)


def is_saved(path: str) -> bool:
    return any(all(Path(path, name).is_file() for name in names) for names in SAVED)


def table_files(path: str) -> list[str]:
    """The files that match `path`; for a folder, all files of one kind."""
    if not Path(path).is_dir():
        return sorted(glob.glob(path, recursive=True))
    kinds = (sorted(map(str, Path(path).rglob(f"*{suffix}"))) for suffix in BUILDERS)
    return next(filter(None, kinds), [])


def open_splits(args: Namespace) -> dict[str, Table]:
    """The tables by split, converted first if necessary."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise UserError(f"--data_path {args.data_path} needs a package: pip install datasets") from None
    path, cache_dir = args.data_path, args.cache_dir
    try:
        if path.startswith(HUB):
            name, _, config = path.removeprefix(HUB).partition(":")
            found = datasets.load_dataset(name, config or None, cache_dir=cache_dir, keep_in_memory=False)
        elif is_saved(path):
            found = datasets.load_from_disk(path, keep_in_memory=False)
        else:
            files, root = files_by_split(path)
            builder, cache_dir = BUILDERS[Path(files["train"][0]).suffix], cache_dir or os.path.join(root, CACHE)
            logger.info("%s: converted to Arrow once, in %s", path, cache_dir)
            found = datasets.load_dataset(builder, data_files=files, cache_dir=cache_dir, keep_in_memory=False)
    except UserError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        offline = "; without a network, HF_HUB_OFFLINE=1 opens only what is already downloaded"
        advice = offline if isinstance(error, ConnectionError) else ""
        raise UserError(f"--data_path {path} cannot be opened: {reason[:300]}{advice}") from None
    return {str(name): table for name, table in found.items()} if isinstance(found, dict) else {"train": found}


def files_by_split(path: str) -> tuple[dict[str, list[str]], str]:
    """Files by split, where names without a split are for training, and the folder that holds them all."""
    files, by_split = table_files(path), {}
    if not files:
        raise UserError(f"--data_path {path} matches no file")
    root = path if Path(path).is_dir() else os.path.dirname(re.split(r"[*?[]", path)[0])
    for file in files:
        found = SPLIT.search(os.path.relpath(file, root or "."))
        by_split.setdefault(found[1].lower() if found else "train", []).append(file)
    return {split: by_split[split] for split in choose_splits(list(by_split), path)}, root


# --- From tables to a listing ---


def list_rows(args: Namespace) -> RowListing:
    """Rows by class, in label order. The first process converts the tables before others open them."""
    if args.file_list:
        raise UserError(f"--file_list is for image files, but {args.data_path} has tables")
    opened = []
    on_first_process(lambda: opened.append(open_splits(args)))
    found = opened[0] if opened else open_splits(args)
    from datasets import concatenate_datasets

    splits = choose_splits(list(found), args.data_path)
    tables = {split: found[split].flatten() for split in splits}
    image, label = image_column(tables[splits[0]], args), label_column(tables[splits[0]], args)
    names, rows, folders, sizes = [], [], [], [0]
    for split, table in tables.items():
        classes, codes = labels_in(table, label if label in table.column_names else None)
        order, counts = np.argsort(codes, kind="stable"), np.bincount(codes + 1)
        present = np.flatnonzero(counts)
        folders += [f"{split}/{classes[code - 1]}" if code else split for code in present]
        sizes += counts[present].tolist()
        rows.append(order + sum(map(len, rows)))
        own = row_names(table, image, split)
        names += [own[row] for row in order]
    joined = concatenate_datasets([table.select_columns([image]) for table in tables.values()]).with_format("arrow")
    root, bounds = args.data_path, np.cumsum(sizes)
    return RowListing(root, Names.pack(names), folders, bounds, splits, joined, np.concatenate(rows))


def choose_splits(found: list[str], path: str) -> list[str]:
    """The split to train on and, if there is one, the split to evaluate on."""
    if len(found) == 1 and found[0] not in HELD_OUT:
        return found
    if "train" not in found:
        raise UserError(f"--data_path {path} has {', '.join(found)} but no train split to learn from")
    return ["train", *[split for split in HELD_OUT if split in found][:1]]


def image_column(table: Table, args: Namespace) -> str:
    from datasets import Image

    kinds = {name: str(table.data.schema.field(name).type) for name in table.column_names}
    images = [name for name in kinds if isinstance(table.features[name], Image)]
    files = images + [name for name, kind in kinds.items() if kind in ("binary", "large_binary")]
    found = [args.image_column] if args.image_column in files else images or files
    if len(found) == 1 and args.image_column in (None, found[0]):
        return found[0]
    if args.image_column is None and found:
        raise UserError(f"--data_path {args.data_path}: --image_column must name one of {', '.join(found)}")
    columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    named = f"--image_column {args.image_column} is " if args.image_column else ""
    raise UserError(
        f"--data_path {args.data_path}: {named}no column with the content of image files; there are {columns}"
    )


def label_column(table: Table, args: Namespace) -> str | None:
    """None if there is none, or if it is ambiguous: pretraining needs no labels."""
    from datasets import ClassLabel

    if args.label_column is not None:
        if args.label_column not in table.column_names:
            columns = ", ".join(table.column_names)
            raise UserError(f"--label_column {args.label_column} is not among {columns} of {args.data_path}")
        return args.label_column
    found = [name for name, feature in table.features.items() if isinstance(feature, ClassLabel)]
    found = found or [name for name in LABELS if name in table.column_names][:1]
    if len(found) > 1:
        logger.warning("without --label_column %s there are no labels", " or ".join(found))
    return found[0] if len(found) == 1 else None


def stored(table: Table, column: str) -> Any:
    """The column in pyarrow, memory-mapped and not decoded."""
    return table.select_columns([column]).with_format("arrow")[:].column(0)


def labels_in(table: Table, column: str | None) -> tuple[list[str], np.ndarray]:
    """Class names, and each row's class [N]; -1 is none."""
    if column is None:
        return [], np.full(len(table), -1)
    values = stored(table, column)
    known, feature = values.drop_null().unique().to_pylist(), table.features[column]
    if not all(isinstance(value, int | str) for value in known):
        raise UserError(f"--label_column {column} has neither numbers nor text: {str(known[0])[:80]}")
    order = sorted(value for value in known if value != -1)
    place = {value: at for at, value in enumerate(order)}
    classes = [feature.int2str(value) if hasattr(feature, "int2str") else str(value) for value in order]
    return classes, np.array([place.get(value, -1) for value in values.to_pylist()], np.int64)


def row_names(table: Table, column: str, split: str) -> list[str]:
    """Such as train/17, with the name of the file that the row came from, if known."""
    values = stored(table, column)
    if str(values.type) in ("binary", "large_binary"):
        return [f"{split}/{row}" for row in range(len(table))]
    paths = [path for chunk in values.chunks for path in chunk.field("path").to_pylist()]
    return [f"{split}/{row}" + (f":{os.path.basename(path)}" if path else "") for row, path in enumerate(paths)]
