"""The results that evaluations write and comparisons read: a line of results.jsonl, and predictions in an .npz file.

results.jsonl has one JSON object per evaluation, oldest first:
    protocol, data      a key of PROTOCOLS, and the name of the data set
    checkpoint          path, null for random weights; checkpoint_sha256 is its hash
    settings            of encoder, data and protocol: these must agree for a fair comparison
    seed, runs          the first of consecutive seeds, and their number
    acc1, acc5          percent, mean over seeds; acc1_std, acc5_std: sample standard deviation, null for one seed
    shots               few-shot only: these four by number of shots; at the top level, for the largest number
    images, classes     counts
    predictions         name of the .npz file, in the same folder
    commit, versions, time
and anything specific to a protocol, such as the votes of neighbours.

PROTOCOL-DATA-NUMBER.npz has, for N test images and R seeds (few-shot: [S, R, ...] for S numbers of shots):
    images, labels      str [N], int32 [N]
    top5                int32 [R, N, 5]: classes, best first; -1 where there are fewer
    correct, correct5   bool [R, N]: whether the label is the first of them, or any
    seeds, classes      int [R], str [C]: names
    shots               few-shot only: int [S]

Reading needs no torch, which takes seconds to import; writing imports it.
"""

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from util.cli import UserError, logger, plain
from util.jsonl import append_record, read_records

if TYPE_CHECKING:
    import torch

    from util.board import Board
    from util.evaluation.features import FeatureSet
    from util.evaluation.subject import Subject

RESULTS = "results.jsonl"
FEW_SHOT = "fewshot"
PROTOCOLS = {  # display names, in table order
    "knn": "nearest neighbour",
    "knn-cosine": "nearest neighbour (cosine)",
    "linprobe": "linear probing",
    "linprobe-cached": "linear probing (cached features)",
    "finetune": "fine-tuning",
    FEW_SHOT: "few-shot",
}
TOP = 5  # predictions kept for each image
ROUNDING = 0.006  # points; accuracies written with two decimals still match their predictions


# --- Writing ---


def say_if_few_classes(num_classes: int) -> None:
    if num_classes < TOP:
        logger.info("Acc@5 counts all %d classes, because there are fewer than five", num_classes)


def best_epoch(by_epoch: dict[int, float]) -> dict:
    """The best epoch by test Acc@1, for reference only: choosing an epoch would need other images."""
    if not by_epoch:
        return {}
    best = max(by_epoch, key=lambda epoch: by_epoch[epoch])
    logger.info("(best epoch by test accuracy, for reference only: %d, with Acc@1 %.2f)", best + 1, by_epoch[best])
    return {"best_test_epoch": {"epoch": best, "acc1": by_epoch[best]}}


@dataclass
class Outcome:
    """What an evaluation found on the images of `test`."""

    test: "FeatureSet"
    top5: "torch.Tensor"  # classes, best first: int [R, N, 5], R seeds; few-shot [S, R, N, 5]
    seeds: list[int]
    settings: dict  # of the protocol; the subject knows those of the encoder and the data
    train_images: int
    details: dict  # further entries of the line
    arrays: dict = field(default_factory=dict)  # further arrays of the .npz file


