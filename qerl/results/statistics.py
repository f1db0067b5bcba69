"""95 % intervals of accuracies, ratios and paired differences, Holm's correction, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# 95 % intervals of accuracies and of their differences.

Scores = npt.NDArray[np.floating[Any]]

LEVEL = 0.95
METHOD = (
    "95 % intervals: Wilson's with the effective number of problems (repeats averaged per problem); paired differences "
    "by the squared distances of such intervals of the gains and the losses; with two or more seeds, Student's t for "
    "the variation between seeds"
)

_DRAWS = 10_000
_CHUNK = 1_000
_SEED = 20251013


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95 % interval, in the unit of the scores."""

    mean: float
    low: float
    high: float

    def columns(self, measure: str, factor: float = 1.0) -> dict[str, float]:
        """The interval times `factor` as the columns `measure`, `measure`_low and `measure`_high."""
        return {f"{measure}{end}": factor * value for end, value in zip(ENDS, vars(self).values(), strict=True)}


#: The ends of the names of an interval's columns.
ENDS = ("", "_low", "_high")


@dataclass(frozen=True)
class _SetMean:
    """The mean over the problems of one data set, and the distances from it to the ends of its interval."""

    mean: float
    below: float
    above: float


def accuracy_interval(scores: Scores) -> Interval:
    """Accuracy of an arm and its interval, within [0, 1].

    `scores` [seeds, problems] has each problem's share of right repeats, with one row per evaluation. With one seed and
    one repeat the interval is Wilson's, with Student's t in place of the normal distribution unless all answers are
    right or all wrong.
    """
    return average_interval([scores])


def difference_interval(scores: Scores, base: Scores) -> Interval:
    """Accuracy of an arm minus the accuracy of an untrained base, paired over problems, within [-1, 1].

    scores: float [seeds, problems]; base: float [problems], the same problems in the same order. Where all problems
    agree, the interval is as wide as for no gain and no loss in so many problems.
    """
    if base.shape != scores.shape[1:]:
        raise ValueError(f"scores of shape {scores.shape} can't be paired with a base of shape {base.shape}")
    return average_interval([scores], [base])


