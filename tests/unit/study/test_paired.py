"""Paired comparisons against their definitions, other libraries and simulations."""

from itertools import combinations

import numpy as np
import pytest

from qerl.study import outcomes
from qerl.study.outcomes import holm, paired_difference


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(outcomes, "_DRAWS", 400)


def simulated(generator, bases=3, seeds=4, problems=50, effect=0.0, base_sd=0.0, seed_sd=0.0):
    cells = {}
    for base in range(bases):
        of_base = effect + base_sd * generator.normal()
        cells[f"b{base}"] = {
            seed: of_base + seed_sd * generator.normal() + 0.3 * generator.normal(size=problems)
            for seed in range(seeds)
        }
    return cells


def test_the_estimate_is_the_mean_over_bases_of_means_over_seeds():
    cells = {"a": {0: np.full(4, 0.1), 1: np.full(4, 0.3)}, "b": {0: np.full(4, 0.8)}}
    difference = paired_difference(cells)
    assert difference.interval.mean == pytest.approx((0.2 + 0.8) / 2)
    assert (difference.bases, difference.pairs) == (2, 3)


def test_problems_alone_give_the_interval_of_the_plain_bootstrap():
    values = np.random.default_rng(0).normal(0.05, 0.3, size=200)
    interval = paired_difference({"a": {0: values}}).interval
    error = values.std() / np.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_spread_between_bases_and_seeds_widens_the_interval():
    plain, seeds, both = (
        paired_difference(simulated(np.random.default_rng(1), base_sd=base, seed_sd=seed)).interval
        for base, seed in ((0, 0), (0, 0.2), (0.3, 0.2))
    )
    assert plain.high - plain.low < seeds.high - seeds.low < both.high - both.low


def test_a_clear_effect_has_a_small_p_and_no_effect_a_large_one():
    generator = np.random.default_rng(2)
    assert paired_difference(simulated(generator, effect=0.2, seed_sd=0.02)).p <= 2 / 401
    assert paired_difference(simulated(generator, effect=0.0)).p > 0.1
    flipped = simulated(generator, effect=-0.2, seed_sd=0.02)
    assert paired_difference(flipped).p <= 2 / 401


def test_p_is_uniform_enough_where_there_is_no_effect():
    """One base, so that seeds and problems alone vary: at most a tenth of experiments fall below 0.05."""
    generator = np.random.default_rng(3)
    small = [paired_difference(simulated(generator, 1, 12, 30, seed_sd=0.1)).p < 0.05 for _ in range(60)]
    assert np.mean(small) < 0.15


@pytest.mark.parametrize(
    "cells", [{}, {"a": {}}, {"a": {0: np.zeros(3), 1: np.zeros(4)}}, {"a": {0: np.zeros(3)}, "b": {}}]
)
def test_gaps_are_refused(cells):
    with pytest.raises(ValueError, match="same problems"):
        paired_difference(cells)


def test_holm_is_a_closed_test_of_bonferroni():
    """Holm's p is the largest Bonferroni p of all subsets with the hypothesis: the closure of Bonferroni's test."""
    values = dict(zip("abcde", np.random.default_rng(6).uniform(0, 0.2, 5), strict=True))
    subsets = [set(chosen) for size in range(1, 6) for chosen in combinations(values, size)]
    closed = {
        name: max(min(1, len(subset) * min(values[one] for one in subset)) for subset in subsets if name in subset)
        for name in values
    }
    assert holm(values) == pytest.approx(closed)


def test_holm_is_the_textbooks_example():
    """Four tests by hand: 0.005 x 4, 0.01 x 3, then 0.03 x 2, and the last may not fall below it."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_the_interval_is_that_of_a_plain_loop_over_draws():
    """Bases, seeds of each and problems drawn one by one, with another generator and ragged seeds."""
    generator = np.random.default_rng(5)
    cells = simulated(generator, bases=3, seeds=4, problems=30, effect=0.05, base_sd=0.05, seed_sd=0.1)
    cells["b1"].pop(2)
    means = []
    for _ in range(3000):
        problems = generator.integers(30, size=30)
        of_bases = []
        for base in generator.choice(list(cells), size=3):
            seeds = list(cells[base].values())
            drawn = [seeds[n] for n in generator.integers(len(seeds), size=len(seeds))]
            of_bases.append(np.mean([values[problems].mean() for values in drawn]))
        means.append(np.mean(of_bases))
    found = paired_difference(cells)
    low, high = np.quantile(means, [0.025, 0.975])
    width = high - low
    assert found.interval.low == pytest.approx(low, abs=0.08 * width)
    assert found.interval.high == pytest.approx(high, abs=0.08 * width)
    share = np.mean(np.array(means) <= 0)
    assert found.p == pytest.approx(2 * min(share, 1 - share), abs=0.05)
