"""Files of the speed grid: decode speed by number of sequences, and GRPO steps."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from qerl.random_models.architectures import ARCHITECTURES
from qerl.results.roofline import Ceilings
from qerl.results.schema.stored import Measured, Provenance, Stored
from qerl.settings.models import WeightFormat

Engine = Literal["native", "vllm", "transformers"]
ENGINES: tuple[str, ...] = get_args(Engine)


def _known_shape(size: str) -> str:
    if size not in ARCHITECTURES:
        raise ValueError(f"there is no shape {size}; use one of {', '.join(ARCHITECTURES)}")
    return size


Size = Annotated[str, AfterValidator(_known_shape)]


class Kind(Stored):
    """What a file holds."""

    bench: Literal["decode", "grpo_step"]


class DecodePoint(Measured):
    """One number of sequences, samples in decoded tokens a second."""

    sequences: int
    prompt_seconds: float | None = None


class Decode(Stored):
    """A file of one (engine, size, weights, rank); no ceilings on a CPU."""

    bench: Literal["decode"]
    engine: Engine
    size: Size
    weights: WeightFormat
    rank: int
    prompt: int
    tokens: int
    ceilings: Ceilings | None
    points: list[DecodePoint]
    provenance: Provenance


class StepWork(Stored):
    """What each system had to do in a step."""

    size: Size
    weights: WeightFormat
    rank: int
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int


class StepSettings(Stored):
    """Of a system's own settings, what tables show."""

    recompute: bool | str
    memory_gb: float | None = None


class StepSeconds(Stored):
    """A timed step and its parts."""

    step: float
    sync: float
    rollout: float
    update: float


class TimedStep(StepSeconds):
    """With the peaks of memory in its parts, where a system tells them."""

    rollout_peak_bytes: float | None = None
    update_peak_bytes: float | None = None


class StepMemory(Stored):
    """Bytes at the highest peak; `parts` are disjoint and make up what is there without the cache."""

    kv_cache_bytes: float
    without_kv_cache_bytes: float
    parts: dict[str, float]


class GrpoStep(Stored):
    """A file of `qerl.bench.grpo_step` or `qerl.bench.grpo_step_trl`; without steps where `status` says why."""

    bench: Literal["grpo_step"]
    status: str
    system: str
    sampler: str = ""
    work: StepWork
    settings: StepSettings
    steps: tuple[TimedStep, ...] = ()
    memory: StepMemory | None = None
    provenance: Provenance
