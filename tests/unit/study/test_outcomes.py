"""Outcomes of synthetic runs: pairs, learning rates, means and spread, computed by hand."""

import numpy as np
import pandas as pd
import pytest

from qerl.results.store import ResultError
from qerl.study import outcomes as exploration
from qerl.study import outcomes as paired
from qerl.study.outcomes import chosen_rates, differences, means, outcomes, paired_spread, rate_scores

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
    assert paired_spread(pairs) == pytest.approx(np.std([0.5 / 3, 1 / 3], ddof=1))


def test_problems_are_paired_by_name_and_not_by_place():
    runs, counts = made({("a", "m", 0): (8, 4, 0), ("b", "m", 0): (8, 4, 0)})
    mixed = pd.concat([counts[:3], counts[3:].iloc[::-1]])
    np.testing.assert_allclose(differences(outcomes(runs, mixed, k=1), "a", "b")["m"][0], [0, 0, 0])


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


def test_the_lowest_rate_within_half_a_point_of_the_best_is_chosen():
    frames = [
        outcomes(*made({("a", model, 100): counts for model in ("m", "n")}, rate=rate), k=1)
        for rate, counts in ((5e-4, (2, 2, 2)), (1e-3, (4, 4, 4)), (2e-3, (4, 4, 4)))
    ]
    assert chosen_rates(pd.concat(frames)) == {("e", "a"): 1e-3}
    assert chosen_rates(pd.concat(frames), tolerance=0.3) == {("e", "a"): 5e-4}


def test_bases_count_equally_in_the_score_of_a_rate():
    """Base m has two runs and base n one: (0.25 + 0.75) / 2 over runs of m, then the mean with n."""
    counts = {("a", "m", 0): (2, 2, 2), ("a", "m", 1): (6, 6, 6), ("a", "n", 0): (8, 8, 8)}
    [row] = rate_scores(outcomes(*made(counts), k=1)).to_dict("records")
    assert (row["value"], row["bases"]) == (pytest.approx(0.75), 2)


def compared(counts, monkeypatch):
    monkeypatch.setattr(paired, "_DRAWS", 300)
    return exploration.compared(outcomes(*made(counts), k=1))


def primary_counts(arms=None):
    arms = arms or {arm for pair in exploration.PRIMARY.values() for arm in pair}
    models = [(model, seed) for model in ("m", "n", "o") for seed in range(3)]
    return {(arm, *one): (5, 5, 5) if arm == "nvfp4" else (3, 3, 3) for arm in arms for one in models}


def test_an_outcome_is_compared_and_corrected(monkeypatch):
    """Two completions of eight above everything for arm 2, nothing else: 2-1 and 2-3 hold, and 5-2 is below."""
    comparisons, adjusted = compared(primary_counts(), monkeypatch)
    assert comparisons.keys() == adjusted.keys() == exploration.PRIMARY.keys()
    assert comparisons["2-1"].interval.mean == pytest.approx(0.25)
    assert comparisons["5-2"].interval.mean == pytest.approx(-0.25)
    assert comparisons["8-1"].p == 1
    assert adjusted["2-1"] < 0.05 < adjusted["8-1"]
    assert exploration.verdicts(comparisons, adjusted) == ["undecided"]


def test_the_family_stays_five_while_a_comparison_is_missing(monkeypatch):
    """One comparison of five: Holm's factor stays 5, and no rule applies."""
    comparisons, adjusted = compared(primary_counts(["nvfp4", "bf16"]), monkeypatch)
    assert comparisons.keys() == adjusted.keys() == {"2-1"}
    assert adjusted["2-1"] == pytest.approx(5 * comparisons["2-1"].p)
    assert exploration.verdicts(comparisons, adjusted) == ["incomplete"]
