"""The job of an evaluation."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from qerl.host.imports import OPTIONAL
from qerl.jobs.base import Job, Part
from qerl.settings.evaluation import EvaluationSettings
from qerl.settings.rollout import UNDECIDING_OF_ENGINE


class PlannedPolicy(Part):
    """The description of a planned policy in its result: a base, or a run's policy."""

    eval: str
    model: str
    weights: str
    recipe: str
    pack_delta_nets: bool
    run: str | None
    arm: str | None
    experiment: str | None
    varied: dict[str, Any]


class StoredPolicy(Part):
    """The description of a committed adapter in its result. The gates evaluate it without training."""

    stored: str


class EvaluateJob(Job):
    """Score a base or a trained policy on every task."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["evaluate"] = "evaluate"
    policy: PlannedPolicy | StoredPolicy
    settings: EvaluationSettings
    checkpoint: Path
    trained: Path | None
    """The folder of a run's policy; None for a base."""
    data: dict[str, Path]

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus

    @property
    def undeciding(self) -> Any:
        """Settings of the engine's memory."""
        return {"settings": UNDECIDING_OF_ENGINE}
