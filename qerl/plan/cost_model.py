"""GPU-hours of a plan: tokens over measured speeds, or estimates if no speed was measured.

Hours are upper limits, because every completion counts at its longest. Starting, loading, compiling and quantization,
which take minutes per job, are not counted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qerl.settings.base import ConfigError

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
#: Measured tokens/s of one device, by machine, model (its name in the configuration), weights and batch. A row may have
#: only one of the two rates; an update's rate applies to runs with the same `gradient_checkpointing`.
SPEEDS = REFERENCE / "speeds.csv"
#: Gigabytes (1e9 bytes) of a checkpoint.
SIZES = REFERENCE / "sizes.csv"
#: Numbers of test problems of the hub's data sets.
PROBLEMS = REFERENCE / "problems.csv"
UNMEASURED = "unmeasured"

#: Dense bf16 FLOP/s of one device, by its data sheet.
PEAK_FLOPS = {"h200": 989e12, "h100": 989e12}
#: Bytes of a device's memory, as PyTorch reports them.
MEMORY = {"h200": 139.8 * 2**30, "h100": 79.1 * 2**30}
#: The share of this peak that estimates assume for an update.
UTILIZATION = 0.4
#: FLOPs per parameter and token of an update: forward and backward; gradient checkpointing adds one forward pass.
FLOPS, FLOPS_CHECKPOINTING = 6, 8
#: Formats without measured rollouts, and the format whose rates replace them, because both use the same kernels.
STAND_IN = {"mxfp4": "nvfp4"}
ASSUMED = (
    "Rollouts run at the best measured rate among batches that aren't larger, of any model and training. Time per "
    "token grows with the parameters, but doesn't shrink for smaller models; MXFP4 counts as NVFP4. "
    f"Updates take {FLOPS} operations per parameter and token ({FLOPS_CHECKPOINTING} with gradient checkpointing) at "
    f"{UTILIZATION:.0%} of the device's bf16 peak."
)


@dataclass(frozen=True)
class Hours:
    """GPU-hours from measured speeds and from estimates; NaN if there is no basis for an estimate."""

    measured: float = 0.0
    estimated: float = 0.0

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.measured + other.measured, self.estimated + other.estimated)

    def __str__(self) -> str:
        """Text such as "9.8 + ~120", where ~ marks an estimate."""
        measured = [_rounded(self.measured)] if self.measured else []
        if math.isnan(self.estimated):
            return " + ".join([*measured, UNMEASURED])
        return " + ".join([*measured, *([f"~{_rounded(self.estimated)}"] if self.estimated else [])]) or "0"


def _rounded(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}"


def total(hours: Iterable[Hours]) -> Hours:
    """The sum of several hours."""
    return sum(hours, Hours())


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """The most work that a job may do."""

    model: str
    weights: str
    method: str
    """`full`, `lora`, or `none` for a base."""
    rank: int
    sequences: int
    """Completions that are drawn together on one GPU."""
    drawn: float
    """Tokens of all completions; NaN if unknown."""
    trained: float = 0
    """Tokens that updates read, each pass counted."""
    gradient_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A row of speeds.csv."""

    model: str
    weights: str
    method: str
    rank: int
    engine: str
    sequences: int
    gradient_checkpointing: bool
    rate: float
    """Tokens/s of the rollout or the update."""


class Costs:
    """The speeds of one machine."""

    def __init__(self, machine: str) -> None:
        measured = _rows(SPEEDS)
        known = sorted({*(row["machine"] for row in measured), *PEAK_FLOPS})
        if machine not in known:
            raise ConfigError(f"there are no speeds of the machine {machine!r}; use one of {', '.join(known)}")
        rows = [row for row in measured if row["machine"] == machine]
        self._rollouts, self._updates = (
            [_speed(row, phase) for row in rows if row[f"{phase}_tokens_per_second"]] for phase in ("rollout", "update")
        )
        self._peak = PEAK_FLOPS.get(machine, math.nan)
        self._parameters = {
            row["model"]: float(row["gigabytes"]) * 1e9 / 2 for row in _rows(SIZES) if row["weights"] == "bf16"
        }

    def rollout(self, work: PlannedWork) -> Hours:
        """Hours of the completions."""
        speed = self.measured_rollout(work)
        if speed is not None and not math.isnan(work.drawn):
            return Hours(measured=_hours(work.drawn, speed.rate))
        return Hours(estimated=_hours(work.drawn, self._rollout_rate(work)))

    def update(self, work: PlannedWork) -> Hours:
        """Hours of the updates."""
        speed = _nearest(work, [s for s in self._updates if s.gradient_checkpointing == work.gradient_checkpointing])
        if speed is not None:
            return Hours(measured=_hours(work.trained, speed.rate))
        return Hours(estimated=_hours(work.trained, self._update_rate(work)))

    def measured_rollout(self, work: PlannedWork) -> Speed | None:
        """The measured speed that gives the hours of rollouts, or None."""
        return _nearest(work, self._rollouts)

    def _rollout_rate(self, work: PlannedWork) -> float:
        speeds = [s for s in self._rollouts if s.sequences <= work.sequences and s.model in self._parameters]
        same = [s for s in speeds if s.weights == work.weights]
        alike = same or [s for s in speeds if s.weights == STAND_IN.get(work.weights)]
        size = self._parameters.get(work.model)
        rates = (s.rate * min(1.0, self._parameters[s.model] / size) for s in alike) if size else ()
        return max(rates, default=math.nan)

    def _update_rate(self, work: PlannedWork) -> float:
        flops = FLOPS_CHECKPOINTING if work.gradient_checkpointing else FLOPS
        return UTILIZATION * self._peak / (flops * self._parameters.get(work.model, math.nan))


def _nearest(work: PlannedWork, speeds: Iterable[Speed]) -> Speed | None:
    """The measured speed of this model, weight format and training with the nearest rank and the largest fitting batch.

    No batch larger than the job's is used: a larger batch has a higher rate, and hours must stay upper limits.
    """
    same = [
        speed
        for speed in speeds
        if (speed.model, speed.weights, speed.method) == (work.model, work.weights, work.method)
        and speed.sequences <= work.sequences
    ]
    return min(same, key=lambda speed: (abs(speed.rank - work.rank), -speed.sequences), default=None)


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist: only the repository has measured speeds; run in a clone of it")
    with file.open(newline="") as rows:
        return list(csv.DictReader(rows))


def _speed(row: dict[str, str], phase: str) -> Speed:
    rate = float(row[f"{phase}_tokens_per_second"])
    checkpointing = row["gradient_checkpointing"]
    if phase == "update" and checkpointing not in ("true", "false"):
        raise ConfigError(
            f"{SPEEDS.name}: the update of {row['source']!r} doesn't say gradient_checkpointing true or false"
        )
    return Speed(
        model=row["model"],
        weights=row["weights"],
        method=row["method"],
        rank=int(row["rank"]),
        engine=row["engine"],
        sequences=int(row["sequences"]),
        gradient_checkpointing=checkpointing == "true",
        rate=rate,
    )


def problem_counts() -> dict[str, int]:
    """The number of test problems of each data set of the hub."""
    return {row["repo"]: int(row["problems"]) for row in _rows(PROBLEMS)}


def _hours(tokens: float, rate: float) -> float:
    return tokens / rate / 3600 if tokens else 0.0
