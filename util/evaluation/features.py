"""Features of a frozen encoder: extracted once per (checkpoint, data, transform), and cached on disk."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from util.checkpoint import SUM, content_sum, drop_stale_partials, partial_of
from util.cli import OutOfResources, UserError, logger, tracked
from util.data.sources import Source, labels_of
from util.datasets import BadImages, Fetcher, ImageDataset, collate
from util.misc import (
    autocast,
    gather_objects,
    gather_rows,
    get_rank,
    get_world_size,
    is_main_process,
    share_of_rank,
)
from util.program import expect_the_end

FORMAT = 4  # of the cache; changing it invalidates all older files


@dataclass
class FeatureSet:
    """Features float32 [M, D] and labels int64 [M] of the readable images, whose `indices` are [M]."""

    features: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, positions: torch.Tensor) -> "FeatureSet":
        return FeatureSet(self.features[positions], self.labels[positions], self.indices[positions])

    def in_order(self) -> "FeatureSet":
        """By index, each image once."""
        _, first = np.unique(self.indices.numpy(), return_index=True)
        return self.take(torch.from_numpy(first))


@torch.no_grad()
def extract_features(
    encode: Callable[[torch.Tensor], torch.Tensor],
    dataset: ImageDataset,
    indices: list[int],
    *,
    width: int,
    device: torch.device,
    amp: torch.dtype | None = None,
    batch_size: int = 256,
    num_workers: int = 0,
    pin_mem: bool = False,
    header: str | None = None,
    parts: "Parts | None" = None,
) -> FeatureSet:
    """Features of the images at `indices`, on the CPU. `encode` maps images [B, C, H, W] to features [B, `width`].

    Processes share the work, and each gets the whole result. `header` is the title of a progress bar, if wanted.
    `parts` saves the features of an interrupted extraction for the next one.
    """
    done = parts.load() if parts else no_features(width)
    known = set(gather_objects(done.indices.tolist())[0])  # only the first process has any
    left = [index for index in indices if index not in known]
    mine = left[share_of_rank(len(left))]
    batches = [[(0, index) for index in mine[at : at + batch_size]] for at in range(0, len(mine), batch_size)]
    fetcher = Fetcher(dataset, batches, collate, num_workers=num_workers, pin_mem=pin_mem)
    bad_images = BadImages(dataset, fate="left out")
    found = [(done.features, done.indices)]
    try:
        fetcher.restart()
        for keys in tracked(batches, header, len(batches), batch_size * get_world_size(), "images/s"):
            imgs, _, bad = fetcher.fetch(keys)
            bad_images.add([names[0] for names in bad if names])
            readable = torch.tensor([not names for names in bad])
            with autocast(device, amp):
                encoded = encode(imgs.to(device, non_blocking=True))
            features = encoded.float().cpu()  # the batch's host-device sync
            found.append((features[readable], torch.tensor([index for _, index in keys])[readable]))
            if parts and fetcher.fault:  # leave the rest for later; without `parts`, this process does it all
                break
        agree_on_end(bad_images, fetcher.fault if parts else None)
    except BaseException:
        expect_the_end()
        if parts:
            parts.save(*map(torch.cat, zip(*found, strict=True)))
        raise
    features, chosen = map(torch.cat, zip(*found, strict=True))
    if not features.isfinite().all():
        raise UserError("the encoder's features are not finite; did the pretraining diverge? Try --amp off")
    chosen = gather_rows(chosen)
    result = FeatureSet(gather_rows(features), labels_of(dataset.source)[chosen], chosen)
    return result.in_order() if known else result


def no_features(width: int) -> FeatureSet:
    return FeatureSet(torch.empty(0, width), *torch.empty(2, 0, dtype=torch.int64))


def agree_on_end(bad_images: BadImages, fault: str | None) -> None:
    """Combine all processes' counts: the first process logs, and the limit applies to the total. If the loaders of one
    process failed, all of them end."""
    everyone = gather_objects((sorted(bad_images.names), fault))
    bad_images.add([name for names, _ in everyone for name in names])
    if faults := [fault for _, fault in everyone if fault]:
        raise OutOfResources(f"{faults[0]}. Rerun the same command to continue: extracted features are kept")


def fault_in(found: FeatureSet, labels: torch.Tensor, width: int) -> str | None:
    """Why `found` cannot be features of width `width` for images with `labels` [N]; None if it can."""
    features, indices = found.features, found.indices
    if features.dtype != torch.float32 or features.shape != (*indices.shape, width):
        return "the shapes are wrong"
    if indices.dtype != torch.int64 or not bool(((indices >= 0) & (indices < len(labels))).all()):
        return "the indices do not match the images"
    if bool((indices.diff() <= 0).any()) or not torch.equal(found.labels, labels[indices]):
        return "the labels do not match the images"
    return None if bool(features.isfinite().all()) else "the features are not finite"


class Parts:
    """Files beside a cache file, one per process, with the features an interrupted extraction had so far."""

    def __init__(self, path: Path, metadata: dict[str, str], labels: torch.Tensor, width: int):
        self.path, self.metadata, self.labels, self.width = path, metadata, labels, width

    def files(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}.part*")) if is_main_process() else []

    def load(self) -> FeatureSet:
        """The features of all processes, in the first process; none in the others."""
        files = [read(path, self.metadata["key"], self.labels, self.width) for path in self.files()]
        found = [vars(each).values() for each in (no_features(self.width), *files) if each is not None]
        done = FeatureSet(*map(torch.cat, zip(*found, strict=True))).in_order()
        if len(done):
            logger.info("features of %d images, from an interrupted extraction", len(done))
        return done

    def save(self, features: torch.Tensor, indices: torch.Tensor) -> None:
        if len(indices):
            path = self.path.with_name(f"{self.path.stem}.part{get_rank()}")
            write(path, FeatureSet(features, self.labels[indices], indices).in_order(), self.metadata)

    def remove(self) -> None:
        for path in self.files():
            path.unlink(missing_ok=True)


class FeatureCache:
    """Feature files in a folder, each named after a hash of everything its content depends on.

    A file gets its name only once it is complete, so a partial one is never read. Without a folder, nothing is cached.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def get(
        self,
        name: str,
        depends_on: dict,
        extract: Callable[[Parts | None], FeatureSet],
        *,
        labels: torch.Tensor,
        width: int,
    ) -> FeatureSet:
        """The features identified by `depends_on` (plain types), from disk or else from `extract`; `labels` are those
        of all images."""
        if self.folder is None:
            return extract(None)
        depends_on = {"format": FORMAT, **depends_on}
        key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{name}-{key[:16]}.safetensors"
        found = read(path, key, labels, width) if path.exists() else None
        everywhere = all(gather_objects(found is not None))  # processes may see different disks
        if found is not None and everywhere:
            logger.info("features of %s: %d images, from %s", name, len(found), path)
            return found
        metadata = {"key": key, "depends_on": json.dumps(depends_on)}
        parts = Parts(path, metadata, labels, width)
        extracted = extract(parts)
        if is_main_process():
            write(path, extracted, metadata)
        parts.remove()
        return extracted