def mean_interval(values: Scores) -> Interval:
    """Mean over problems of a measure that isn't an accuracy, and its interval. values: float [problems].

    The interval is a percentile bootstrap over the problems. Its ends are NaN for one problem.
    """
    if len(values) < 2:
        return Interval(float(values.mean()), np.nan, np.nan)
    generator = np.random.default_rng(_SEED)
    draws = [
        values[generator.integers(len(values), size=(_CHUNK, len(values)))].mean(axis=1)
        for _ in range(_DRAWS // _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(draws), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def seeds_interval(values: Sequence[float]) -> Interval:
    """Mean over seeds of any measure, by Student's t. The ends are NaN for one seed, which has no spread."""
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Interval(mean, np.nan, np.nan)
    half = _quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def average_interval(sets: Sequence[Scores], bases: Sequence[Scores] | None = None) -> Interval:
    """Mean of the accuracies on several data sets with equal weights, minus the mean of `bases` if given.

    sets: float [seeds, problems], the same seeds in the same order; bases: float [problems] or
    [seeds, problems], likewise paired.
    """
    for scores in sets:
        _check(scores)
    if bases is None:
        return _interval([_accuracy(scores.mean(axis=0)) for scores in sets], sets, lowest=0.0)
    gains = [scores - base for scores, base in zip(sets, bases, strict=True)]
    return _interval([_difference(gain.mean(axis=0)) for gain in gains], gains, lowest=-1.0)


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Ratio of the medians of two lists of repeats. Its ends are NaN if either list has only one repeat.

    The interval is a percentile bootstrap over the repeats of each. With few repeats it spans little more than their
    range.
    """
    if min(len(above), len(below)) < 2:
        return Interval(float(np.median(above) / np.median(below)), np.nan, np.nan)
    return _bootstrap((above, below), _ratio_of_medians)


def paired_ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Median of the ratios of paired times. The times of a pair were measured in consecutive turns.

    Other load slows both times of a pair and leaves their ratio, and one disturbed round leaves the median. The
    interval is a percentile bootstrap over the pairs.
    """
    if len(above) != len(below) or len(above) == 0:
        raise ValueError(f"times must come in pairs, not {len(above)} and {len(below)}")
    ratios = np.asarray(above) / np.asarray(below)
    if len(ratios) < 2:
        return Interval(float(ratios[0]), float(ratios[0]), float(ratios[0]))
    return _bootstrap((ratios,), np.median)


def _ratio_of_medians(above: Scores, below: Scores, axis: int) -> Scores:
    return np.median(above, axis=axis) / np.median(below, axis=axis)


def _bootstrap(samples: tuple[npt.ArrayLike, ...], statistic: Callable[..., Scores]) -> Interval:
    """A statistic of independent samples with its percentile interval."""
    from scipy import stats

    generator = np.random.default_rng(_SEED)
    bootstrapped = stats.bootstrap(
        samples, statistic, n_resamples=_DRAWS, confidence_level=LEVEL, method="percentile", rng=generator
    )
    low, high = bootstrapped.confidence_interval
    return Interval(float(statistic(*map(np.asarray, samples), axis=-1)), float(low), float(high))


def _interval(parts: Sequence[_SetMean], sets: Sequence[Scores], lowest: float) -> Interval:
    """The mean of the parts, whose ends are combined with the variation between seeds, within [`lowest`, 1].

    Distances to ends of independent errors add up in squares (Zou and Donner's MOVER). The error of the seeds is the
    standard error of their means times the quantile of Student's t with seeds - 1 degrees of freedom. With one seed,
    the interval leaves out the variation between seeds.
    """
    per_seed = np.mean([scores.mean(axis=1) for scores in sets], axis=0)
    seeds, mean = len(per_seed), float(per_seed.mean())
    of_seeds = _quantile(seeds - 1) * per_seed.std(ddof=1) / np.sqrt(seeds) if seeds > 1 else 0.0
    below, above = (
        np.hypot(np.linalg.norm([getattr(part, side) for part in parts]) / len(parts), of_seeds)
        for side in ("below", "above")
    )
    return Interval(mean, max(float(mean - below), lowest), min(float(mean + above), 1.0))


def _accuracy(shares: Scores) -> _SetMean:
    """Wilson's interval with the effective number of problems. shares: float [problems], within [0, 1].

    The effective number is n problems over the design effect: the variance of the shares over m (1 - m), which is that
    of single answers with the same mean m. The design effect is hardly known where few problems are right, or few
    wrong. So it is drawn to 1, at which each problem is always or never solved, with the weight of one problem. From 30
    problems on, simulated coverage is 93 % or more at rates of 2 to 98 %, whatever the difficulties. At single rates
    Wilson's own interval covers 92 %, such as 3.3 % of 30 problems with one answer each.
    """
    problems, mean = len(shares), float(shares.mean())
    binary = mean * (1 - mean)
    if min(mean, 1 - mean) <= 1e-12:  # which a mean of equal shares may miss by a rounding
        effective, quantile = float(problems), _quantile(np.inf)
    else:
        effective = problems * (problems * binary + 1) / (problems * float(shares.var()) + 1)
        quantile = _quantile(max(problems - 1, 1))
    ratio = quantile**2 / effective
    center = (mean + ratio / 2) / (1 + ratio)
    half = np.sqrt(ratio * (binary + ratio / 4)) / (1 + ratio)
    return _SetMean(mean, float(mean - center + half), float(center + half - mean))


def _difference(gains: Scores) -> _SetMean:
    """Mean gain less mean loss. gains: float [problems], within [-1, 1].

    The distances to the ends of gain and loss are added in squares, with the correlation of the two, as a problem has a
    gain or a loss.
    """
    gained, lost = np.clip(gains, 0, None), np.clip(-gains, 0, None)
    gain, loss = _accuracy(gained), _accuracy(lost)
    spread = float(gained.std() * lost.std())
    correlation = -gain.mean * loss.mean / spread if spread else 0.0

    def distance(one: float, other: float) -> float:
        return float(np.sqrt(one**2 + other**2 - 2 * correlation * one * other))

    return _SetMean(gain.mean - loss.mean, distance(gain.below, loss.above), distance(gain.above, loss.below))


def _quantile(freedom: float) -> float:
    """The upper end of the central 95 % of Student's t; of the normal distribution at infinite degrees of freedom."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + LEVEL) / 2))


def _check(scores: Scores) -> None:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores must be [seeds, problems] with at least one of each, not of shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores contain a value that is not finite: a problem lacks the answer of a seed")
    if scores.min() < 0 or scores.max() > 1:
        raise ValueError("scores must be shares of right answers, between 0 and 1")


# Paired comparisons of a study's arms: hierarchical intervals and Holm's correction (docs/exploration-protocol.md).

#: Differences of an outcome on the problems [problems], by base and seed.
Differences = Mapping[str, Mapping[int, Scores]]

#: The level of tests.
ALPHA = 0.05
_PAIRED_CHUNK = 500
_PAIRED_SEED = 20261123


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
    arrays = [values for of_base in differences.values() for values in of_base.values()]
    alike = len({values.shape for values in arrays}) == 1 and np.isfinite(arrays).all()  # p of NaN would be the least
    if not differences or not all(differences.values()) or not alike:
        raise ValueError(
            "differences need at least one base, a seed of each, and numbers of the same problems everywhere"
        )
    cells = [np.array(list(of_base.values()), dtype=float) for of_base in differences.values()]  # [seeds, problems]
    generator = np.random.default_rng(_PAIRED_SEED)
    sizes = (min(_PAIRED_CHUNK, _DRAWS - done) for done in range(0, _DRAWS, _PAIRED_CHUNK))
    draws = np.concatenate([_draws(cells, size, generator) for size in sizes])
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = float(np.mean([of_base.mean() for of_base in cells]))
    beyond = min(np.sum(draws <= 0), np.sum(draws >= 0))
    p = min(1.0, 2 * (beyond + 1) / (_DRAWS + 1))
    return PairedDifference(Interval(mean, float(low), float(high)), float(p), len(cells), sum(map(len, cells)))


def _draws(cells: Sequence[Scores], number: int, generator: np.random.Generator) -> Scores:
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


#: The values of k in results, if a problem has at least k completions.
KS = (1, 8, 64)


def pass_at_k(right: npt.ArrayLike, completions: int, k: int) -> npt.NDArray[np.float64]:
    """The unbiased estimate for each problem, of whose `completions` `right` are right.

    It is 1 - C(n - c, k) / C(n, k) for c right ones of n (arXiv 2107.03374, Eq. 1), as a product without factorials.
    """
    counts = np.asarray(right, dtype=np.int64)
    if not 1 <= k <= completions or np.any((counts < 0) | (counts > completions)):
        raise ValueError(f"pass@{k} needs at least {k} completions and as many right ones at most, not {completions}")
    drawn = np.arange(k)
    # The probability that all k drawn completions are wrong, as a product over draws without replacement.
    wrong = np.clip(completions - counts[..., None] - drawn, 0, None) / (completions - drawn)
    return np.asarray(1 - wrong.prod(axis=-1))
