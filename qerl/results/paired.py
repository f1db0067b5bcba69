"""Paired comparisons of arms: hierarchical intervals, Holm's correction, equivalence, power.

docs/exploration-protocol.md states what is compared and what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qerl.results.intervals import Interval

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
