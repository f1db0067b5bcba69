"""A measurement: points timed in turn in one process, so that their ratios hold whatever else the machine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl.measure import peak_memory_bytes, reset_peak_memory
from qerl.progress import track


@dataclass
class Point:
    """One thing to time. `measure` runs it once and returns its figures; `label` is what the table shows of it."""

    label: dict[str, Any]
    make: Callable[[], Callable[[int], dict[str, Any]]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    status: str = "ok"


def run_points(points: Sequence[Point], repeats: int) -> list[Point]:
    """Time every point `repeats` times, round by round, after a round that warms up and isn't kept.

    A point that runs out of memory stays in the list with that status.
    """
    measures = {id(point): point.make() for point in points}
    rounds = [(round_, point) for round_ in range(repeats + 1) for point in points]
    for round_, point in track(rounds, len(rounds), "measurements"):
        if point.status == "ok":
            _measure(point, measures[id(point)], round_)
    return list(points)


def _measure(point: Point, measure: Callable[[int], dict[str, Any]], round_: int) -> None:
    reset_peak_memory()
    try:
        figures = measure(round_)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        point.status = "out of memory"
        return
    point.peak_memory_bytes = max(point.peak_memory_bytes, peak_memory_bytes())
    if round_ > 0:
        point.samples.append(figures)
