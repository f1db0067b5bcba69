"""Jobs of the regression gates."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qerl.jobs.base import Job
from qerl.settings.benches import GateSettings


class NumericsJob(Job):
    """Compare codecs and graders with stored vectors."""

    kind: Literal["numerics"] = "numerics"
    vectors: Path


class SpeedJob(Job):
    """Time this code alternately with that of the machine's baseline."""

    kind: Literal["speed"] = "speed"
    checkpoint: Path
    baselines: Path
    key: str
    """A hash of the workload."""
    rounds: int
    """The number of rounds, in each of which both are timed."""

    @property
    def gpus(self) -> int:
        """One GPU, if the machine has any."""
        return 1


class VerdictJob(Job):
    """Judge all gates."""

    kind: Literal["verdict"] = "verdict"
    settings: GateSettings
    key: str
    """A hash of the workload."""
    results: list[Path]
    """Results of the workload's rules."""