class Report:
    """Writes the results of one evaluation to `--output_dir`, in the main process only."""

    def __init__(self, subject: "Subject", protocol: str, log_writer: "Board | None" = None):
        from util.board import Board
        from util.misc import is_main_process

        self.subject, self.protocol, self.log_writer = subject, protocol, log_writer
        args = subject.args
        self.folder = Path(args.output_dir) if args.output_dir and is_main_process() else None
        if self.folder:  # fail now if it cannot be written, not after hours of work
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RESULTS).open("a").close()
        if is_main_process() and log_writer is None:
            self.log_writer = Board()
            self.log_writer.open(["tensorboard"], args)

    def scalar(self, name: str, value: float, step: int) -> None:
        if self.log_writer:
            self.log_writer.add_scalar(f"{self.protocol}/{plain(self.subject.data_name)}/{name}", value, step)

    def accuracies(self, metrics: dict[str, Any], step: int) -> None:
        for name in ("acc1", "acc5"):
            self.scalar(name, metrics[name], step)

    def write(self, outcome: Outcome) -> Path | None:
        """Saves the outcome and returns the path of the predictions, or None without a folder to write to."""
        if self.log_writer:
            self.log_writer.flush()
        if not self.folder:
            return None
        predictions = self.save_arrays(self.folder, self.arrays(outcome))
        append_record(self.folder / RESULTS, self.line(outcome, predictions))
        logger.info("appended to %s, predictions in %s", self.folder / RESULTS, predictions)
        return predictions

    def arrays(self, outcome: Outcome) -> dict[str, Any]:
        names, test = self.subject.names["val"], outcome.test
        right = (outcome.top5 == test.labels[:, None]).numpy()
        return {
            "images": np.array([names[i] for i in test.indices.tolist()]),
            "labels": test.labels.numpy().astype(np.int32),
            "top5": outcome.top5.numpy().astype(np.int32),
            "correct": right[..., 0],
            "correct5": right.any(axis=-1),
            "seeds": np.array(outcome.seeds),
            "classes": np.array(self.subject.classes),
        } | outcome.arrays

    def line(self, outcome: Outcome, predictions: Path) -> dict:
        from util.evaluation.metrics import summary
        from util.misc import git_commit, versions

        subject, test, top5 = self.subject, outcome.test, outcome.top5
        unreadable = len(subject.names["val"]) - len(test)
        return {
            "protocol": self.protocol,
            "data": subject.data_name,
            "checkpoint": str(subject.checkpoint) if subject.checkpoint else None,
            "checkpoint_sha256": subject.checkpoint_sha256,
            "settings": subject.settings() | subject.data_settings() | outcome.settings,
            "seed": outcome.seeds[0],
            "runs": len(outcome.seeds),
            **summary(top5 if top5.ndim == 3 else top5[-1], test.labels),
            **outcome.details,
            "images": {"train": outcome.train_images, "test": len(test), "unreadable": unreadable},
            "classes": len(subject.classes),
            "predictions": predictions.name,
            "commit": git_commit(),
            "versions": versions(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def save_arrays(self, folder: Path, arrays: dict[str, Any]) -> Path:
        """Use the first free number, so that no earlier predictions are overwritten."""
        number = 0
        while True:
            path = folder / f"{self.protocol}-{self.subject.file_name}-{number}.npz"
            try:
                with open(path, "xb") as file:
                    np.savez_compressed(file, **arrays)
                return path
            except FileExistsError:
                number += 1
            except OSError:
                path.unlink(missing_ok=True)
                raise


# --- Reading ---


@dataclass(frozen=True)
class Score:
    """Each pair is (Acc@1, Acc@5)."""

    acc: tuple[float, float]  # percent, mean over seeds
    std: tuple[float | None, float | None]  # over seeds; None for a single one


@dataclass(frozen=True)
class Result:
    """One line of results.jsonl."""

    protocol: str
    data: str
    scores: dict[int | None, Score]  # by number of shots; None if the protocol has no shots
    settings: dict[str, Any]  # of the evaluation, with the number of classes and the seeds
    checkpoint: str | None  # None: random weights
    checkpoint_sha256: str | None
    predictions: Path

    @property
    def title(self) -> str:
        return f"{PROTOCOLS.get(self.protocol, self.protocol)} on {self.data}"

    @property
    def origin_of_weights(self) -> str:
        """The checkpoint and the first digits of its hash."""
        digits = f" {self.checkpoint_sha256[:8]}" if self.checkpoint_sha256 else ""
        return f"{self.checkpoint or 'random weights'}{digits}"


@dataclass(frozen=True)
class EvaluatedRun:
    name: str
    results: dict[tuple[str, str], Result]  # by protocol and data set
    replaced: list[Result]  # by a later result from other weights


def read_run(name: str, path: Path) -> EvaluatedRun:
    """The last result of each protocol and data set in a folder, or in a results.jsonl."""
    path = results_file(path)
    found: dict[tuple[str, str], list[Result]] = {}
    for result in read_results(path):
        found.setdefault((result.protocol, result.data), []).append(result)
    for same in found.values():
        if len(same) > 1:
            last = f"{same[-1].title}; using the last ({same[-1].origin_of_weights})"
            logger.info("%s has %d results of %s", path, len(same), last)
    last_ones = {key: same[-1] for key, same in found.items()}
    pairs = [(result, same[-1]) for same in found.values() for result in same]
    return EvaluatedRun(
        name, last_ones, [old for old, last in pairs if old.checkpoint_sha256 != last.checkpoint_sha256]
    )


def results_file(path: Path) -> Path:
    """A results.jsonl, given directly or by its folder."""
    return path if path.is_file() else path / RESULTS


def read_results(path: Path) -> list[Result]:
    """All results of a results.jsonl, oldest first; damaged lines are reported and skipped."""
    try:
        results = read_records(path, lambda record: parse_result(record, path.parent))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a folder that an evaluation wrote to") from None
    if not results:
        raise UserError(f"{path} holds no result; run an evaluation into that folder first")
    return results


def parse_result(record: dict, folder: Path) -> Result:
    few_shot = record["protocol"] == FEW_SHOT
    by_shots = {int(shots): values for shots, values in record["shots"].items()} if few_shot else {None: record}
    seeds = {name: record[name] for name in ("seed", "runs") if name in record}
    result = Result(
        protocol=record["protocol"],
        data=record["data"],
        scores={shots: parse_score(values) for shots, values in by_shots.items()},
        settings={**record["settings"], "classes": record["classes"], **seeds},
        checkpoint=record.get("checkpoint"),
        checkpoint_sha256=record.get("checkpoint_sha256"),
        predictions=folder / record["predictions"],
    )
    texts = result.protocol, result.data, result.checkpoint or "", result.checkpoint_sha256 or ""
    if not all(isinstance(text, str) for text in texts) or not isinstance(record["classes"], int):
        raise TypeError("an entry has the wrong type")
    if not by_shots or not all(shots is None or 0 < shots < 10**9 for shots in by_shots):
        raise ValueError("no number of shots")
    os.fsencode(result.predictions)  # raises if it is not a valid file name
    str(result.settings)  # raises if nested too deeply to be shown
    return result


def parse_score(values: dict) -> Score:
    numbers = [values["acc1"], values["acc5"], values.get("acc1_std"), values.get("acc5_std")]
    if not all(0 <= value <= 100 for value in numbers if value is not None) or None in numbers[:2]:
        raise ValueError("not a percentage")
    return Score((numbers[0], numbers[1]), (numbers[2], numbers[3]))


@dataclass(frozen=True)
class Predictions:
    """Which of N images an evaluation classified correctly, with each of its R seeds."""

    path: Path
    images: np.ndarray  # names [N]
    labels: np.ndarray  # [N]
    seeds: list[int]  # [R]
    hits: dict[int | None, np.ndarray]  # by shots: bool [2, R, N], the label came first, and was among the first five


def read_predictions(result: Result) -> Predictions:
    """Raises if the file is damaged, or if its accuracies are not those of `result`."""
    path, few_shot, again = result.predictions, result.protocol == FEW_SHOT, "run the evaluation again"
    kinds = {"images": "U", "labels": "iu", "seeds": "iu", "correct": "b", "correct5": "b"}
    arrays = read_arrays(path, kinds | ({"shots": "iu"} if few_shot else {}), again)
    images, labels, seeds = arrays["images"], arrays["labels"], arrays["seeds"].ravel().tolist()
    shots = arrays["shots"].ravel().tolist() if few_shot else [None]
    shape = (*([len(shots)] if few_shot else []), len(seeds), labels.size)
    fits = all(arrays[name].shape == shape for name in ("correct", "correct5"))
    if not seeds or not fits or not images.shape == labels.shape == (labels.size,):
        raise UserError(f"{path} holds arrays of inconsistent shapes; {again}")
    hits = np.stack([arrays["correct"], arrays["correct5"]]).reshape(2, len(shots), len(seeds), -1)
    found = dict(zip(shots, hits.mean(axis=(2, 3)).T * 100, strict=True)) if images.size else {}
    for number, score in result.scores.items():
        if number not in found or np.abs(found[number] - score.acc).max() > ROUNDING:
            wrong = f"does not belong to {result.title}: its accuracies are not those in {RESULTS}"
            raise UserError(f"{path} {wrong}; {again}")
    return Predictions(path, images, labels, seeds, dict(zip(shots, hits.swapaxes(0, 1), strict=True)))


def read_arrays(path: Path, kinds: dict[str, str], advice: str) -> dict[str, np.ndarray]:
    """Arrays of an .npz by name. `kinds` gives the numpy kinds that each may have, such as "iu"."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in kinds}  # numpy returns non-arrays as bytes
    except Exception as error:  # zip, zlib and numpy each raise several kinds for a damaged file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged or incomplete"
        raise UserError(f"{path}: {reason}; {advice}") from None
    if odd := [name for name, array in arrays.items() if array.dtype.kind not in kinds[name]]:
        raise UserError(f"{path}: `{odd[0]}` is of type {arrays[odd[0]].dtype}; {advice}")
    return arrays
