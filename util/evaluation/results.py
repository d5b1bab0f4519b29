"""What every evaluation leaves behind: a line in results.jsonl, predictions of every image, TensorBoard, a table."""

import datetime
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from util.cli import UserError, logger
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import TOP, summary
from util.evaluation.subject import Subject
from util.misc import git_commit, is_main_process, versions


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


RESULTS = "results.jsonl"


FEW_SHOT = "fewshot"


PROTOCOLS = {  # names as shown, in the tables' order
    "knn": "nearest neighbour",
    "knn-cosine": "nearest neighbour (cosine)",
    "linprobe": "linear probing",
    "linprobe-cached": "linear probing (cached features)",
    "finetune": "fine-tuning",
    FEW_SHOT: "few-shot",
}


ROUNDING = 0.006  # points; accuracies written with two decimals still agree with the predictions behind them


@dataclass(frozen=True)
class Score:
    """One run's accuracies in one row of a table. Each pair is (Acc@1, Acc@5)."""

    acc: tuple[float, float]  # percent, mean over seeds
    std: tuple[float | None, float | None]  # over seeds; None for a single one
    gain: tuple[float, float] | None = None  # points over the baseline; None where there is nothing to compare with
    p: tuple[float, float] | None = None  # of the exact McNemar test against the baseline; the largest of all seeds
    agreed: tuple[bool, bool] | None = None  # whether every seed gained, or every seed lost


@dataclass(frozen=True)
class Result:
    """One line of results.jsonl."""

    protocol: str
    data: str
    scores: dict[int | None, Score]  # by number of shots; under None where the protocol has no shots
    settings: dict[str, object]  # those of the evaluation, the number of classes, and the seeds
    checkpoint: str | None  # None: random weights
    checkpoint_sha256: str | None
    predictions: Path

    @property
    def title(self) -> str:
        return f"{PROTOCOLS.get(self.protocol, self.protocol)} on {self.data}"


@dataclass(frozen=True)
class Run:
    name: str
    results: dict[tuple[str, str], Result]  # by protocol and data set


def read_run(name: str, path: Path) -> Run:
    """The last result of each protocol and data set in a folder, or in a results.jsonl."""
    results: dict[tuple[str, str], Result] = {}
    repeated: dict[tuple[str, str], int] = {}
    path = results_file(path)
    for result in read_results(path):
        key = result.protocol, result.data
        results[key], repeated[key] = result, repeated.get(key, 0) + 1
    for key, times in repeated.items():
        if times > 1:
            last = results[key]
            logger.info("%s: %s is there %d times; the last is used (%s)", path, last.title, times, weights(last))
    return Run(name, results)


def results_file(path: Path) -> Path:
    """A results.jsonl, given by itself or by its folder."""
    return path if path.is_file() else path / RESULTS


def read_results(path: Path) -> list[Result]:
    """All results of a results.jsonl, oldest first; damaged lines are reported and left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a folder that an evaluation wrote to") from None
    results = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            results.append(parse_result(line, path.parent))
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s: line %d is damaged and left out", path, number)
    if not results:
        raise UserError(f"{path} holds no result; run an evaluation into that folder first")
    return results


def parse_result(line: bytes, folder: Path) -> Result:
    record = json.loads(line)
    few_shot = record["protocol"] == FEW_SHOT
    by_shots = {int(shots): values for shots, values in record["shots"].items()} if few_shot else {None: record}
    if not by_shots:
        raise ValueError("no shots")
    seeds = {name: record[name] for name in ("seed", "runs") if name in record}
    return Result(
        protocol=str(record["protocol"]),
        data=str(record["data"]),
        scores={shots: parse_score(values) for shots, values in by_shots.items()},
        settings={**record["settings"], "classes": record["classes"], **seeds},
        checkpoint=record.get("checkpoint"),
        checkpoint_sha256=record.get("checkpoint_sha256"),
        predictions=folder / record["predictions"],
    )


def parse_score(values: dict) -> Score:
    acc = float(values["acc1"]), float(values["acc5"])
    std = values.get("acc1_std"), values.get("acc5_std")
    if not all(math.isfinite(value) for value in (*acc, *std) if value is not None):
        raise ValueError("not finite")
    return Score(acc, std)


def weights(result: Result) -> str:
    """Where its weights came from, with the start of their fingerprint."""
    fingerprint = f" {result.checkpoint_sha256[:8]}" if result.checkpoint_sha256 else ""
    return f"{result.checkpoint or 'random weights'}{fingerprint}"


@dataclass(frozen=True)
class Predictions:
    """Which of N images an evaluation recognised, with each of its R seeds."""

    path: Path
    images: np.ndarray  # names [N]
    labels: np.ndarray  # [N]
    seeds: list[int]  # [R]
    hits: dict[int | None, np.ndarray]  # by shots: bool [2, R, N], the label came first, and was among the first five


def read_predictions(result: Result) -> Predictions:
    """Refuses a file that is damaged, or that a later evaluation under the same name has replaced."""
    path = result.predictions
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels, seeds = file["images"], file["labels"], file["seeds"].tolist()
            correct = np.stack([file["correct"], file["correct5"]]).astype(bool)  # [2, R, N], few-shot [2, S, R, N]
            shots = file["shots"].tolist() if result.protocol == FEW_SHOT else [None]
    except Exception as error:  # zip, zlib and numpy each have several errors of their own for a damaged file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged or incomplete"
        raise UserError(f"{path}: {reason}; run the evaluation again") from None

    if result.protocol != FEW_SHOT:
        correct = correct[:, None]
    fits = labels.shape == images.shape == correct.shape[3:] and correct.shape[1:3] == (len(shots), len(seeds))
    if not seeds or not fits:
        raise UserError(f"{path} holds arrays whose shapes do not belong together; run the evaluation again")
    found = dict(zip(shots, correct.mean(axis=(2, 3)).T * 100, strict=True)) if images.size else {}
    for number, score in result.scores.items():
        if number not in found or np.abs(found[number] - score.acc).max() > ROUNDING:
            raise UserError(
                f"{path} is not what {result.title} was computed from: its accuracies are not those in "
                f"{RESULTS}; run the evaluation again"
            )
    return Predictions(path, images, labels, seeds, dict(zip(shots, correct.swapaxes(0, 1), strict=True)))
