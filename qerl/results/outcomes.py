"""Outcomes of a study's runs (`qerl.results.study`), paired by base, seed and problem."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qerl.results.files import ResultError
from qerl.results.paired import Differences
from qerl.results.pass_at_k import pass_at_k

#: What identifies a row of `outcomes` and `means` besides the problem.
RUN = ["run", "role", "experiment", "size", "arm", "model", "seed", "rate"]


def outcomes(runs: pd.DataFrame, counts: pd.DataFrame, k: int) -> pd.DataFrame:
    """The unbiased pass@k of each run on each problem, in the column `value`.

    `runs` and `counts` are a study's runs and outcomes of one task and split. Runs without an outcome, such as failed
    ones, have no row.
    """
    scored = counts[["run", "problem"]].assign(value=scores(counts, k))
    return runs[RUN].merge(scored, on="run", validate="one_to_many")


def scores(counts: pd.DataFrame, k: int) -> pd.Series:
    """The unbiased pass@k of each row of counts of `right` and `drawn` completions."""
    pairs = counts[["right", "drawn"]].drop_duplicates().itertuples(index=False, name=None)
    at_k = {pair: float(pass_at_k(pair[0], pair[1], k)) for pair in pairs}
    values = [at_k[pair] for pair in zip(counts["right"], counts["drawn"], strict=True)]
    return pd.Series(values, counts.index, dtype=float)


def means(runs: pd.DataFrame, steps: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The mean of a metric over all steps of each run that ended well, in the column `value`."""
    of_run = steps.groupby("run")[metric].mean().rename("value").reset_index()
    ended = runs[runs["status"] == "ok"]
    return ended[RUN].merge(of_run, on="run", validate="one_to_one").assign(problem="")


def differences(frame: pd.DataFrame, arm: str, other: str) -> Differences:
    """The outcome of `arm` less that of `other` on each problem, by base and seed, of one experiment.

    A pair of which one run failed is left out. Runs that saw different problems are a `ResultError`.
    """
    one, two = by_run(frame, arm), by_run(frame, other)
    pairs: dict[str, dict[int, np.ndarray]] = {}
    for model, seed in sorted(one.keys() & two.keys()):
        first, second = one[model, seed], two[model, seed]
        if not (first.index.is_unique and first.index.equals(second.index)):
            raise ResultError(f"{arm} and {other} saw different problems from {model} with seed {seed}")
        pairs.setdefault(model, {})[seed] = first.to_numpy(float) - second.to_numpy(float)
    return pairs


def by_run(frame: pd.DataFrame, arm: str) -> dict[tuple[str, int], pd.Series]:
    """The outcomes of an arm by base and seed, each by problem."""
    rows = frame[frame["arm"] == arm]
    return {
        (str(of_run["model"].iloc[0]), int(of_run["seed"].iloc[0])): of_run.set_index("problem")["value"].sort_index()
        for _, of_run in rows.groupby(["model", "seed"])
    }


def rate_scores(frame: pd.DataFrame) -> pd.DataFrame:
    """The mean outcome at each `rate` of each experiment and arm, in the column `value`. Bases count equally.

    `bases` is the number of bases that have a run at the rate.
    """
    by_base = frame.groupby(["experiment", "arm", "rate", "model"])["value"].mean()
    grouped = by_base.groupby(["experiment", "arm", "rate"])
    return grouped.agg(value="mean", bases="count").reset_index()


def chosen_rates(frame: pd.DataFrame, tolerance: float = 0.005) -> dict[tuple[str, str], float]:
    """The learning rate of each (experiment, arm): of those within `tolerance` of the best mean, the lowest.

    `frame` has the outcomes of a pilot on validation problems.
    """
    chosen = {}
    for (experiment, arm), rates in rate_scores(frame).groupby(["experiment", "arm"]):
        good = rates[rates["value"] >= rates["value"].max() - tolerance]
        chosen[str(experiment), str(arm)] = float(good["rate"].min())
    return chosen


def paired_spread(pairs: Differences) -> float:
    """The standard deviation of the differences between pairs, each averaged over problems."""
    means_ = [values.mean() for of_base in pairs.values() for values in of_base.values()]
    return float(np.std(means_, ddof=1))
