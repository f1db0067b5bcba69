"""Schemas of a configuration's benches: rollout throughput and seconds of a GRPO step."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from qerl.results.schema.stored import MeasuredPoint, Provenance, Stored
from qerl.settings.models import Recipe, WeightFormat


class BenchPoint(MeasuredPoint):
    """The fields that the points of both kinds of bench share."""

    weights: WeightFormat
    recipe: Recipe = "rtn"
    pack_delta_nets: bool = False
    rank: int


class RolloutPoint(BenchPoint):
    """A point of rollout throughput, with samples in tokens/s."""

    sequences: int
    prompt_tokens: int = 0
    completion_tokens: int


class StepPoint(BenchPoint):
    """A point of an arm's GRPO step, with samples in seconds."""

    model: str
    arm: str
    varied: dict[str, Any] = Field({})
    method: Literal["full", "lora"]
    prompts: int
    group_size: int
    gradient_checkpointing: bool | str
    rollout_seconds: list[float] = Field([])
    update_seconds: list[float] = Field([])

    @property
    def sequences(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group_size


class ProfileKind(Stored):
    """The kind of a profile/<bench>.json."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["rollout", "step"]


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
