"""The job of a training run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from qerl.host.imports import OPTIONAL
from qerl.host.nodes import own_lock
from qerl.jobs.base import Job, Lock, Part
from qerl.settings.run import UNDECIDING, RunSettings


class HubBase(Part):
    """A base of the hub: its repository and commit."""

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
    """The values of the grid, by dotted key."""
    settings: RunSettings
    on_failure: Literal["stop", "row"]
    """With `row`, running out of memory or over the time limit is a result."""
    time_limit: float | None
    """Hours."""
    base: HubBase | None
    """The repository of a base that is used unchanged from the hub; None for a base that a job made."""
    checkpoint: Path
    data: Path
    work: Path
    tracked: Path
    """The folder in which trackers keep their records."""
    followed: Path | None
    """The metrics.jsonl of the run whose entropy the temperature follows."""

    @property
    def gpus(self) -> int:
        """The number of GPUs of its processes on this machine or of its engine."""
        return self.settings.gpus_of_node

    @property
    def joins_free_memory(self) -> bool:
        """As its settings say."""
        return self.settings.joins_free_memory

    @property
    def lock(self) -> Lock:
        """A lock of the work folder: a training survives a killed Snakemake, and a second would write the same
        files. Of several machines, which may share the folder, each has its own; so has each process of torchrun.
        """
        return Lock(self.work, own_lock(self.settings.nodes))

    @property
    def undeciding(self) -> Any:
        """Settings that decide no result. A time limit decides one only if exceeding it is a result."""
        fields: dict[str, Any] = {"settings": UNDECIDING, "on_failure": True, "tracked": True}
        return fields if self.on_failure == "row" else fields | {"time_limit": True}
