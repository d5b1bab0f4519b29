"""Damage files and read them again: each is refused or gives the same values. No other error, no hang.

    python -m tests.fuzz_files --cases 10000

A case is a function of its number: `--first 4711 --cases 1` repeats one. Damage is local, as from faulty disks
and interrupted transfers; forged checksums are out of scope.
"""

import argparse
import copy
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from main_pretrain import get_args_parser
from util import checkpoint as ckpt
from util.cli import UserError, logger
from util.data.listing import list_images
from util.datasets import build_eval_dataset, build_pretrain_loader
from util.evaluation import features
from util.evaluation.results import FEW_SHOT, RESULTS, read_predictions, read_results
from util.jsonl import append_record
from util.training.progress import read_log

SECONDS = 20  # that one file may take
REFUSED = object()


# --- Damage ---


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def flip_near_the_end(data: bytes, chance: random.Random) -> bytes:
    """Where zip files say what lies where."""
    cut = max(len(data) - 400, 0)
    return data[:cut] + flip(data[cut:], chance)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def lose_the_start(data: bytes, chance: random.Random) -> bytes:
    return data[1 + chance.randrange(len(data)) :]


def place(data: bytes, chance: random.Random) -> tuple[int, int]:
    """Start and end of a block, mostly a small one."""
    size = min(int(2 ** chance.uniform(0, 12)), len(data))
    start = chance.randrange(len(data) - size + 1)
    return start, start + size


def overwrite(data: bytes, chance: random.Random) -> bytes:
    start, end = place(data, chance)
    return data[:start] + chance.choice((bytes(end - start), chance.randbytes(end - start))) + data[end:]


def remove(data: bytes, chance: random.Random) -> bytes:
    start, end = place(data, chance)
    return data[:start] + data[end:]


def repeat(data: bytes, chance: random.Random) -> bytes:
    start, end = place(data, chance)
    return data[:end] + data[start:]


def append(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice((bytes(512), chance.randbytes(chance.randrange(1, 600)), data))


DAMAGE = (flip, flip_near_the_end, cut, lose_the_start, overwrite, remove, repeat, append)


# --- Files, each with how it is read ---


@dataclass
class Subject:
    """`read` gives the values that a program would use from the file, or REFUSED."""

    path: Path
    read: Callable[[], Any]
    parts: bool = False  # of several records, each counts for itself

    def __post_init__(self):
        self.content, self.expected = self.path.read_bytes(), copy.deepcopy(self.read())  # what is read may be mapped
        assert self.expected is not REFUSED, self.path

    def replace(self, content: bytes) -> None:
        """By a new file: one that is mapped must not be cut."""
        self.path.unlink()
        self.path.write_bytes(content)


def refusing(read: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return read()
        except UserError:
            return REFUSED

    return call


def training_state() -> dict:
    """A checkpoint of the middle of an epoch, as small as it can be."""
    network = torch.nn.Linear(12, 8)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(3, 12)).sum().backward()
    optimizer.step()
    states = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}}
    log = {"iterations": 4, "interval": {}, "averages": {"loss": (2.5, 2)}}
    args = argparse.Namespace(epochs=3, input_size=[8, 8], classes=["cat", "dog"], lr=1e-3, masking="random")
    return ckpt.training_checkpoint(states, epoch=1, step=10, log=log, moment={"mask_ratio": 0.75}, args=args)


def checkpoint(folder: Path) -> Subject:
    """With an older one beside it, which is what --resume auto then takes."""
    ckpt.save_checkpoint(folder / "checkpoint-0.pth", {"epoch": 0})
    ckpt.save_checkpoint(folder / "checkpoint-1.pth", training_state())

    def read() -> Any:
        found = ckpt.newest_checkpoint(folder)
        assert found is not None, "the good checkpoint is not found"
        return found[0] if found[1].name == "checkpoint-1.pth" else REFUSED

    return Subject(folder / "checkpoint-1.pth", read)


def safetensors_file(folder: Path) -> Subject:
    """If the damage is in the name of the checksum, the file has an entry that nobody reads."""
    path, known = folder / "model.safetensors", {"mask_ratio": "0.75", "data": "x"}
    ckpt.save_safetensors(path, {"w": torch.randn(20, 30), "n": torch.arange(5)}, known)

    def read() -> dict:
        found = ckpt.load_checkpoint(path)
        return {**found, "metadata": {name: found["metadata"].get(name) for name in known}}

    return Subject(path, refusing(read))


def feature_cache(folder: Path) -> Subject:
    labels = torch.arange(40) % 5
    found = features.FeatureSet(torch.randn(30, 16), labels[:30], torch.arange(30))
    features.write(folder / "f.safetensors", found, {"key": "k" * 64, "depends_on": "{}"})

    def read() -> Any:
        found = features.read(folder / "f.safetensors", "k" * 64, labels, 16)
        return REFUSED if found is None else vars(found)

    return Subject(folder / "f.safetensors", read)


def result_line(protocol: str, **more: Any) -> dict:
    settings = {"model": "vit_micro_patch4", "input_size": [16, 16], "pooling": "cls_token"}
    common = {"protocol": protocol, "data": "shapes", "checkpoint": "a.pth", "checkpoint_sha256": "0" * 64}
    return {**common, "settings": settings, "seed": 0, "runs": 2, "acc1": 50.0, "acc5": 75.0, **more, "classes": 10}


