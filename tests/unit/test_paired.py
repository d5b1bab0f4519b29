"""Intervals of paired differences: on simulated benchmarks, their coverage is as stated."""

import math

import numpy as np
import pytest

from experiments.paired import detectable, estimate_all, holm, measure_noise, seeds_needed, standard_error


def simulated(rng, truths, seeds, images=200, by_seed=0.6, by_image=2.2, by_pair=6.0):
    """Differences of strategies to a common baseline, whose own scatter they share; the means deviate by as much as
    those of experiments/results."""
    base = rng.normal(0, by_seed, (seeds, 1))
    for truth in truths:
        own = rng.normal(0, by_seed, (seeds, 1)) + rng.normal(0, by_image, images)
        yield truth + own - base + rng.normal(0, by_pair, (seeds, images))


@pytest.mark.parametrize(("seeds", "strategies"), [(3, 3), (5, 3), (5, 10)])
def test_intervals_hold_the_truth_at_least_as_often_as_they_say(seeds, strategies):
    rng, truths, repeats = np.random.default_rng(0), np.linspace(-2, 2, strategies), 500
    alone, together = 0, 0
    for _ in range(repeats):
        found = list(zip(estimate_all(list(simulated(rng, truths, seeds))), truths, strict=True))
        alone += sum(each.interval[0] < truth < each.interval[1] for each, truth in found)
        together += all(each.simultaneous[0] < truth < each.simultaneous[1] for each, truth in found)
    assert 0.94 < alone / repeats / strategies < 0.99
    assert together / repeats > 0.94


def test_a_large_gain_is_found_and_a_strategy_that_is_the_baseline_is_not():
    same = np.zeros((3, 400))
    (gain,) = simulated(np.random.default_rng(0), [5.0], seeds=8, images=400)
    better, none = estimate_all([gain, same])
    assert (better.verdict, none.verdict) == ("better", "undecided")
    assert better.p < 0.01
    assert better.p_holm == pytest.approx(2 * better.p)
    assert (none.mean, none.interval, none.p) == (0, (0, 0), 1)
    assert better.simultaneous[0] < better.interval[0] < better.mean == pytest.approx(gain.mean())


def test_too_few_seeds_have_a_mean_and_no_interval_and_count_for_no_correction():
    many, few = np.random.default_rng(0).normal(1, 1, (5, 30)), np.full((2, 30), 2.0)
    first, second = estimate_all([many, few])
    assert (second.mean, second.interval, second.p, second.verdict) == (2, None, None, "")
    assert first == estimate_all([many])[0]


def test_an_error_has_a_part_of_seeds_one_of_images_and_the_noise_of_pairs_once():
    by_seed, by_image = np.array([0.0, 2.0, 4.0]), np.array([1.0, 5.0])
    assert standard_error(np.repeat(by_seed[:, None], 7, axis=1)) == pytest.approx(2 / math.sqrt(3))
    assert standard_error(np.repeat(by_image[None], 3, axis=0)) == pytest.approx(math.sqrt(8 / 2))
    rng = np.random.default_rng(0)
    squared = np.mean([standard_error(rng.normal(0, 6.0, (8, 50))) ** 2 for _ in range(2000)])
    assert 36 / (8 * 50) < squared < 1.3 * 36 / (8 * 50)  # the images' part is never negative, so a little more


def test_critical_values_are_students_and_sidaks():
    values = np.random.default_rng(0).normal(1, 1, (5, 30))
    one, two = estimate_all([values] * 2)
    error = standard_error(values)
    assert one == two
    assert (one.interval[1] - one.mean) / error == pytest.approx(2.776, abs=1e-3)  # 97.5 % of t(4), from a table
    assert (one.simultaneous[1] - one.mean) / error == pytest.approx(3.481, abs=1e-3)  # the square root of 95 % each


def test_holms_correction():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.6, 0.7])) == pytest.approx([1, 1])


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (1.0, 10)])
def test_seeds_needed_are_those_of_textbook_tables(effect, seeds):
    """Paired t-test, 5 %, power 80 %, by the effect in standard deviations."""
    assert seeds_needed(1.0, effect) == seeds
    assert seeds_needed(2.0, 2 * effect) == seeds
    assert detectable(2.0, seeds) <= 2 * effect < detectable(2.0, seeds - 1)


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 394), (0.5, 64), (0.8, 26)])
def test_unpaired_seeds_needed_are_those_of_textbook_tables(effect, seeds):
    """Two-sample t-test, by the effect in standard deviations of a group: runs of each group."""
    assert seeds_needed(math.sqrt(2), effect, groups=2) == seeds


def test_common_random_numbers_take_the_seeds_share_out_of_a_difference():
    seed = np.array([3.0, -3.0, 3.0, -3.0])  # what all runs of a seed have in common
    own = np.array([1.0, 1.0, -1.0, -1.0])
    noise = measure_noise(np.stack([seed, seed + own]))
    assert noise.paired == pytest.approx(math.sqrt(4 / 3))
    assert noise.unpaired == pytest.approx(math.sqrt((36 + 36 + 4) / 3))
    assert noise.accuracy == pytest.approx(math.sqrt((36 + 40) / 3 / 2))
