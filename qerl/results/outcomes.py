"""Per-problem outcomes of runs, paired by base, seed and problem."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from qerl.results.files import ResultError
from qerl.results.paired import Differences
from qerl.results.pass_at_k import pass_at_k
from qerl.settings.run import RunSettings

#: What identifies a row of `outcomes` besides the problem.
_RUN = ["experiment", "arm", "model", "seed", "rate", "dataset"]


def outcomes(
    evaluations: pd.DataFrame, samples: pd.DataFrame, settings: Mapping[str, RunSettings], k: int
) -> pd.DataFrame:
    """The unbiased pass@k of each run on each problem, in the column `value`; untrained bases are left out.

    The frames are those of `qerl.results.readers`. `rate` is the learning rate of the run.
    """
    trained = evaluations[evaluations["run"] != ""].copy()
    trained["rate"] = [settings[run].optimizer.learning_rate for run in trained["run"]]
    counts = samples.groupby(["eval", "dataset", "problem"])["correct"].agg(["sum", "count"]).reset_index()
    merged = counts.merge(trained[["eval", *_RUN]], on=["eval", "dataset"], how="inner", validate="many_to_one")
    drawn = zip(merged["sum"], merged["count"], strict=True)
    merged["value"] = [float(pass_at_k(int(right), int(completions), k)) for right, completions in drawn]
    return merged[[*_RUN, "problem", "value"]]


def differences(frame: pd.DataFrame, arm: str, other: str) -> Differences:
    """The outcome of `arm` less that of `other` on each problem, by base and seed, of one experiment and data set.

    A pair of which one run failed is left out. Runs that saw different problems are a `ResultError`.
    """
    one, two = _by_run(frame, arm), _by_run(frame, other)
    pairs: dict[str, dict[int, npt.NDArray[np.float64]]] = {}
    for model, seed in sorted(one.keys() & two.keys()):
        first, second = one[model, seed], two[model, seed]
        if not (first.index.is_unique and first.index.equals(second.index)):
            raise ResultError(f"{arm} and {other} saw different problems from {model} with seed {seed}")
        pairs.setdefault(model, {})[seed] = first.to_numpy(float) - second.to_numpy(float)
    return pairs


def _by_run(frame: pd.DataFrame, arm: str) -> dict[tuple[str, int], pd.Series]:
    """The outcomes of an arm by base and seed, each by problem."""
    rows = frame[frame["arm"] == arm]
    runs = rows[["model", "seed"]].drop_duplicates().astype({"model": str, "seed": int})
    by_run = {}
    for model, seed in zip(runs["model"], runs["seed"], strict=True):
        of_run = rows[(rows["model"] == model) & (rows["seed"] == seed)]
        by_run[model, seed] = of_run.set_index("problem")["value"].sort_index()
    return by_run


def chosen_rates(frame: pd.DataFrame, tolerance: float = 0.005) -> dict[tuple[str, str], float]:
    """The learning rate of each (experiment, arm): of those within `tolerance` of the best mean, the lowest.

    `frame` has the outcomes of a pilot on validation problems. Bases count equally.
    """
    by_base = frame.groupby(["experiment", "arm", "rate", "model"])["value"].mean()
    means = by_base.groupby(["experiment", "arm", "rate"]).mean().reset_index()
    chosen = {}
    for (experiment, arm), rates in means.groupby(["experiment", "arm"]):
        good = rates[rates["value"] >= rates["value"].max() - tolerance]
        chosen[str(experiment), str(arm)] = float(good["rate"].min())
    return chosen


def paired_spread(pairs: Differences) -> float:
    """The standard deviation of the differences between pairs, each averaged over problems."""
    means = [values.mean() for of_base in pairs.values() for values in of_base.values()]
    return float(np.std(means, ddof=1))
