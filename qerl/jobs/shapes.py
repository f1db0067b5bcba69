"""Jobs of the speed grid (`shapes` of a configuration): each writes one file of points on random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from qerl.jobs.base import Job, Lock, Part
from qerl.settings.rollout import Kernels

#: The most tokens of each sequence that the warm-up of a decode point, or of a step of equal lengths, decodes.
WARM_UP = 256


def enough_runs(seconds: Sequence[float]) -> bool:
    """Whether a decode point has enough timed runs, by their seconds.

    It has three. Short ones are repeated, up to nine times or until they took 5 s in total. A first run of 10 s or
    more is enough: three of that length differed by 0.25 % in the median on an H200, and by at most 1.8 %.
    """
    if not seconds or seconds[0] >= 10:
        return bool(seconds)
    return len(seconds) >= 9 or (len(seconds) >= 3 and sum(seconds) >= 5)


class PointJob(Job):
    """A job with a GPU and its share of the cores to itself; it continues the files of a killed job."""

    own_cores: ClassVar[bool] = True

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out]

    @property
    def gpus(self) -> int:
        """One GPU, if the machine has any."""
        return 1

    @property
    def lock(self) -> Lock:
        """A lock for the job's file, since several jobs share a folder."""
        return Lock(self.out.parent, f".{self.out.name}.lock")


class Decoding(Part):
    """The work at each number of sequences. `prompt` and `tokens` (decoded) are per sequence."""

    engine: Literal["native", "vllm", "transformers"]
    size: str
    weights: str
    pack_delta_nets: bool = False
    rank: int
    kernels: Kernels
    """Those of this project's engine; `auto` for the other engines."""
    prompt: int
    tokens: int


class DecodePart(Part):
    """A file of a decode job, with a point for each number of sequences."""

    file: str
    work: Decoding
    sequences: list[int]


class DecodeJob(PointJob):
    """Measure an engine's decode speed on one size and weight format, whose set-up its parts share.

    `out` is the folder of the parts' files.
    """

    kind: Literal["decode"] = "decode"
    parts: list[DecodePart]

    @property
    def engine(self) -> str:
        """The engine of all parts."""
        return self.parts[0].work.engine

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]


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
    drafts: bool
    """Whether the native engine verifies drafts."""
    seed: int
    repeats: int


class RolloutMixJob(PointJob):
    """Measure an engine's rollout of completions of mixed lengths, end to end."""

    kind: Literal["rollout_mix"] = "rollout_mix"
    work: Mix


class Prompting(Part):
    """The policy of a prefill bench; rank 0 has no adapter."""

    size: str
    weights: str
    rank: int


class PromptsJob(PointJob):
    """Measure prefill time in this project's engine, with a point for each pair of prompts and tokens per prompt."""

    kind: Literal["prompts"] = "prompts"
    work: Prompting
    points: list[tuple[int, int]]
    repeats: int


class Work(Part):
    """The work of a GRPO step, which is the same for each system."""

    size: str
    weights: str
    pack_delta_nets: bool = False
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    """Tokens of each completion, or of the longest if they have a median."""
    median: int | None = None
    """The median length of completions of mixed lengths in tokens."""
    sigma: float | None = None
    """The standard deviation of the logarithm of a length; None without a median."""
    rank: int
    equal_groups: float
    """Share of each step's groups whose completions earn the same, so that they have no gradient."""
    repeats: int
    """Number of timed steps, besides the warm-up."""

    @property
    def completions(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group


class GrpoStep(Part):
    """This project's settings of the step."""

    kernels: Kernels
    recompute: bool | Literal["auto"]
    """`gradient_checkpointing` of a run."""
    micro_batch_tokens: int
    kv_cache_gib: float | None
    sleep: bool
    """Whether the KV cache is released after each rollout."""
    memory_gb: float | None
    """The limit of the process's GPU memory, in 10^9 bytes; None without a limit."""


class StepPart(Part):
    """A file of a job of steps."""

    file: str
    work: Work
    settings: GrpoStep


class GrpoStepJob(PointJob):
    """Measure whole GRPO steps of this project on one size and weight format, and under one cap of memory or none.

    `out` is the folder of the parts' files.
    """

    kind: Literal["grpo_step"] = "grpo_step"
    parts: list[StepPart]

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]

    @property
    def joins_free_memory(self) -> bool:
        """As a training does."""
        return True


class TrlStep(Part):
    """TRL's settings of the step."""

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


class TrlStepJob(PointJob):
    """Measure a whole GRPO step of TRL."""

    kind: Literal["trl_step"] = "trl_step"
    work: Work
    settings: TrlStep
