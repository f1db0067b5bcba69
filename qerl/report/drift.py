"""The drift of runs: whether KL(sampler || trainer) grows over a run's steps.

Steps of a run aren't independent, so intervals come from the means of consecutive blocks of steps, which nearly are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from qerl.results.paths import KEY
from qerl.results.statistics import LEVEL, Interval
from qerl.results.store import ResultError
from qerl.settings.workflow import DRIFT_BLOCKS

#: The column of metrics.jsonl that is examined, in nats per token.
KL = "mismatch/kl"
#: The most steps of the first and of the last window, which are cut into half as many blocks as the run.
WINDOW = 100

Values = npt.NDArray[np.floating[Any]]
Verdict = Literal["no drift", "drift", "undecided"]


def drift(metrics: pd.DataFrame) -> pd.DataFrame:
    """One row per run: KL and entropy in the first and the last window, their change, the slope, and the verdict.

    `metrics` has one row per step (`qerl.results.readers.load_metrics`). Raises ResultError for a run with fewer steps
    than blocks.
    """
    groups = metrics.groupby(["run", *KEY, "seed"], sort=False)
    return pd.DataFrame(
        [dict(zip([*KEY, "seed"], key[1:], strict=True)) | _row(str(key[0]), run) for key, run in groups]
    )


def _row(name: str, run: pd.DataFrame) -> dict[str, Any]:
    ordered = run.sort_values("step")
    kl, entropy = ordered[KL].to_numpy(float), ordered["entropy"].to_numpy(float)
    if len(kl) < DRIFT_BLOCKS:
        raise ResultError(f"run {name!r} has {len(kl)} steps; its drift needs at least {DRIFT_BLOCKS}")
    window = min(WINDOW, len(kl) // 2)
    slope = slope_per_step(kl)
    return {
        "steps": len(kl),
        "entropy_first": entropy[:window].mean(),
        "entropy_last": entropy[-window:].mean(),
        "kl_first": kl[:window].mean(),
        "kl_last": kl[-window:].mean(),
        **_columns("kl_change", change(kl[:window], kl[-window:])),
        **_columns("kl_slope", slope, 1000),
        "verdict": verdict(kl[:window].mean(), slope, len(kl)),
    }


def slope_per_step(values: Values) -> Interval:
    """The least-squares slope of a run's values [steps], with Student's t interval from the means of its blocks."""
    blocks = np.array_split(values, DRIFT_BLOCKS)
    ends = np.cumsum([len(block) for block in blocks])
    middles = [end - (len(block) + 1) / 2 for end, block in zip(ends, blocks, strict=True)]
    (slope, _), covariance = np.polyfit(middles, _means(blocks), 1, cov=True)
    half = stats.t.ppf((1 + LEVEL) / 2, DRIFT_BLOCKS - 2) * np.sqrt(covariance[0, 0])
    return Interval(float(slope), float(slope - half), float(slope + half))


def change(first: Values, last: Values) -> Interval:
    """The mean of the last window's values less that of the first one's, with Welch's interval of their blocks."""
    before, after = (_means(np.array_split(values, DRIFT_BLOCKS // 2)) for values in (first, last))
    interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(LEVEL)
    return Interval(float(np.mean(after) - np.mean(before)), float(interval.low), float(interval.high))


def verdict(first: float, slope: Interval, steps: int) -> Verdict:
    """What a run shows, by the interval of its slope and the KL of its first window.

    A run has no drift if its KL rises by no more than the KL of the first window over all steps, at the upper end of
    the interval. Else it drifts if the lower end is above 0.
    """
    if slope.high * steps <= first:
        return "no drift"
    return "drift" if slope.low > 0 else "undecided"


def _means(blocks: Sequence[Values]) -> list[float]:
    return [float(block.mean()) for block in blocks]


def _columns(measure: str, interval: Interval, factor: float = 1.0) -> dict[str, float]:
    ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
    return {f"{measure}{end}": factor * value for end, value in ends.items()}
