"""The shapes of the stored results, one class a kind of file; keys that tables don't need are ignored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from qerl.settings.evaluation import Harness
from qerl.settings.models import Recipe, WeightFormat
from qerl.settings.run import RunSettings

#: The status of a point that was measured; any other text is its error.
OK = "ok"


class Stored(BaseModel):
    """Base of all results."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Machine(Stored):
    """Where a result was measured; `label` is one line for captions."""

    label: str


class Provenance(Stored):
    """The part of a result's stamp that tables show; `dirty` is none where that isn't known.

    Code outside a git checkout has no `commit`, but a `version` and a hash of its `files`.
    """

    commit: str | None
    dirty: bool | None
    version: str = ""
    files: str = ""
    machine: Machine

    @property
    def columns(self) -> dict[str, str]:
        """The stamp as columns `machine` and `commit`."""
        return {"machine": self.machine.label, "commit": self._code}

    @property
    def _code(self) -> str:
        if self.commit is None:
            return f"version {self.version} (files {self.files})"
        return self.commit[:12] + (" (modified)" if self.dirty else "")


class Quartiles(Stored):
    """Median and quartiles of samples, in their unit."""

    median: float
    p25: float
    p75: float


class RunSummary(Stored):
    """What one training run took."""

    steps: int
    seconds: float
    peak_memory_bytes: float | None
    trainable_parameters: int
    weight_bytes: float
    rollout_tokens_per_second: float
    update_tokens_per_second: float
    step_seconds: Quartiles


class Run(Stored):
    """train/<run>/run.json; one that failed has its error as `status` and no summary."""

    run: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings
    summary: RunSummary | None = None
    status: str = OK
    provenance: Provenance

    @model_validator(mode="after")
    def _ok_has_a_summary(self) -> Run:
        if self.status == OK and self.summary is None:
            raise ValueError("a run with status ok needs a summary")
        return self


class Task(Stored):
    """The score of one data set; `task`: the harness's own that was asked, none: the prompt of training."""

    harness: Harness
    task: str | None = None
    problems: int
    repeats: int
    accuracy: float


class Evaluation(Stored):
    """evaluate/<eval>/result.json; `run` is none for an untrained base."""

    eval: str
    run: str | None
    model: str
    weights: WeightFormat
    recipe: Recipe = "rtn"
    arm: str | None
    experiment: str | None
    varied: dict[str, Any]
    tasks: dict[str, Task]
    provenance: Provenance


class Quantization(Stored):
    """quantize/<checkpoint>/report.json; `relative_error` by layer type."""

    model: str
    weights: WeightFormat
    method: str
    size_bytes: float
    bits_per_weight: float
    bits_per_weight_model: float
    relative_error: dict[str, float]
    provenance: Provenance


class Measured(Stored):
    """What all points share; a failed one has its error as `status` and no samples."""

    samples: list[float] = []
    peak_memory_bytes: float | None = None
    weight_bytes: float | None = None
    status: str

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Measured:
        if self.status == OK and not self.samples:
            raise ValueError("a point with status ok needs samples")
        return self


class Point(Measured):
    """What the points of both kinds of bench share."""

    weights: WeightFormat
    recipe: Recipe = "rtn"
    rank: int


class RolloutPoint(Point):
    """Rollout throughput, samples in tokens a second."""

    sequences: int
    completion_tokens: int


class StepPoint(Point):
    """One GRPO step of an arm, samples in seconds."""

    model: str
    arm: str
    method: Literal["full", "lora"]
    prompts: int
    group_size: int
    gradient_checkpointing: bool | str
    rollout_seconds: list[float] = []
    update_seconds: list[float] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sequences(self) -> int:
        """Completions a step."""
        return self.prompts * self.group_size


class _Bench(Stored):
    bench: str
    provenance: Provenance


class RolloutBenchResult(_Bench):
    """profile/<bench>.json of kind rollout."""

    kind: Literal["rollout"]
    model: str
    points: list[RolloutPoint] = Field(min_length=1)


class StepBenchResult(_Bench):
    """profile/<bench>.json of kind step; its points may be of several models."""

    kind: Literal["step"]
    points: list[StepPoint] = Field(min_length=1)
