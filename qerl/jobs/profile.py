"""Jobs of a configuration's benches of time and memory (the rule `profile`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from qerl.host.imports import OPTIONAL
from qerl.jobs.base import Job, Part
from qerl.settings.benches import RolloutBench, StepBench
from qerl.settings.run import UNDECIDING_OF_STEPS, RunSettings


class RolloutJob(Job):
    """Measure rollout throughput by weight format and LoRA rank."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["rollout"] = "rollout"
    bench: str
    settings: RolloutBench
    checkpoints: dict[str, Path]
    """By weight format."""

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus


class TimedRun(Part):
    """A run whose single steps are timed."""

    id: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings
    checkpoint: Path
    data: Path


class StepJob(Job):
    """Measure the time of a training step of several runs."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["step"] = "step"
    bench: str
    settings: StepBench
    runs: list[TimedRun]

    @property
    def gpus(self) -> int:
        """The most GPUs of any run's engine; each run is timed in one process, even if it trains in several."""
        return max(run.settings.rollout.engine_gpus for run in self.runs)

    @property
    def undeciding(self) -> Any:
        """Settings that decide neither a run nor the cost of its steps."""
        return {"runs": {"__all__": {"settings": UNDECIDING_OF_STEPS}}}
