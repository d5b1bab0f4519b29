"""Finished evaluations side by side: results.jsonl and per-image predictions in, rows of accuracies and tests out."""

from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binomtest

from util.cli import UserError
from util.evaluation.results import PROTOCOLS, Predictions, Result, Run, Score, read_predictions


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
