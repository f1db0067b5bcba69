"""Outcomes of a study's runs, paired by base, seed and problem, and the intervals of their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from qerl.results.statistics import Interval, pass_at_k
from qerl.results.store import ResultError

# Paired comparisons of arms: hierarchical intervals and Holm's correction (docs/exploration-protocol.md).

_Floats = npt.NDArray[np.float64]
#: Differences of an outcome on the problems [problems], by base and seed.
Differences = Mapping[str, Mapping[int, _Floats]]

_DRAWS = 10_000
_CHUNK = 500
_SEED = 20261123
#: The level of tests.
LEVEL = 0.05


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two arms: its 95 % interval, the two-sided p value, and the numbers of bases and pairs."""

    interval: Interval
    p: float
    bases: int
    pairs: int


def paired_difference(differences: Differences) -> PairedDifference:
    """Hierarchical bootstrap of the mean difference over bases, seeds within a base, and problems.

    A draw takes bases with replacement, then seeds of each, then problems, the same ones for all. Bases count equally.
    The interval is the 2.5 and 97.5 percentile. p is twice the smaller share of draws at or beyond zero, with one draw
    added to each side, so that it is never 0.
    """
    cells = _cells(differences)
    generator = np.random.default_rng(_SEED)
    sizes = (min(_CHUNK, _DRAWS - done) for done in range(0, _DRAWS, _CHUNK))
    draws = np.concatenate([_draws(cells, size, generator) for size in sizes])
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = float(np.mean([of_base.mean() for of_base in cells]))
    beyond = min(np.sum(draws <= 0), np.sum(draws >= 0))
    p = min(1.0, 2 * (beyond + 1) / (_DRAWS + 1))
    return PairedDifference(Interval(mean, float(low), float(high)), float(p), len(cells), sum(map(len, cells)))


def _cells(differences: Differences) -> list[_Floats]:
    """The differences of each base, [seeds, problems]."""
    lengths = {values.shape for of_base in differences.values() for values in of_base.values()}
    if not differences or not all(differences.values()) or len(lengths) != 1:
        raise ValueError("differences need at least one base, a seed of each, and the same problems everywhere")
    return [np.array(list(of_base.values()), dtype=float) for of_base in differences.values()]


def _draws(cells: Sequence[_Floats], number: int, generator: np.random.Generator) -> _Floats:
    """Means of differences over drawn bases, seeds and problems, [number]."""
    problems = cells[0].shape[1]
    drawn = generator.integers(problems, size=(number, problems)) + problems * np.arange(number)[:, None]
    weights = np.bincount(drawn.ravel(), minlength=number * problems).reshape(number, problems) / problems
    of_seeds = [of_base @ weights.T for of_base in cells]  # [seeds, number] of each base
    bases = generator.integers(len(cells), size=(number, len(cells)))
    means = np.empty(bases.shape)
    for base, values in enumerate(of_seeds):
        rows, places = np.nonzero(bases == base)
        seeds = generator.integers(len(values), size=(len(rows), len(values)))
        means[rows, places] = values[seeds, rows[:, None]].mean(axis=1)
    return means.mean(axis=1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p values by Holm's step-down method: (m - i) p of the i-th smallest, never falling, at most 1."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


# Outcomes of a study's runs (`qerl.results.study_data`), paired by base, seed and problem.

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
