"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.floating[Any]]

LEVEL = 0.95
METHOD = (
    "95 % intervals: percentile bootstrap over problems (repeats averaged per problem); with two or more seeds, "
    "Student's t for the variation between seeds; differences are paired over problems"
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


def accuracy_interval(scores: Scores) -> Interval:
    """Accuracy of an arm and its interval, within [0, 1].

    `scores` [seeds, problems] has each problem's share of right repeats, with one row per evaluation. If all answers
    are right, or all wrong, resampling would give no uncertainty, so the interval is Wilson's.
    """
    _check(scores)
    mean = float(scores.mean())
    if mean in (0.0, 1.0):
        from scipy import stats  # a second of CPU time, which a table without intervals is spared

        problems = scores.shape[1]
        wilson = stats.binomtest(round(mean * problems), problems).proportion_ci(LEVEL, method="wilson")
        return Interval(mean, float(wilson.low), float(wilson.high))
    interval = _interval(scores)
    return Interval(interval.mean, max(interval.low, 0.0), min(interval.high, 1.0))


def difference_interval(scores: Scores, base: Scores) -> Interval:
    """Accuracy of an arm minus that of an untrained base, paired over problems.

    scores: float [seeds, problems]; base: float [problems], the same problems in the same order.
    """
    if base.shape != scores.shape[1:]:
        raise ValueError(f"scores of shape {scores.shape} can't be paired with a base of shape {base.shape}")
    return _interval(scores - base)


def mean_interval(values: Scores) -> Interval:
    """Mean over problems of a measure that isn't an accuracy, and its interval. values: float [problems]."""
    return _interval(values[None])


def average_interval(sets: Sequence[Scores], bases: Sequence[Scores] | None = None) -> Interval:
    """Mean of the accuracies on several data sets with equal weights, minus that of `bases` if given.

    sets: float [seeds, problems], the same seeds in the same order; bases: float [problems], likewise paired.
    """
    return _interval(*(sets if bases is None else [scores - base for scores, base in zip(sets, bases, strict=True)]))


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


def _interval(*sets: Scores) -> Interval:
    """Hierarchical bootstrap of the mean of [seeds, problems], or of the mean over several of these.

    Problems are resampled with replacement, the same ones for every seed. Each draw adds a seed effect: Student's t
    with seeds - 1 degrees of freedom, times the standard error between the seeds' means. Resampling the seeds instead
    is too narrow for a handful of them. In a simulation of three seeds that differ by 6 (12) points it covers 88 % (79
    %), and this interval 97 % (95 %). With one seed, the interval leaves out the variation between seeds.
    """
    for scores in sets:
        _check(scores)
    generator = np.random.default_rng(_SEED)
    draws = np.mean([_draws(scores.mean(axis=0), generator) for scores in sets], axis=0)
    per_seed = np.mean([scores.mean(axis=1) for scores in sets], axis=0)
    seeds = len(per_seed)
    if seeds > 1:
        error = per_seed.std(ddof=1) / np.sqrt(seeds)
        draws = draws + error * generator.standard_t(seeds - 1, size=_DRAWS)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(per_seed.mean()), float(low), float(high))


def _draws(per_problem: Scores, generator: np.random.Generator) -> Scores:
    """Means of resampled problems, [draws]."""
    return np.concatenate([_resampled_means(per_problem, generator) for _ in range(_DRAWS // _CHUNK)])


def _resampled_means(values: Scores, generator: np.random.Generator) -> Scores:
    return values[generator.integers(len(values), size=(_CHUNK, len(values)))].mean(axis=1)


def _check(scores: Scores) -> None:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores must be [seeds, problems] with at least one of each, not of shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores contain a value that is not finite: a problem lacks the answer of a seed")
