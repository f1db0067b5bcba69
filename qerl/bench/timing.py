"""Timing of points in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from qerl.host.profiling import free_memory, peak_memory_bytes, reset_peak_memory
from qerl.host.progress import track
from qerl.results.schema.stored import NO_MEMORY

T = TypeVar("T")


@dataclass
class Point:
    """One combination to time. `make` returns a function that runs a round and returns its figures.

    `label` identifies the point in results.
    """

    label: dict[str, Any]
    make: Callable[[], Callable[[int], dict[str, Any]]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    status: str = "ok"


def run_points(points: Sequence[Point], repeats: int, interleave: bool = True) -> list[Point]:
    """Time every point `repeats` times, after one untimed warm-up.

    With `interleave`, all points are in memory and timed round by round; otherwise one after another, each alone in
    memory. A point that runs out of memory stays in the list with that status.
    """
    for group in [list(points)] if interleave else [[point] for point in points]:
        _run_together(group, repeats)
        free_memory()  # a policy's modules refer to each other in cycles
    return list(points)


def _run_together(points: Sequence[Point], repeats: int) -> None:
    measures = {id(point): _tried(point, point.make) for point in points}
    rounds = [(round_, point) for round_ in range(repeats + 1) for point in points]
    for round_, point in track(rounds, len(rounds), "measurements"):
        measure = measures[id(point)]
        if measure is not None and point.status == "ok":
            _measure(point, measure, round_)


def _measure(point: Point, measure: Callable[[int], dict[str, Any]], round_: int) -> None:
    reset_peak_memory()
    figures = _tried(point, lambda: measure(round_))
    if figures is None:
        return
    point.peak_memory_bytes = max(point.peak_memory_bytes, peak_memory_bytes())
    if round_ > 0:
        point.samples.append(figures)


def _tried(point: Point, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except (torch.cuda.OutOfMemoryError, MemoryError):
        point.status = NO_MEMORY
        return None
