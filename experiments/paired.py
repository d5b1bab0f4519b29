"""Differences paired by seed and by image, with intervals for both, corrected for their number.

Both seeds and images are samples: another seed draws other weights and crops, another test set has other images. Which
images were pretrained on is not varied, and intervals do not cover it. The
error of a mean difference over S seeds and N images has a part from each, as in a two-way analysis of variance with
random effects. Intervals are Student's, with the S - 1 degrees of freedom of the seeds, and Sidak's for all differences
together.

A bootstrap over seeds and images was planned, and is too narrow here. Of 5 seeds it often draws few different ones, and
the maximum over strategies consists of such draws: on simulated benchmarks of 10 strategies its simultaneous intervals
held all truths in 83 to 87 % of cases instead of 95 % (tests/unit/test_paired.py has the simulation).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
POWER = 0.8
FEWEST_SEEDS = 3  # with two, an interval is 13 times as wide as its error


@dataclass(frozen=True)
class Estimate:
    """A mean difference; intervals and p-values are None where there are too few seeds."""

    mean: float
    interval: tuple[float, float] | None = None  # for this difference alone
    simultaneous: tuple[float, float] | None = None  # all such intervals hold the truth together in 95 % of benchmarks
    p: float | None = None
    p_holm: float | None = None  # corrected for the number of differences

    @property
    def verdict(self) -> str:
        if self.simultaneous is None:
            return ""
        low, high = self.simultaneous
        return "better" if low > 0 else "worse" if high < 0 else "undecided"


def estimate_all(differences: Sequence[np.ndarray]) -> list[Estimate]:
    """Of a family of strategies, each with the differences [S, N] of its scores from the baseline's, with the same
    seeds on the same images. Those with enough seeds share the level of the simultaneous intervals."""
    from scipy import stats  # here, because it takes half a second to import

    means = [float(each.mean()) for each in differences]
    estimates = [Estimate(mean) for mean in means]
    known = [at for at, each in enumerate(differences) if len(each) >= FEWEST_SEEDS]
    errors = {at: standard_error(differences[at]) for at in known}
    p = {}
    for at in known:
        t = abs(means[at]) / errors[at] if errors[at] else math.inf if means[at] else 0.0
        p[at] = 2 * float(stats.t.sf(t, len(differences[at]) - 1))
    for at, corrected in zip(known, holm(np.array(list(p.values()))), strict=True):
        freedom = len(differences[at]) - 1
        alone, together = (stats.t.ppf((1 + level) / 2, freedom) for level in (LEVEL, LEVEL ** (1 / len(known))))
        one, all_ = ((means[at] - q * errors[at], means[at] + q * errors[at]) for q in map(float, (alone, together)))
        estimates[at] = Estimate(means[at], one, all_, p[at], float(corrected))
    return estimates


def standard_error(values: np.ndarray) -> float:
    """Of the mean of [S, N], as a sample of seeds and of images.

    The variances of the seeds' means and of the images' means each hold the noise of single (seed, image) pairs, which
    counts once.
    """
    seeds, images = values.shape
    by_seed, by_image = (values.mean(axis=axis, dtype=np.float64) for axis in (1, 0))
    residual = values - by_seed[:, None] - by_image + by_seed.mean()
    of_pairs = (residual**2).sum() / ((seeds - 1) * (images - 1) * seeds * images)
    of_images = max(by_image.var(ddof=1) / images - of_pairs, 0)
    return math.sqrt(by_seed.var(ddof=1) / seeds + of_images)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction of p-values [K]."""
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(stepped)
    corrected[order] = np.minimum(stepped, 1)
    return corrected


# --- How many seeds it takes ---


@dataclass(frozen=True)
class Noise:
    """Standard deviations over seeds, in points; pooled over strategies."""

    accuracy: float
    paired: float  # of a difference between runs of the same seed
    unpaired: float  # of a difference between runs of different seeds


def measure_noise(accuracies: np.ndarray) -> Noise:
    """From accuracies [K + 1, S] of a baseline, which comes first, and K strategies with the same seeds."""
    variances, differences = accuracies.var(axis=1, ddof=1), accuracies[1:] - accuracies[0]
    return Noise(
        accuracy=math.sqrt(variances.mean()),
        paired=math.sqrt(differences.var(axis=1, ddof=1).mean()),
        unpaired=math.sqrt((variances[1:] + variances[0]).mean()),
    )


def seeds_needed(deviation: float, effect: float, alpha: float = 1 - LEVEL, groups: int = 1) -> int:
    """The fewest seeds with which a two-sided t-test detects a mean difference of `effect`: between paired runs, or
    between two `groups` of as many."""
    from scipy import stats

    if deviation == 0:
        return 2
    # Known deviations would need these, estimated ones a few more.
    seeds = max(2, math.floor(((stats.norm.isf(alpha / 2) + stats.norm.ppf(POWER)) * deviation / effect) ** 2))
    while power_of(effect / deviation, seeds, alpha, groups) < POWER:
        seeds += 1
    return seeds


def detectable(deviation: float, seeds: int, alpha: float = 1 - LEVEL) -> float:
    """The smallest mean difference of paired runs that a two-sided t-test detects with so many seeds."""
    from scipy import optimize

    if deviation == 0:
        return 0.0
    found = optimize.root_scalar(lambda effect: power_of(effect, seeds, alpha) - POWER, bracket=(1e-3, 1e3), xtol=1e-6)
    return deviation * found.root


def power_of(effect: float, seeds: int, alpha: float, groups: int = 1) -> float:
    """How often a two-sided t-test detects an effect, given in standard deviations of a difference."""
    from scipy import stats

    freedom = groups * (seeds - 1)
    return float(stats.nct.sf(stats.t.ppf(1 - alpha / 2, freedom), freedom, effect * math.sqrt(seeds)))
