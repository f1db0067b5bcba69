"""The job of a training run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from qerl.host.imports import OPTIONAL
from qerl.jobs.base import Job, Lock, Part
from qerl.settings.run import UNDECIDING, RunSettings


class HubBase(Part):
    """A base as it lies on the hub."""

    name: str
    revision: str


class TrainJob(Job):
    """Train one run. A killed run continues from its last checkpoint in `work`."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["train"] = "train"
    id: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    """What the grid varies, by dotted key."""
    settings: RunSettings
    on_failure: Literal["stop", "row"]
    """`row`: out of memory and over the time limit are results."""
    time_limit: float | None
    """Hours."""
    base: HubBase | None
    """Where the run's base is the hub's as it is there; None for one made here."""
    checkpoint: Path
    data: Path
    work: Path
    followed: Path | None
    """The metrics.jsonl of the run whose entropy the temperature follows."""

    @property
    def gpus(self) -> int:
        """Those of its processes or of its engine."""
        return self.settings.gpus

    @property
    def lock(self) -> Lock:
        """A training survives a killed Snakemake, and a second one would write the same checkpoints."""
        return Lock(self.work, "lock")

    @property
    def undeciding(self) -> Any:
        """A time limit decides where a run that is over it is a result."""
        fields: dict[str, Any] = {"settings": UNDECIDING, "on_failure": True}
        return fields if self.on_failure == "row" else fields | {"time_limit": True}
