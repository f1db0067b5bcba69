"""Ratios of points of the speed grid: the quotient of their medians, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qerl.report.formatting import weights_label
from qerl.results.intervals import ratio_interval
from qerl.results.schema.stored import OK

Row = dict[Any, Any]

NOT_MEASURED = "–"
DIFFERENT_MACHINES = "different machines"


def ratio(above: Row | None, below: Row | None) -> tuple[float | str, float, float]:
    """The ratio of two points' medians (None: not measured) and its interval, or the reason why there is none."""
    if above is None or below is None:
        return NOT_MEASURED, np.nan, np.nan
    for point in (above, below):
        if point["status"] != OK:
            return f"{_name(point)} {weights_label(point['weights'])}: {point['status']}", np.nan, np.nan
    if above["machine"] != below["machine"]:
        return DIFFERENT_MACHINES, np.nan, np.nan
    interval = ratio_interval(above["samples"], below["samples"])
    return interval.mean, interval.low, interval.high


def faster(points: Sequence[Row | None]) -> Row | None:
    """The fastest point that didn't fail. None if some point wasn't measured, because it may be faster."""
    measured = [point for point in points if point is not None]
    if len(measured) < len(points):
        return None
    return max((point for point in measured if point["status"] == OK), key=_speed, default=measured[0])


def stated(name: str, points: Iterable[Row | None]) -> str:
    """What the measured points have in a column of their stamp, such as `machine`, as text."""
    return ", ".join(dict.fromkeys(str(point[name]) for point in points if point is not None))


def _name(row: Row) -> str:
    return str(row["engine"] if "engine" in row else row["system"])


def _speed(point: Row) -> float:
    return float(point["tokens_per_second"])
