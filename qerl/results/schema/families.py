"""Schemas of options/: speed with options that the speed grid lacks, by `tests.gpu.time_families`."""

from __future__ import annotations

from typing import Literal

from qerl.results.schema.speed import DecodePoint, Engine, EngineStepSettings, GpuStates, StepMemory, TimedStep
from qerl.results.schema.stored import Provenance, Stored
from qerl.settings.models import WeightFormat
from qerl.settings.rollout import Kernels


class FamilyDecodeResult(Stored):
    """options/decode-*.json: decode speed with options that the speed grid lacks, by `tests.gpu.time_families`."""

    bench: Literal["family_decode"]
    engine: Engine
    model: str
    weights: WeightFormat
    rank: int
    kernels: Kernels
    kv_cache_dtype: str
    experts: bool
    """Whether experts have adapters, too."""
    prompt: int
    tokens: int
    gpu: GpuStates | None = None
    points: list[DecodePoint]
    provenance: Provenance


class FamilyStepResult(Stored):
    """options/step-*.json: GRPO steps with options that the speed grid lacks, by `tests.gpu.time_families`."""

    bench: Literal["family_step"]
    model: str
    weights: WeightFormat
    rank: int
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    settings: EngineStepSettings
    experts: bool
    """Whether experts have adapters, too."""
    sampler: str
    steps: tuple[TimedStep, ...]
    memory: StepMemory
    provenance: Provenance
