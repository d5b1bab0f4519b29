"""Intervals of paired differences: on simulated benchmarks they hold the truth as often as they say."""

import math

import numpy as np
import pytest

from experiments.paired import (
    Differences,
    estimate_all,
    holm,
    measure_noise,
    seeds_needed,
    simultaneous_quantiles,
    standard_error,
)


def simulated(rng, truths, seeds, images, by_seed=1.0, by_image=3.0, by_pair=6.0):
    """Differences of strategies to a common baseline, whose own scatter they share."""
    base = rng.normal(0, by_seed, (seeds, 1))
    for truth in truths:
        own = rng.normal(0, by_seed, (seeds, 1)) + rng.normal(0, by_image, images)
        yield Differences(tuple(range(seeds)), truth + own - base + rng.normal(0, by_pair, (seeds, images)))


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng, truths, repeats = np.random.default_rng(0), (0.0, 1.0, -2.0), 300
    alone, together = np.zeros(3), 0
    for _ in range(repeats):
        found = estimate_all(list(simulated(rng, truths, seeds=6, images=60)), draws=400)
        alone += [each.interval[0] < truth < each.interval[1] for each, truth in zip(found, truths, strict=True)]
        together += all(e.simultaneous[0] < truth < e.simultaneous[1] for e, truth in zip(found, truths, strict=True))
    assert (alone / repeats > 0.92).all()
    assert (alone / repeats < 0.99).all()
    assert 0.92 < together / repeats < 0.99


def test_a_large_gain_is_found_and_a_strategy_that_is_the_baseline_is_not():
    same = Differences((0, 1, 2), np.zeros((3, 400)))
    (gain,) = simulated(np.random.default_rng(0), [5.0], seeds=8, images=400)
    better, none = estimate_all([gain, same], draws=500)
    assert (better.verdict, none.verdict) == ("better", "undecided")
    assert better.p < 0.01
    assert better.p_holm == pytest.approx(2 * better.p)
    assert (none.mean, none.interval, none.p) == (0, (0, 0), 1)
    assert better.simultaneous[0] < better.interval[0] < better.mean == pytest.approx(gain.values.mean())


def test_too_few_seeds_have_a_mean_and_no_interval_and_count_for_no_correction():
    many, few = Differences(tuple(range(5)), np.random.default_rng(0).normal(1, 1, (5, 30))), np.full((2, 30), 2.0)
    first, second = estimate_all([many, Differences((0, 1), few)], draws=200)
    assert (second.mean, second.interval, second.p, second.verdict) == (2, None, None, "")
    assert first == estimate_all([many], draws=200)[0]


def test_the_standard_error_has_a_part_of_seeds_and_one_of_images():
    by_seed, by_image = np.array([0.0, 2.0, 4.0]), np.array([1.0, 5.0])
    assert standard_error(np.repeat(by_seed[:, None], 7, axis=1)) == pytest.approx(2 / math.sqrt(3))
    assert standard_error(np.repeat(by_image[None], 3, axis=0)) == pytest.approx(math.sqrt(8 / 2))


def test_simultaneous_critical_values_are_sidaks_for_independent_rows_and_heavy_tails_widen_their_own_only():
    draws = np.abs(np.random.default_rng(0).standard_normal((3, 200_000)))
    draws[2] = draws[2] ** 3
    first, second, heavy = simultaneous_quantiles(draws, 0.95)
    assert first == pytest.approx(2.388, abs=0.03)  # the normal quantile of (1 + 0.95 ** (1 / 3)) / 2
    assert second == pytest.approx(2.388, abs=0.03)
    assert heavy == pytest.approx(2.388**3, rel=0.05)


def test_holms_correction():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.6, 0.7])) == pytest.approx([1, 1])


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (1.0, 10)])
def test_seeds_needed_are_those_of_textbook_tables(effect, seeds):
    """Paired t-test, 5 %, power 80 %, by the effect in standard deviations."""
    assert seeds_needed(1.0, effect) == seeds
    assert seeds_needed(2.0, 2 * effect) == seeds


def test_common_random_numbers_take_the_seeds_share_out_of_a_difference():
    seed = np.array([3.0, -3.0, 3.0, -3.0])  # what all runs of a seed have in common
    own = np.array([1.0, 1.0, -1.0, -1.0])
    noise = measure_noise(np.stack([seed, seed + own]))
    assert noise.paired == pytest.approx(math.sqrt(4 / 3))
    assert noise.unpaired == pytest.approx(math.sqrt((36 + 36 + 4) / 3))
    assert noise.accuracy == pytest.approx(math.sqrt((36 + 40) / 3 / 2))
