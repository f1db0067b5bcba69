"""Outcomes of runs, paired by hand, and their comparisons against definitions, other libraries and simulations."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from qerl.results import statistics
from qerl.results.statistics import holm, paired_difference
from qerl.results.store import ResultError
from qerl.study.data import differences, means, outcomes

DRAWN = 8


def made(accuracies, problems=("p", "q", "r"), rate=1e-3):
    """Runs and counts of a study: (arm, model, seed) -> right completions of each problem."""
    runs, counts = [], []
    for (arm, model, seed), right in accuracies.items():
        run = f"{arm}-{model}-{seed}-{rate}"
        identity = {"run": run, "role": "main", "experiment": "e", "size": "s", "arm": arm, "model": model}
        runs.append({**identity, "seed": seed, "rate": rate, "status": "ok"})
        counts += [{"run": run, "problem": p, "right": n, "drawn": DRAWN} for p, n in zip(problems, right, strict=True)]
    return pd.DataFrame(runs), pd.DataFrame(counts)


def test_pass_at_k_of_each_problem_of_each_run():
    frame = outcomes(*made({("a", "m", 0): (0, 4, 8), ("b", "m", 0): (1, 2, 3)}), k=2)
    by_arm = frame.pivot_table(index="arm", columns="problem", values="value")
    # 1 - C(8 - c, 2) / C(8, 2) by hand.
    assert by_arm.loc["a"].tolist() == pytest.approx([0, 1 - 6 / 28, 1])
    assert by_arm.loc["b"].tolist() == pytest.approx([1 - 21 / 28, 1 - 15 / 28, 1 - 10 / 28])


def test_pairs_share_base_and_seed_and_a_failed_run_takes_its_pair_along():
    counts = {("a", "m", 0): (8, 4, 0), ("b", "m", 0): (4, 4, 0), ("a", "n", 1): (8, 8, 8), ("b", "n", 1): (0, 8, 8)}
    frame = outcomes(*made({**counts, ("a", "m", 7): (8, 8, 8)}), k=1)
    pairs = differences(frame, "a", "b")
    assert {(model, seed) for model, seeds in pairs.items() for seed in seeds} == {("m", 0), ("n", 1)}
    np.testing.assert_allclose(pairs["m"][0], [0.5, 0, 0])
    np.testing.assert_allclose(pairs["n"][1], [1, 0, 0])
    mixed = pd.concat([frame[frame["arm"] == "a"], frame[frame["arm"] == "b"].iloc[::-1]])
    np.testing.assert_allclose(differences(mixed, "a", "b")["m"][0], [0.5, 0, 0])  # paired by name, not by place


@pytest.mark.parametrize("problems", [("p", "q", "s"), ("p", "q", "q")])
def test_runs_on_different_problems_are_no_pair(problems):
    one = outcomes(*made({("a", "m", 0): (1, 2, 3)}), k=1)
    other = outcomes(*made({("b", "m", 0): (1, 2, 3)}, problems=problems), k=1)
    with pytest.raises(ResultError, match="different problems"):
        differences(pd.concat([one, other]), "a", "b")


def test_means_over_steps_are_of_runs_that_ended_well():
    runs, _ = made({("a", "m", 0): (), ("b", "m", 0): (), ("c", "m", 0): ()}, problems=())
    runs.loc[runs["arm"] == "c", "status"] = "diverged after 1 of 2 steps"
    steps = pd.DataFrame({"run": np.repeat(runs["run"], 2), "entropy": [1.0, 3.0, 5.0, 6.0, 9.0, 9.0]})
    frame = means(runs, steps, "entropy")
    assert dict(zip(frame["arm"], frame["value"], strict=True)) == {"a": 2.0, "b": 5.5}
    np.testing.assert_allclose(differences(frame, "b", "a")["m"][0], [3.5])


@pytest.fixture(autouse=True)
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
