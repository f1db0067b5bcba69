"""Jobs of the speed grid (`shapes` of a configuration): each writes one file of points on random weights."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from qerl.jobs.base import Job, Lock, Part


class PointJob(Job):
    """Has a GPU, and its part of the cores, to itself; goes on with a file that a killed one left."""

    own_cores: ClassVar[bool] = True

    @property
    def gpus(self) -> int:
        """One, where there is any."""
        return 1

    @property
    def lock(self) -> Lock:
        """Several share a folder."""
        return Lock(self.out.parent, f".{self.out.stem}.lock")


class Decoding(Part):
    """The work at several numbers of sequences. `prompt` and `tokens` (decoded) are those of each sequence."""

    engine: Literal["native", "vllm", "transformers"]
    size: str
    weights: str
    rank: int
    prompt: int
    tokens: int


class DecodeJob(PointJob):
    """Measure an engine's decode speed, a point for each number of sequences."""

    kind: Literal["decode"] = "decode"
    work: Decoding
    sequences: list[int]


class Mix(Part):
    """A rollout of completions of mixed lengths, which `qerl.bench.rollout_mix.workload` draws."""

    engine: Literal["native", "vllm"]
    size: str
    weights: str
    rank: int
    prompts: int
    group: int
    prompt_tokens: tuple[int, int]
    """The least and the most tokens of a prompt."""
    median: int
    """The median length of a completion in tokens."""
    sigma: float
    """The standard deviation of the logarithm of a length."""
    longest: int
    """The most tokens of a completion."""
    sequences: int
    """The most completions decoded together."""
    trace: Path | None
    """A file of prompts and completions, whose tokens are replayed; None draws lengths and tokens."""
    seed: int
    repeats: int


class RolloutMixJob(PointJob):
    """Measure an engine's rollout of completions of mixed lengths, end to end."""

    kind: Literal["rollout_mix"] = "rollout_mix"
    work: Mix


class Prompting(Part):
    """The policy whose prompts are timed; rank 0 has no adapter."""

    size: str
    weights: str
    rank: int


class PromptsJob(PointJob):
    """Measure the time of prompts in this project's engine, a point for each pair of prompts and tokens of each."""

    kind: Literal["prompts"] = "prompts"
    work: Prompting
    points: list[tuple[int, int]]
    repeats: int


class Work(Part):
    """The work of each system in a GRPO step."""

    size: str
    weights: str
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    rank: int
    repeats: int
    """Timed steps, beside those that warm up."""

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group


class GrpoStep(Part):
    """This project's own settings of the step."""

    recompute: bool | Literal["auto"]
    """`gradient_checkpointing` of a run."""
    micro_batch_tokens: int
    kv_cache_gib: float | None
    memory_gb: float | None
    """The process gets no more of the GPU's memory, in 10^9 bytes."""


class GrpoStepJob(PointJob):
    """Measure a whole GRPO step of this project."""

    kind: Literal["grpo_step"] = "grpo_step"
    work: Work
    settings: GrpoStep


class TrlStep(Part):
    """TRL's own settings of the step."""

    sampler: Literal["vllm", "transformers"]
    micro_batch: int
    """Completions of a forward pass."""
    recompute: bool
    correction: bool
    """Importance weights between vLLM and the trainer, TRL's default, which cost another forward pass."""
    liger: bool
    sleep: bool
    vllm_memory: float | None
    """Share of the GPU for vLLM; None: what it needs to decode all completions at once."""
    optimizer: str


class TrlStepJob(PointJob):
    """Measure the same step of TRL."""

    kind: Literal["trl_step"] = "trl_step"
    work: Work
    settings: TrlStep
