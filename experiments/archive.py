"""Finished runs of MaskBench in one small file, to share and to compare with: no weights, but every image's result.

A line of JSON per run (util/jsonl.py), 10 kB on CIFAR-10:
    label, seed         the row of the leaderboard, and the run
    flags               of its pretraining and its probe, without the places of files
    images              SHA-256 of the names of the N images
    held_out, hits      which images are held out, and which of them the last checkpoint's probe recognised, by kind of
                        features: bits [N], packed, in base64
    acc1, commit        for a reader: percent over all images, by kind of features; the version of the code
and a line per measured cost of a strategy.
"""

import base64
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from experiments.costs import Cost, Costs
from experiments.probe import FEATURES, ProbedRun
from util.cli import UserError
from util.jsonl import append_record, read_records


@dataclass
class Archive:
    path: Path | None  # None: nothing is kept
    costs: dict[str, Costs] = field(default_factory=dict)  # by settings of the measurement, by strategy
    probes: dict[tuple[str, int], ProbedRun] = field(default_factory=dict)  # by label and seed
    flags: dict[tuple[str, int], str] = field(default_factory=dict)

    def check(self, label: str, seed: int, flags: str) -> None:
        """Refuse a run that was made with other flags than it would be now."""
        theirs = self.flags.get((label, seed), flags)
        if theirs != flags:
            raise UserError(
                f"--archive {self.path} has {label} (seed {seed}) with other flags: {theirs} instead of {flags}. "
                "Give the same, or another --archive"
            )

    def check_images(self, images: str, source: object) -> None:
        """Results are paired by image: refuse those on others."""
        if any(probe.images != images for probe in self.probes.values()):
            raise UserError(f"--archive {self.path} has results on other images than those of {source}")

    def add(self, label: str, seed: int, flags: str, probe: ProbedRun, commit: str | None) -> None:
        """The last checkpoint's probes, unless they are there already."""
        if self.path is None or (label, seed) in self.probes:
            return
        self.check_images(probe.images, probe.path)
        self.probes[label, seed], self.flags[label, seed] = probe, flags
        hits = dict(zip(FEATURES, probe.hits[probe.final], strict=True))
        record = {
            "label": label,
            "seed": seed,
            "flags": flags,
            "images": probe.images,
            "num_images": len(probe.held_out),
            "held_out": packed(probe.held_out),
            "hits": {name: packed(bits) for name, bits in hits.items()},
            "acc1": {name: round(100 * float(bits.mean()), 4) for name, bits in hits.items()},
            "commit": commit,
        }
        append_record(self.path, record)

    def add_costs(self, settings: str, costs: Costs) -> None:
        """`settings` include the device: another's step times would not be comparable."""
        known = self.costs.setdefault(settings, {})
        for strategy, cost in costs.items():
            if self.path is not None and strategy not in known:
                known[strategy] = cost
                append_record(self.path, {"strategy": strategy, "cost": asdict(cost), "settings": settings})


def read_archive(path: str | None) -> Archive:
    """Empty, if there is no such file yet."""
    archive = Archive(Path(path) if path else None)
    if archive.path and not archive.path.parent.is_dir():  # fails now, rather than after the runs
        raise UserError(f"--archive {path}: there is no folder {archive.path.parent}")
    if archive.path is None or not archive.path.exists():
        return archive

    def parse(record: dict) -> bool:
        if "strategy" in record:
            archive.costs.setdefault(record["settings"], {})[record["strategy"]] = Cost(**record["cost"])
            return True
        key, count = (record["label"], record["seed"]), record["num_images"]
        hits = np.stack([unpacked(record["hits"][name], count) for name in FEATURES])[None]
        archive.probes[key] = ProbedRun(
            Path(str(path)), record["images"], unpacked(record["held_out"], count), ["archived"], hits
        )
        archive.flags[key] = record["flags"]
        return True

    try:
        read_records(archive.path, parse)
    except OSError as error:
        raise UserError(f"--archive {path}: {error.strerror}") from None
    if archive.path.stat().st_size and not (archive.probes or archive.costs):  # nothing is appended to another's file
        raise UserError(f"--archive {path} is not an archive of MaskBench: give another file, or a new one")
    return archive


def packed(bits: np.ndarray) -> str:
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def unpacked(text: str, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)
