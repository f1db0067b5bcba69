"""The workloads whose speed and memory are measured, each defined once: settings, jobs and results have these models.

A size names known shapes (`qerl.checkpoints.shapes`), which have random weights.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from qerl.settings.base import FilePath, PositiveInt, Seed, Settings
from qerl.settings.models import Base, WeightFormat
from qerl.settings.run import Kernels

Engine = Literal["native", "vllm", "transformers"]
ENGINES: tuple[str, ...] = get_args(Engine)


class Measured(BaseModel):
    """The base of models that jobs and results state and no configuration has."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Workload(Measured):
    """What all workloads have: a policy on random weights. Rank 0 has no adapter."""

    size: str
    weights: WeightFormat
    rank: int
    pack_delta_nets: bool = False

    @property
    def base(self) -> Base:
        """The base, with the size as its model."""
        return Base(self.size, self.weights, packed_nets=self.pack_delta_nets)


class Decoding(Workload):
    """Decoding at several numbers of sequences. `prompt` and `tokens` (decoded) are per sequence."""

    engine: Engine
    kernels: Kernels = "auto"
    """Those of this project's engine; `auto` for the other engines."""
    prompt: int
    tokens: int

    @property
    def serving(self) -> str:
        """The engine with its kernels, as tables name it."""
        return with_kernels(self.engine, self.kernels)


class Prompting(Workload):
    """Prefill in this project's engine: calls that draw one token after each prompt."""

    repeats: int = 7
    """Timed calls, besides the first."""


class MixedLengths(Settings):
    """Prompts and completions of a rollout. Lengths of completions are lognormal, lengths of prompts uniform."""

    removed_keys = {"drafts": "with speculative decoding, which gained nothing from 16 sequences on; delete it"}

    prompts: PositiveInt = 64
    group_size: PositiveInt = 8
    """Completions per prompt."""
    prompt: tuple[PositiveInt, PositiveInt] = (128, 384)
    """Least and most tokens of a prompt."""
    median: PositiveInt = 300
    """Median length of a completion."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm of a length."""
    tokens: PositiveInt = 2048
    """Most tokens of a completion."""
    sequences: PositiveInt = 512
    """Most completions decoded together."""
    trace: FilePath | None = None
    """A file of `qerl.bench.trace`, whose tokens this project's engine replays; vLLM draws others of the same lengths.
    None draws lengths by the keys above."""
    seed: Seed = 0
    repeats: PositiveInt = 3


class Mix(Workload, MixedLengths):
    """A rollout of completions of mixed lengths, which `qerl.bench.workloads` draws."""

    engine: Engine


class StepLengths(Settings):
    """Prompts and completions of a GRPO step."""

    prompt: PositiveInt = 128
    """Length of each prompt."""
    tokens: PositiveInt = 1024
    """Length of each completion, or of the longest with a `median`."""
    median: PositiveInt | None = None
    """Median of lognormal lengths of completions, equal for all systems."""
    repeats: PositiveInt = 3
    """Timed steps, besides the warm-up."""


class StepWork(Workload, StepLengths):
    """A GRPO step, which is the same for each system."""

    prompts: int
    group_size: int
    sigma: float | None = None
    """The standard deviation of the logarithm of a length; None without a median."""
    equal_groups: float = 0.0
    """Share of each step's groups whose completions earn the same, so that they have no gradient."""

    @property
    def completions(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group_size


class EngineStep(Measured):
    """This project's settings of a GRPO step."""

    kernels: Kernels = "auto"
    recompute: bool | Literal["auto"]
    """`gradient_checkpointing` of a run."""
    micro_batch_tokens: int
    kv_cache_gib: float | None
    sleep: bool = False
    """Whether the KV cache is released after each rollout."""
    memory_gb: float | None = None
    """The limit of the process's GPU memory, in 10^9 bytes; None without a limit."""


class TrlStep(Measured):
    """TRL's settings of a GRPO step."""

    sampler: Literal["vllm", "transformers"]
    micro_batch: int
    """Completions per forward pass."""
    recompute: bool
    correction: bool
    """Importance weights between vLLM and the trainer, which are TRL's default and need another forward pass."""
    liger: bool
    sleep: bool
    vllm_memory: float | None
    """vLLM's share of the GPU; None is the share with which it decodes all completions at once."""
    optimizer: str

    @property
    def memory_gb(self) -> None:
        """TRL's memory isn't capped."""


def with_kernels(system: str, kernels: Kernels) -> str:
    """An engine or a system with its kernels, unless the GPU chooses them: native or native-portable."""
    return system if kernels == "auto" else f"{system}-{kernels}"