def results(folder: Path) -> Subject:
    shots = {"1": {"acc1": 20.0, "acc5": 50.0}, "5": {"acc1": 40.0, "acc5": 80.0}}
    for line in (result_line("knn"), result_line("linprobe", acc1_std=1.5), result_line(FEW_SHOT, shots=shots)):
        append_record(folder / RESULTS, {**line, "predictions": f"{line['protocol']}.npz", "time": "2026-01-01"})
    return Subject(folder / RESULTS, refusing(lambda: read_results(folder / RESULTS)), parts=True)


def predictions(folder: Path) -> Subject:
    right = np.arange(16).reshape(2, 8) % 2 == 0
    arrays = {"images": np.array([f"{n}.jpg" for n in range(8)]), "labels": np.arange(8, dtype=np.int32) % 3}
    arrays |= {"seeds": np.array([0, 1]), "correct": right, "correct5": right | (np.arange(8) % 4 == 1)}
    np.savez_compressed(folder / "knn.npz", **arrays)
    append_record(folder / RESULTS, {**result_line("knn"), "predictions": "knn.npz"})
    (result,) = read_results(folder / RESULTS)
    return Subject(folder / "knn.npz", refusing(lambda: vars(read_predictions(result))))


def log(folder: Path) -> Subject:
    for epoch in range(4):
        append_record(folder / "log.txt", {"train_loss": 2.5 / (epoch + 1), "train_lr": 1e-4, "epoch": epoch})
    return Subject(folder / "log.txt", refusing(lambda: read_log(folder)), parts=True)


def image(suffix: str) -> Callable[[Path], Subject]:
    """Pixels have no checksum. What must hold instead: a damaged image is either read or counted as unreadable, by
    training as by evaluations; features that were cached of it are extracted again."""

    def make(folder: Path) -> Subject:
        path, noise = folder / "train" / "cat" / f"a{suffix}", np.random.default_rng(0).integers(0, 255, (24, 32, 3))
        path.parent.mkdir(parents=True)
        Image.fromarray(noise.astype(np.uint8)).resize((96, 64)).save(path)
        Image.new("RGB", (8, 8)).save(path.with_name("b.png"))
        args = get_args_parser().parse_args(["--data_path", str(folder), "--batch_size", "1", "--device", "cpu"])
        args.input_size = [16, 16]
        before, seen = path.stat(), []

        def read() -> Any:
            listing = list_images(args)
            evaluated = build_eval_dataset(args, "train", listing=listing)
            trained = build_pretrain_loader(args, listing).dataset
            samples = [dataset[(0, 0)] for dataset in (evaluated, trained)]
            assert all(sample[0].shape == (3, 16, 16) for sample in samples)
            assert bool(samples[0][2]) == bool(samples[1][2]), "training and evaluation differ in what is readable"
            seen.append(evaluated.source.fingerprint())
            assert len(seen) < 2 or seen[0] != seen[-1] or path.stat() == before, "old features would be taken"
            return REFUSED if samples[0][2] else "pixels"

        return Subject(path, read)

    return make


KINDS: dict[str, Callable[[Path], Subject]] = {
    "checkpoint": checkpoint,
    "safetensors": safetensors_file,
    "feature cache": feature_cache,
    "results.jsonl": results,
    "predictions": predictions,
    "log.txt": log,
    "JPEG": image(".jpg"),
    "PNG": image(".png"),
}


# --- Cases ---


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def verdict(subject: Subject) -> str:
    """ "refused" or "same"; else what went wrong."""
    try:
        found = subject.read()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found is REFUSED:
        return "refused"
    if subject.parts:
        return "same" if all(any(same(one, other) for other in subject.expected) for one in found) else "CHANGED"
    return "same" if same(found, subject.expected) else "CHANGED"


def too_long(*_: object) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


def fuzz(first: int, cases: int, say: Callable[[str], object] = lambda text: None) -> dict[str, Counter]:
    """Counts of verdicts by kind of file."""
    counts = {name: Counter() for name in KINDS}
    before = signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        subjects = {}
        for name, make in KINDS.items():
            (own := Path(folder) / str(len(subjects))).mkdir()
            subjects[name] = make(own)
        for number in range(first, first + cases):
            chance = random.Random(f"case {number}")
            name, damage = chance.choice(list(KINDS)), chance.choice(DAMAGE)
            subject = subjects[name]
            damaged = damage(subject.content, chance)
            if damaged == subject.content:
                continue
            subject.replace(damaged)
            signal.alarm(SECONDS)
            found = verdict(subject)
            signal.alarm(0)
            counts[name][found] += 1
            if found not in ("refused", "same"):
                say(f"case {number}: {name}, {damage.__name__}: {found}")
    signal.signal(signal.SIGALRM, before)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    logger.disabled = True
    counts = fuzz(args.first, args.cases, lambda text: sys.stdout.write(f"{text}\n"))
    for name, found in counts.items():
        others = {what: number for what, number in found.items() if what not in ("refused", "same")}
        sys.stdout.write(f"{name:14} {found['refused']:6} refused {found['same']:6} same  {json.dumps(others)}\n")
    sys.exit(any(what not in ("refused", "same") for found in counts.values() for what in found))


if __name__ == "__main__":
    main()
