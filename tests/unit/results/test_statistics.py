"""Intervals and pass@k against scipy, simulations and their definitions."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from scipy import stats

from qerl.results import statistics
from qerl.results.statistics import (
    accuracy_interval,
    average_interval,
    difference_interval,
    holm,
    mean_interval,
    paired_difference,
    paired_ratio_interval,
    pass_at_k,
    ratio_interval,
)


def test_one_evaluation_matches_the_binomial():
    scores = np.zeros((1, 1000))
    scores[0, :300] = 1
    interval = accuracy_interval(scores)
    low, high = stats.binomtest(300, 1000).proportion_ci(method="wilson")
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(low, abs=0.003)
    assert interval.high == pytest.approx(high, abs=0.003)


def test_one_evaluation_with_repeats_matches_scipys_bootstrap():
    scores = np.random.default_rng(1).binomial(4, 0.7, size=(1, 150)) / 4
    interval = accuracy_interval(scores)
    oracle = stats.bootstrap((scores[0],), np.mean, method="percentile", rng=np.random.default_rng(2))
    assert interval.low == pytest.approx(oracle.confidence_interval.low, abs=0.004)
    assert interval.high == pytest.approx(oracle.confidence_interval.high, abs=0.004)


def test_seeds_that_differ_only_give_the_t_interval():
    """All problems alike: nothing is left but the variation between seeds."""
    means = np.array([0.5, 0.56, 0.59])
    interval = accuracy_interval(np.repeat(means[:, None], 50, axis=1))
    low, high = stats.t.interval(0.95, 2, loc=means.mean(), scale=stats.sem(means))
    assert interval.low == pytest.approx(low, abs=0.01)
    assert interval.high == pytest.approx(high, abs=0.01)


def test_paired_difference_matches_scipys_bootstrap():
    """Where gains and losses differ."""
    generator = np.random.default_rng(5)
    base, arm = ((generator.random(300) < rate).astype(float) for rate in (0.1, 0.6))
    interval = difference_interval(arm[None], base)
    oracle = stats.bootstrap((arm - base,), np.mean, method="percentile", rng=generator).confidence_interval
    assert (interval.low, interval.high) == pytest.approx((oracle.low, oracle.high), abs=0.008)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_perfect_scores_keep_their_uncertainty(value):
    interval = accuracy_interval(np.full((3, 30), value))
    low, high = stats.binomtest(int(30 * value), 30).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((low, high))


def share_covered(interval, truth, experiments=600):
    """The share of experiments; 0.93 lies 2.2 standard errors below 0.95 of 600."""
    generator = np.random.default_rng(7)
    found = [interval(generator) for _ in range(experiments)]
    return np.mean([each.low <= truth <= each.high for each in found])


#: The share that is always right after training, the rate before, and repeats with how alike problems are.
ACCURACIES = product([None], [0.02, 0.05, 0.5, 0.97], [(1, 1.0), (32, 0.5), (32, 5.0)])
DIFFERENCES = product([0.0, 0.1], [0.02, 0.5, 0.98], [(1, 0.1), (1, 10.0), (32, 1.0)])


@pytest.mark.parametrize("problems", [30, 100, 500])
@pytest.mark.parametrize(("learned", "rate", "drawn_of"), [*ACCURACIES, *DIFFERENCES])
def test_coverage_of_an_accuracy_and_of_a_paired_difference(problems, rate, drawn_of, learned):
    """Problems' own rates are drawn from a beta distribution; a small `alike` has problems always or never solved.

    The share `learned` of the problems is always right after training; the others keep their rates.
    """
    repeats, alike = drawn_of

    def drawn(generator):
        rates = generator.beta(rate * alike, (1 - rate) * alike, problems)
        base = generator.binomial(repeats, rates) / repeats
        if learned is None:
            return accuracy_interval(base[None])
        after = np.where(generator.random(problems) < learned, 1.0, rates)
        return difference_interval(generator.binomial(repeats, after)[None] / repeats, base)

    assert share_covered(drawn, rate if learned is None else learned * (1 - rate)) >= 0.93


@pytest.mark.parametrize("right", [0, 1, 15, 30])
def test_a_difference_without_any_disagreement_is_that_of_no_gain_and_no_loss(right):
    """Without a discordant pair, Tango's score interval of n pairs ends at z**2 / (n + z**2), as Wilson's of 0 does."""
    scores = (np.arange(30) < right).astype(float)
    interval = difference_interval(np.stack([scores] * 3), scores)
    z = stats.norm.ppf(0.975)
    assert (interval.mean, interval.high) == pytest.approx((0, z**2 / (30 + z**2)))
    assert interval.low == -interval.high


def test_shapes_that_cannot_be_paired_are_errors():
    with pytest.raises(ValueError, match="paired"):
        difference_interval(np.zeros((2, 5)), np.zeros(4))
    with pytest.raises(ValueError, match="seeds, problems"):
        accuracy_interval(np.zeros(5))
    with pytest.raises(ValueError, match="between 0 and 1"):
        accuracy_interval(np.full((1, 5), 40.0))


def test_average_is_over_data_sets_and_its_interval_over_their_problems():
    generator = np.random.default_rng(1)
    sets = [(generator.random((1, n)) < p).astype(float) for n, p in ((500, 0.8), (300, 0.2), (300, 0.1), (400, 0.5))]
    interval = average_interval(sets)
    assert interval.mean == pytest.approx(np.mean([scores.mean() for scores in sets]))
    error = np.sqrt(sum(scores.var() / scores.size for scores in sets)) / 4
    assert interval.low == pytest.approx(interval.mean - 1.96 * error, abs=0.1 * error)
    assert interval.high == pytest.approx(interval.mean + 1.96 * error, abs=0.1 * error)
    bases = [np.zeros(scores.shape[1]) + 0.25 for scores in sets]
    assert average_interval(sets, bases).mean == pytest.approx(interval.mean - 0.25)


def test_a_mean_over_problems_is_that_of_scipys_bootstrap_and_one_problem_has_no_interval():
    values = np.random.default_rng(3).lognormal(size=40)
    interval = mean_interval(values)
    oracle = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(4)).confidence_interval
    width = oracle.high - oracle.low
    assert (interval.low, interval.high) == pytest.approx((oracle.low, oracle.high), abs=0.05 * width)
    alone = mean_interval(values[:1])
    assert (alone.mean, np.isnan(alone.low), np.isnan(alone.high)) == (values[0], True, True)


def test_interval_of_a_ratio_is_that_of_all_resamples():
    above, below = [3.0, 3.3, 3.9], [2.0, 2.1, 2.6]
    medians = [[np.median(draw) for draw in product(values, repeat=3)] for values in (above, below)]
    ratios = np.sort([a / b for a, b in product(*medians)])
    interval = ratio_interval(above, below)
    assert interval.mean == 3.3 / 2.1
    assert interval.low == pytest.approx(np.quantile(ratios, 0.025), abs=0.02)
    assert interval.high == pytest.approx(np.quantile(ratios, 0.975), abs=0.02)
    assert np.isnan(ratio_interval([3.0], below).low)


def test_paired_times_of_a_machine_that_slows_down_have_their_ratio():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        load = generator.lognormal(0, 0.5, size=15)
        now, before = (load * factor * generator.lognormal(0, 0.05, size=15) for factor in (1.2, 1.0))
        interval = paired_ratio_interval(now, before)
        held += interval.low <= 1.2 <= interval.high
    assert 0.88 < held / 300 < 0.995
    with pytest.raises(ValueError, match="in pairs, not 2 and 1"):
        paired_ratio_interval([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("completions", "k"), [(1, 1), (5, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_completion(completions, k):
    for right in range(completions + 1):
        outcomes = [True] * right + [False] * (completions - right)
        chosen = [any(choice) for choice in combinations(outcomes, k)]
        assert pass_at_k(right, completions, k) == pytest.approx(sum(chosen) / len(chosen))


def test_large_counts_are_exact():
    counts = np.array([0, 1, 30, 63, 64, 192, 193, 256])
    expected = [1 - comb(256 - int(c), 64) / comb(256, 64) for c in counts]
    assert pass_at_k(counts, 256, 64) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("right", "completions", "k"), [(1, 4, 8), (5, 4, 1), (-1, 4, 1), (1, 4, 0)])
def test_impossible_counts_are_refused(right, completions, k):
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(right, completions, k)


# --- paired differences of a study's arms


@pytest.fixture
def fewer_draws(monkeypatch):
    monkeypatch.setattr(statistics, "_DRAWS", 400)


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


@pytest.mark.usefixtures("fewer_draws")
def test_a_clear_effect_has_a_small_p_and_no_effect_a_large_one():
    generator = np.random.default_rng(2)
    for effect in (0.2, -0.2):
        assert paired_difference(simulated(generator, effect=effect, seed_sd=0.02)).p <= 2 / 401
    assert paired_difference(simulated(generator, effect=0.0)).p > 0.1


@pytest.mark.parametrize(
    "cells",
    [
        {},
        {"a": {}},
        {"a": {0: np.zeros(3), 1: np.zeros(4)}},
        {"a": {0: np.zeros(3)}, "b": {}},
        {"a": {0: np.full(3, np.nan)}},
    ],
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
