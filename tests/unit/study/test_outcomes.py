"""Outcomes of synthetic runs: pairs and means, computed by hand."""

import numpy as np
import pandas as pd
import pytest

from qerl.results.store import ResultError
from qerl.study.outcomes import differences, means, outcomes

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
