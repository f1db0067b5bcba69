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

#: Differences of an outcome on the problems [problems], by base and seed.
Differences = Mapping[str, Mapping[int, npt.NDArray[np.float64]]]

_DRAWS = 10_000
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
    cells = [list(of_base.values()) for of_base in differences.values()]
    lengths = {cell.shape for of_base in cells for cell in of_base}
    if not cells or not all(cells) or len(lengths) != 1:
        raise ValueError("differences need at least one base, a seed of each, and the same problems everywhere")
    generator = np.random.default_rng(_SEED)
    draws = np.array([_draw(cells, generator) for _ in range(_DRAWS)])
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = float(np.mean([np.mean(of_base) for of_base in cells]))
    beyond = min(np.sum(draws <= 0), np.sum(draws >= 0))
    p = min(1.0, 2 * (beyond + 1) / (_DRAWS + 1))
    return PairedDifference(Interval(mean, float(low), float(high)), float(p), len(cells), sum(map(len, cells)))


def _draw(cells: Sequence[Sequence[npt.NDArray[np.float64]]], generator: np.random.Generator) -> float:
    weights = generator.multinomial(len(cells[0][0]), np.full(len(cells[0][0]), 1 / len(cells[0][0])))
    means = []
    for base in generator.integers(len(cells), size=len(cells)):
        seeds = cells[base]
        chosen = generator.integers(len(seeds), size=len(seeds))
        means.append(np.mean([seeds[seed] @ weights for seed in chosen]) / len(weights))
    return float(np.mean(means))


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
    from scipy import stats

    if spread <= 0 or effect <= 0:
        raise ValueError("power needs a spread and an effect above 0")
    for pairs in range(2, 10_000):
        noncentrality = effect / spread * math.sqrt(pairs)
        critical = stats.t.ppf(1 - level / 2, pairs - 1)
        beyond = stats.nct.sf(critical, pairs - 1, noncentrality) + stats.nct.cdf(-critical, pairs - 1, noncentrality)
        if beyond >= power:
            return pairs
    raise ValueError(f"an effect of {effect} at a spread of {spread} needs over 10,000 pairs")
