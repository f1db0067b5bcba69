"""Outcomes of synthetic runs: pairs, learning rates and spread, computed by hand."""

import numpy as np
import pandas as pd
import pytest

from qerl.report import exploration
from qerl.results import paired
from qerl.results.files import ResultError
from qerl.results.outcomes import chosen_rates, differences, outcomes, paired_spread
from qerl.settings.base import parse
from qerl.settings.run import RunSettings

REPEATS = 8


def made(accuracies, problems=("p", "q", "r"), rate=1e-3):
    """Frames of evaluations: (arm, model, seed) -> right completions of each problem."""
    evaluations, samples, settings = [], [], {}
    for (arm, model, seed), counts in accuracies.items():
        run = f"{arm}-{model}-{seed}-{rate}"
        evaluations.append(
            {"eval": run, "run": run, "experiment": "e", "arm": arm, "model": model, "seed": seed, "dataset": "d"}
        )
        settings[run] = parse(RunSettings, {"model": model, "dataset": "d", "optimizer": {"learning_rate": rate}}, "")
        for problem, right in zip(problems, counts, strict=True):
            samples += [
                {"eval": run, "dataset": "d", "problem": problem, "correct": float(n < right)} for n in range(REPEATS)
            ]
    base = {"eval": "base", "run": "", "experiment": "", "arm": "", "model": "m", "seed": None, "dataset": "d"}
    return pd.DataFrame([*evaluations, base]), pd.DataFrame(samples), settings


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
    assert paired_spread(pairs) == pytest.approx(np.std([0.5 / 3, 1 / 3], ddof=1))


def test_runs_on_different_problems_are_no_pair():
    one = outcomes(*made({("a", "m", 0): (1, 2, 3)}), k=1)
    other = outcomes(*made({("b", "m", 0): (1, 2, 3)}, problems=("p", "q", "s")), k=1)
    with pytest.raises(ResultError, match="different problems"):
        differences(pd.concat([one, other]), "a", "b")


def test_the_lowest_rate_within_half_a_point_of_the_best_is_chosen():
    frames = [
        outcomes(*made({("a", model, 100): counts for model in ("m", "n")}, rate=rate), k=1)
        for rate, counts in ((5e-4, (2, 2, 2)), (1e-3, (4, 4, 4)), (2e-3, (4, 4, 4)))
    ]
    assert chosen_rates(pd.concat(frames)) == {("e", "a"): 1e-3}
    assert chosen_rates(pd.concat(frames), tolerance=0.3) == {("e", "a"): 5e-4}


def test_an_outcome_is_compared_and_corrected(monkeypatch):
    """Two points above everything for arm 2, nothing else: 2-1 and 2-3 hold, and 5-2 is below."""
    monkeypatch.setattr(paired, "_DRAWS", 300)
    arms = {arm for pair in exploration.PRIMARY.values() for arm in pair}
    counts = {
        (arm, model, seed): (5, 5, 5) if arm == "nvfp4" else (3, 3, 3)
        for arm in arms
        for model in ("m", "n", "o")
        for seed in range(3)
    }
    comparisons, adjusted = exploration.compared(outcomes(*made(counts), k=1))
    assert comparisons.keys() == adjusted.keys() == exploration.PRIMARY.keys()
    assert comparisons["2-1"].interval.mean == pytest.approx(0.25)
    assert comparisons["5-2"].interval.mean == pytest.approx(-0.25)
    assert comparisons["8-1"].p == 1
    assert adjusted["2-1"] < 0.05 < adjusted["8-1"]
    assert exploration.verdicts(comparisons, adjusted) == ["undecided"]
