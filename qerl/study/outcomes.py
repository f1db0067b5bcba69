"""Outcomes of a study's runs, paired by base, seed and problem, and the verdict by the rules of the protocol."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from qerl.results.statistics import Interval, pass_at_k
from qerl.results.store import ResultError

# Paired comparisons of arms: hierarchical intervals, Holm's correction, equivalence, power.
#
# docs/exploration-protocol.md states what is compared and what follows from it.

_Floats = npt.NDArray[np.float64]
#: Differences of an outcome on the problems [problems], by base and seed.
Differences = Mapping[str, Mapping[int, _Floats]]

_DRAWS = 10_000
_CHUNK = 500
_SEED = 20261123


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


def pairs_needed(spread: float, effect: float, level: float = 0.05, power: float = 0.8) -> int:
    """Pairs by which a two-sided paired t test finds `effect` with `power`, if pairs differ by `spread` (SD)."""
    if spread <= 0 or effect <= 0:
        raise ValueError("power needs a spread and an effect above 0")
    for pairs in range(2, 10_000):
        if _power(spread, effect, pairs, level) >= power:
            return pairs
    raise ValueError(f"an effect of {effect} at a spread of {spread} needs over 10,000 pairs")


def effect_found(spread: float, pairs: int, level: float = 0.05, power: float = 0.8) -> float:
    """The effect that a two-sided paired t test finds in `pairs` with `power`, if pairs differ by `spread` (SD)."""
    from scipy.optimize import brentq

    if spread <= 0 or pairs < 2:
        raise ValueError("power needs a spread above 0 and two pairs")
    return float(brentq(lambda effect: _power(spread, effect, pairs, level) - power, 1e-6 * spread, 100 * spread))


def _power(spread: float, effect: float, pairs: int, level: float) -> float:
    from scipy import stats

    noncentrality = effect / spread * math.sqrt(pairs)
    critical = stats.t.ppf(1 - level / 2, pairs - 1)
    above, below = stats.nct.sf(critical, pairs - 1, noncentrality), stats.nct.cdf(-critical, pairs - 1, noncentrality)
    return float(above + np.nan_to_num(below))  # scipy has NaN for a tail too small to compute


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


# The verdict of config/exploration.yaml by the rules of docs/exploration-protocol.md.

#: Primary comparisons: an arm less another one. The numbers of the protocol's arms stand beside them.
PRIMARY: dict[str, tuple[str, str]] = {
    "2-1": ("nvfp4", "bf16"),
    "2-3": ("nvfp4", "bf16-thermostat"),
    "5-2": ("nvfp4-aqn", "nvfp4"),
    "5-9": ("nvfp4-aqn", "nvfp4-thermostat"),
    "8-1": ("bf16-aqn", "bf16"),
}
#: Comparisons that tell a gain of noise from a correction of its mismatch.
MISMATCH: dict[str, tuple[str, str]] = {
    "6-2": ("nvfp4-aqn-truncated", "nvfp4"),
    "7-2": ("nvfp4-aqn-consistent", "nvfp4"),
}
#: Comparisons of the other arms, each with the arm that it varies. They explain and decide nothing.
SECONDARY: dict[str, tuple[str, str]] = {
    "4-1": ("bf16-random", "bf16"),
    "2-4": ("nvfp4", "bf16-random"),
    "6-5": ("nvfp4-aqn-truncated", "nvfp4-aqn"),
    "7-5": ("nvfp4-aqn-consistent", "nvfp4-aqn"),
    "10a-5": ("nvfp4-aqn-completion", "nvfp4-aqn"),
    "10b-5": ("nvfp4-aqn-mlp", "nvfp4-aqn"),
    "12-1": ("mxfp4", "bf16"),
    "13-1": ("nf4", "bf16"),
}
#: The protocol's number of each arm.
NUMBERS: dict[str, str] = {
    "bf16": "1",
    "nvfp4": "2",
    "bf16-thermostat": "3",
    "bf16-random": "4",
    "nvfp4-aqn": "5",
    "nvfp4-aqn-truncated": "6",
    "nvfp4-aqn-consistent": "7",
    "bf16-aqn": "8",
    "nvfp4-thermostat": "9",
    "nvfp4-aqn-completion": "10a",
    "nvfp4-aqn-mlp": "10b",
    "nvfp4-placebo": "11",
    "mxfp4": "12",
    "nf4": "13",
    "paper-bf16": "14",
    "paper-nvfp4-aqn": "14",
}
#: Smallest effect of interest, as a fraction.
SMALLEST_EFFECT = 0.02
LEVEL = 0.05

Verdict = Literal["exploration", "recovers what quantization lost", "mismatch", "none", "undecided", "incomplete"]
#: The sentence that follows from each verdict.
SENTENCES: dict[Verdict, str] = {
    "exploration": "Exploration stands: the noise teaches more than a temperature that raises entropy as much",
    "recovers what quantization lost": "It recovers what quantization lost: noise helps quantized weights alone",
    "mismatch": "Mismatch: with the mismatch of sampler and trainer corrected, the gain is gone",
    "none": "None: all five differences lie within ±2 points",
    "undecided": "Undecided: no rule of the protocol applies",
    "incomplete": "Incomplete: a primary comparison has no pair of runs yet",
}


def compared(frame: pd.DataFrame) -> tuple[dict[str, PairedDifference], dict[str, float]]:
    """The comparisons of one outcome, and the p values of the primary ones after Holm's correction.

    `frame` has one experiment, data set and k (`outcomes`). Comparisons of arms that it lacks are
    left out. The family is always of five, and a missing comparison counts with a p value of 1.
    """
    pairs_of = {name: differences(frame, *pair) for name, pair in {**PRIMARY, **MISMATCH}.items()}
    comparisons = {name: paired_difference(pairs) for name, pairs in pairs_of.items() if pairs}
    adjusted = holm({name: comparisons[name].p if name in comparisons else 1.0 for name in PRIMARY})
    return comparisons, {name: p for name, p in adjusted.items() if name in comparisons}


def verdicts(
    comparisons: Mapping[str, PairedDifference], adjusted: Mapping[str, float], astray: Collection[str] = ()
) -> list[Verdict]:
    """The sentences that hold on one outcome, by the comparisons and their p values after Holm's correction.

    `comparisons` has the primary ones, and those of `MISMATCH` where they were run. Without a primary one the outcome
    is incomplete. A comparison with an arm of `astray`, which didn't have the entropy that it follows, supports no
    sentence.
    """
    if not comparisons.keys() >= PRIMARY.keys():
        return ["incomplete"]

    def above(name: str) -> bool:
        return holds(comparisons[name], adjusted[name]) and is_controlled(name, astray)

    holding: list[Verdict] = []
    if above("2-3") and above("5-9"):
        holding.append("exploration")
    if above("5-2") and not above("8-1"):
        holding.append("recovers what quantization lost")
    if above("5-2") and any(_gain_is_gone(comparisons, name) for name in MISMATCH):
        holding.append("mismatch")
    if all(is_nothing(comparisons[name]) and is_controlled(name, astray) for name in PRIMARY):
        holding.append("none")
    return holding or ["undecided"]


def is_controlled(name: str, astray: Collection[str]) -> bool:
    """Whether no arm of a comparison is among `astray`."""
    return not set(PRIMARY[name]) & set(astray)


def holds(difference: PairedDifference, adjusted: float) -> bool:
    """Whether a comparison holds: its estimate is above 0, and its p value after correction is below the level."""
    return difference.interval.mean > 0 and adjusted < LEVEL


def _gain_is_gone(comparisons: Mapping[str, PairedDifference], name: str) -> bool:
    """Whether the arm without mismatch lies no higher than the smallest effect above the arm without noise."""
    return name in comparisons and comparisons[name].interval.high < SMALLEST_EFFECT


def is_nothing(difference: PairedDifference) -> bool:
    """Whether an interval lies within the smallest effect of interest."""
    return difference.interval.low > -SMALLEST_EFFECT and difference.interval.high < SMALLEST_EFFECT