def read(path: Path, key: str, labels: torch.Tensor, width: int) -> FeatureSet | None:
    """The features in `path`, or None if the file cannot be used."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            found = FeatureSet(*(file.get_tensor(name) for name in ("features", "labels", "indices")))
        if metadata["key"] != key:
            reason = "it belongs to another encoder or other data"
        elif metadata.pop(SUM) != content_sum(vars(found), metadata):
            reason = "its checksum is wrong"
        elif (reason := fault_in(found, labels, width)) is None:
            return found
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        reason = error
    logger.warning("cannot use the cached features %s (%s); extracting them again", path, reason)
    return None


def write(path: Path, features: FeatureSet, metadata: dict[str, str]) -> None:
    """All or nothing. Failing to write a cache only costs time later, so it does not end the run."""
    partial = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_stale_partials(path.parent)
        save_file(vars(features), partial, metadata | {SUM: content_sum(vars(features), metadata)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        logger.warning("cannot cache the features in %s: %s", path, error)


@lru_cache(maxsize=2)  # a program asks for those of two splits, perhaps repeatedly
def content_hash(source: Source) -> str:
    """A hash of the names, labels and content of all images. Processes share the reading."""
    mine = [image_hash(source, index) for index in range(len(source))[share_of_rank(len(source))]]
    return hashlib.sha256(repr([hash for part in gather_objects(mine) for hash in part]).encode()).hexdigest()


def image_hash(source: Source, index: int) -> str:
    try:
        image = source.read(index)
    except OSError:  # reported as unreadable later
        image = b""
    shape, content = ("file", image) if isinstance(image, bytes) else ((image.mode, image.size), image.tobytes())
    return hashlib.sha256(repr((source.name(index), source.label(index), shape)).encode() + content).hexdigest()


def file_hash(path: str | Path) -> str:
    """SHA-256, as printed by sha256sum."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
