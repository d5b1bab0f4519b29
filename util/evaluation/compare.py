"""Compare runs: each result against the baseline's, with McNemar's test on the same images."""

from dataclasses import dataclass

import numpy as np

from util.cli import UserError
from util.evaluation.results import PROTOCOLS, EvaluatedRun, Predictions, Result, Score, read_predictions


@dataclass(frozen=True)
class Gain:
    """A run's gain over the baseline in one accuracy."""

    points: float
    p: float  # of the exact McNemar test; the largest over seeds
    agreed: bool  # whether every seed gained, or every seed lost


@dataclass(frozen=True)
class Comparison:
    """All runs on one data set, under one protocol and number of shots. Lists have an entry per run, the baseline's
    first."""

    protocol: str
    data: str
    shots: int | None
    results: list[Result | None]  # None: the run has no such result
    scores: list[Score | None]
    gains: list[tuple[Gain, Gain] | None]  # in Acc@1 and Acc@5; None: nothing to compare


def mcnemar(correct_a: np.ndarray, correct_b: np.ndarray) -> float:
    """Exact two-sided p-value for two bool arrays [N]: which of the same images were classified correctly.

    Images that both or neither get right carry no information. Under the null hypothesis, each other image is a fair
    coin flip.
    """
    from scipy.stats import binomtest  # here because it takes half a second to import

    only_a = int(np.sum(correct_a & ~correct_b))
    only_b = int(np.sum(correct_b & ~correct_a))
    return float(binomtest(only_a, only_a + only_b, 0.5).pvalue) if only_a + only_b else 1.0


def mcnemar_of_seeds(own: np.ndarray, baseline: np.ndarray) -> tuple[float, bool]:
    """The largest p-value over seeds of bool [R, N], each against the same seed of the baseline, and whether all differ
    in the same direction.

    Pooling the seeds would count each image several times. A single seed could be significant because of its draw of
    training images, which McNemar's test takes as given. What holds for every seed is unlikely to be luck.
    """
    pairs = list(zip(own, baseline, strict=True))
    directions = {np.sign(a.sum() - b.sum()) for a, b in pairs}
    return max(mcnemar(a, b) for a, b in pairs), len(directions) == 1


def check_same_images(a: Predictions, b: Predictions) -> None:
    """A paired test compares image by image, so names, order and labels must match."""
    common = min(len(a.images), len(b.images))
    differs = (a.images[:common] != b.images[:common]) | (a.labels[:common] != b.labels[:common])
    if len(a.images) == len(b.images) and not differs.any():
        return
    if differs.any():
        at = int(differs.argmax())
        first, second = (f"{side.images[at]} (label {side.labels[at]})" for side in (a, b))
        difference = f"image {at} is {first} in one and {second} in the other"
    else:
        difference = f"one has {len(a.images)} images and the other {len(b.images)}"
    raise UserError(
        f"{a.path} and {b.path} cover different images and cannot be paired: {difference}; "
        "evaluate both on the same data"
    )


def compare(runs: list[EvaluatedRun]) -> list[Comparison]:
    """Every protocol, data set and number of shots of any run, in table order."""
    keys = list(dict.fromkeys(key for run in runs for key in run.results))
    protocols = list(dict.fromkeys([*PROTOCOLS, *(protocol for protocol, _ in keys)]))
    data_sets = list(dict.fromkeys(data for _, data in keys))
    rows = []
    for protocol, data in sorted(keys, key=lambda key: (protocols.index(key[0]), data_sets.index(key[1]))):
        results = [run.results.get((protocol, data)) for run in runs]
        predictions = read_paired(results)
        for shots in sorted({shots for result in results if result for shots in result.scores}, key=lambda n: n or 0):
            scores = [result.scores.get(shots) if result else None for result in results]
            baseline, *others = zip(scores, predictions, strict=True)
            gains = [None, *(gains_over(*baseline, *other, shots) for other in others)]
            rows.append(Comparison(protocol, data, shots, results, scores, gains))
    return rows


def read_paired(results: list[Result | None]) -> list[Predictions | None]:
    """The predictions of each run, after checking that all are for the same images; none if nothing can be paired."""
    if results[0] is None or not any(results[1:]):
        return [None] * len(results)
    baseline = read_predictions(results[0])
    others = [read_predictions(result) if result else None for result in results[1:]]
    for other in others:
        if other is not None:
            check_same_images(baseline, other)
    return [baseline, *others]


def gains_over(
    baseline: Score | None, base: Predictions | None, score: Score | None, own: Predictions | None, shots: int | None
) -> tuple[Gain, Gain] | None:
    """Gains in Acc@1 and Acc@5, tested on the seeds that both share or, if they share none, on the first of each."""
    if not (baseline and base and score and own):
        return None
    common = [seed for seed in own.seeds if seed in base.seeds]
    hits = [
        side.hits[shots][:, [side.seeds.index(seed) for seed in common] or [0]] for side in (own, base)
    ]  # [2, R, N]
    first, fifth = (
        Gain(score.acc[metric] - baseline.acc[metric], *mcnemar_of_seeds(hits[0][metric], hits[1][metric]))
        for metric in (0, 1)
    )
    return first, fifth


def missing(names: list[str], rows: list[Comparison]) -> list[str]:
    """A sentence for each result, or number of shots, that one run has and another lacks."""
    gaps: dict[str, list[str]] = {}
    for row in rows:
        title = next(result for result in row.results if result).title
        for name, result, score in zip(names, row.results, row.scores, strict=True):
            if score is None:
                gaps.setdefault(f"{name} has no {title}", []).extend([str(row.shots)] if result else [])
    return [f"{gap} with {', '.join(shots)} shots" if shots else gap for gap, shots in gaps.items()]


def caveats(runs: list[EvaluatedRun]) -> list[str]:
    """What besides pretraining could explain a gain: different evaluation settings, or mixed checkpoints."""
    found = []
    for run in runs:
        origins = {result.checkpoint_sha256: result.origin_of_weights for result in run.results.values()}
        if len(origins) > 1:
            found.append(f"the results of {run.name} come from several checkpoints: {', '.join(origins.values())}")
        for old in run.replaced:
            last = run.results[old.protocol, old.data].origin_of_weights
            found.append(
                f"{run.name} has results of {old.title} from several checkpoints: the last "
                f"({last}) is used, not {old.origin_of_weights}"
            )
    baseline, *others = runs
    for other in others:
        for key, result in baseline.results.items():
            ours, theirs = result.settings, other.results.get(key, result).settings
            differing = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
            if differing:
                values = (f"{n}: {ours.get(n, 'not set')} against {theirs.get(n, 'not set')}" for n in differing)
                found.append(
                    f"{result.title}, {baseline.name} against {other.name}: {', '.join(values)}; "
                    "this could explain a gain"
                )
    return found
