"""Finished evaluations side by side: results.jsonl and per-image predictions in, rows of accuracies and tests out."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from util.misc import UserError, logger

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


@dataclass(frozen=True)
class Row:
    protocol: str
    data: str
    shots: int | None
    results: list[Result | None]  # one per run; None: the run has no such result
    scores: list[Score | None]


def mcnemar(correct_a: np.ndarray, correct_b: np.ndarray) -> float:
    """Exact two-sided p-value for two bool arrays [N], over the same images, of which was recognised.

    Images that both or neither recognise say nothing. If the two are equally good, each other image is a fair coin.
    """
    only_a = int(np.sum(correct_a & ~correct_b))
    only_b = int(np.sum(correct_b & ~correct_a))
    return float(binomtest(only_a, only_a + only_b, 0.5).pvalue) if only_a + only_b else 1.0


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


def check_same_images(a: Predictions, b: Predictions) -> None:
    """A paired test compares image by image, so names, order and labels have to be the same."""
    common = min(len(a.images), len(b.images))
    differs = (a.images[:common] != b.images[:common]) | (a.labels[:common] != b.labels[:common])
    if len(a.images) == len(b.images) and not differs.any():
        return
    if differs.any():
        at = int(differs.argmax())
        first, second = (f"{side.images[at]} (label {side.labels[at]})" for side in (a, b))
        difference = f"image {at} is {first} in the one and {second} in the other"
    else:
        difference = f"the one has {len(a.images)} images and the other {len(b.images)}"
    raise UserError(
        f"{a.path} and {b.path} are of different images and cannot be paired: {difference}; "
        "evaluate both on the same data"
    )


def compare(runs: list[Run]) -> list[Row]:
    """All rows in the tables' order; in each, runs after the first are tested against the first, the baseline."""
    keys = list(dict.fromkeys(key for run in runs for key in run.results))
    protocols = list(dict.fromkeys([*PROTOCOLS, *(protocol for protocol, _ in keys)]))
    data_sets = list(dict.fromkeys(data for _, data in keys))
    rows = []
    for protocol, data in sorted(keys, key=lambda key: (protocols.index(key[0]), data_sets.index(key[1]))):
        results = [run.results.get((protocol, data)) for run in runs]
        predictions = read_paired(results)
        all_shots = sorted({shots for result in results if result for shots in result.scores})
        rows += [Row(protocol, data, n, results, row_scores(results, predictions, n)) for n in all_shots]
    return rows


def read_paired(results: list[Result | None]) -> list[Predictions | None]:
    """The predictions of each run, after a check that all are of the same images; none where nothing can be paired."""
    if results[0] is None or not any(results[1:]):
        return [None] * len(results)
    baseline, *others = [read_predictions(result) if result else None for result in results]
    for other in others:
        if other is not None:
            check_same_images(baseline, other)
    return [baseline, *others]


def row_scores(
    results: list[Result | None], predictions: list[Predictions | None], shots: int | None
) -> list[Score | None]:
    """Each run's score; after the first, with its gain over the first and the p-value of that, where both exist."""
    scores = [result.scores.get(shots) if result else None for result in results]
    baseline = scores[0]
    for run, score in enumerate(scores[1:], start=1):
        if baseline is None or score is None:
            continue
        by_metric = zip(*paired_hits(predictions[run], predictions[0], shots), strict=True)
        tests = [mcnemar_of_seeds(own, base) for own, base in by_metric]
        scores[run] = replace(
            score,
            gain=tuple(own - base for own, base in zip(score.acc, baseline.acc, strict=True)),
            p=tuple(p for p, _ in tests),
            agreed=tuple(agreed for _, agreed in tests),
        )
    return scores


def paired_hits(a: Predictions, b: Predictions, shots: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Both sides' hits [2, R, N] with the seeds that they share or, where they share none, with their first."""
    common = [seed for seed in a.seeds if seed in b.seeds]
    chosen = [[side.seeds.index(seed) for seed in common] or [0] for side in (a, b)]
    return a.hits[shots][:, chosen[0]], b.hits[shots][:, chosen[1]]


def mcnemar_of_seeds(own: np.ndarray, baseline: np.ndarray) -> tuple[float, bool]:
    """The largest p-value over seeds of bool [R, N], each against the same seed of the baseline, and whether all differ
    in the same direction.

    Pooled, the seeds would count each image several times. One of them alone could be significant by its draw of
    training images, which McNemar's test takes as given. What holds for each of them is more than luck of the draw.
    """
    pairs = list(zip(own, baseline, strict=True))
    directions = {np.sign(a.sum() - b.sum()) for a, b in pairs}
    return max(mcnemar(a, b) for a, b in pairs), len(directions) == 1
