"""What every evaluation leaves behind: a line in results.jsonl, predictions of every image, TensorBoard, a table."""

import datetime
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from util.compare import RESULTS
from util.evaluation import Subject
from util.features import FeatureSet
from util.metrics import TOP, summary
from util.misc import UserError, is_main_process, logger
from util.provenance import git_commit, versions


def shown(figures: dict[str, float | None], name: str) -> str:
    """71.25, or 71.25 ± 0.40 where there were several runs."""
    deviation = figures[f"{name}_std"]
    return f"{figures[name]:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    logger.info("%s", "\n".join([title, *lines]))


def say_if_few_classes(num_classes: int) -> None:
    if num_classes < TOP:
        logger.info("Acc@5 counts all %d classes, because there are fewer than five", num_classes)


@dataclass
class Outcome:
    """What an evaluation found, on the images of `test`."""

    test: FeatureSet
    top5: torch.Tensor  # classes, best first: int [R, N, 5], one set per seed; [S, R, N, 5] for S numbers of shots
    seeds: list[int]
    settings: dict  # of the protocol; those of the encoder and the data are known
    train_images: int
    details: dict  # further entries of the line, in the protocol's own terms


class Report:
    """Writes the results of one evaluation below `--output_dir`; the first process writes for all."""

    def __init__(self, subject: Subject, protocol: str, log_writer: SummaryWriter | None = None):
        self.subject, self.protocol, self.log_writer = subject, protocol, log_writer
        args = subject.args
        self.folder = Path(args.output_dir) if args.output_dir and is_main_process() else None
        try:  # now, rather than after hours of work
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / RESULTS).open("a").close()
            if args.log_dir and is_main_process() and log_writer is None:
                self.log_writer = SummaryWriter(args.log_dir)
        except OSError as error:
            raise UserError(
                f"--output_dir or --log_dir cannot be written: {error.filename}: {error.strerror}"
            ) from None

    def scalar(self, name: str, value: float, step: int) -> None:
        if self.log_writer:
            self.log_writer.add_scalar(f"{self.protocol}/{self.subject.data_name}/{name}", value, step)

    def write(self, outcome: Outcome) -> Path | None:
        """Save the outcome; returns the file of the predictions, or None where nothing is to be written."""
        if self.log_writer:
            self.log_writer.flush()
        if not self.folder:
            return None
        try:
            predictions = self.save_arrays(self.arrays(outcome))
            self.append(self.line(outcome, predictions))
        except OSError as error:
            raise UserError(f"the results cannot be written to {self.folder}: {error.strerror}") from None
        logger.info("appended to %s, predictions in %s", self.folder / RESULTS, predictions)
        return predictions

    def arrays(self, outcome: Outcome) -> dict[str, np.ndarray]:
        """The predictions of every image, for paired tests."""
        names, test = self.subject.names["val"], outcome.test
        right = (outcome.top5 == test.labels[:, None]).numpy()
        arrays = {
            "images": np.array([names[i] for i in test.indices.tolist()]),
            "labels": test.labels.numpy().astype(np.int32),
            "top5": outcome.top5.numpy().astype(np.int32),
            "correct": right[..., 0],
            "correct5": right.any(axis=-1),
            "seeds": np.array(outcome.seeds),
            "classes": np.array(self.subject.classes),
        }
        if "shots" in outcome.details:
            arrays["shots"] = np.array([int(shots) for shots in outcome.details["shots"]])
        return arrays

    def line(self, outcome: Outcome, predictions: Path) -> dict:
        """What results.jsonl says of this evaluation. Of several numbers of shots, the largest stands for all."""
        subject, test, top5 = self.subject, outcome.test, outcome.top5
        images = {"train": outcome.train_images, "test": len(test)}
        images["unreadable"] = len(subject.names["val"]) - len(test)
        return {
            "protocol": self.protocol,
            "data": subject.data_name,
            "checkpoint": str(subject.checkpoint) if subject.checkpoint else None,
            "checkpoint_sha256": subject.checkpoint_sha256,
            "settings": subject.settings() | subject.data_settings() | outcome.settings,
            "seed": subject.args.seed,
            "runs": len(outcome.seeds),
            **summary(top5 if top5.ndim == 3 else top5[-1], test.labels),
            **outcome.details,
            "images": images,
            "classes": len(subject.classes),
            "predictions": predictions.name,
            "commit": git_commit(),
            "versions": versions(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def append(self, line: dict) -> None:
        with open(self.folder / RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save_arrays(self, arrays: dict[str, np.ndarray]) -> Path:
        """Write PROTOCOL-DATA-N.npz with the first free number N, so that no earlier result loses its predictions."""
        paths = (self.folder / f"{self.protocol}-{self.subject.file_name}-{number}.npz" for number in itertools.count())
        path = next(path for path in paths if not path.exists())
        with open(path, "xb") as file:
            np.savez_compressed(file, **arrays)
        return path
