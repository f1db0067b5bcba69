"""Schemas of speeds: a configuration's benches, the files of the speed grid, and the options that the grid lacks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from qerl.checkpoints.shapes import SIZES
from qerl.results.schema import OK, MeasuredPoint, Number, Provenance, Stored
from qerl.settings.models import Base, Recipe, WeightFormat
from qerl.settings.run import Kernels
from qerl.settings.workloads import (
    ENGINES,
    Decoding,
    EngineStep,
    Mix,
    Prompting,
    StepWork,
    TrlStep,
    Workload,
    with_kernels,
)

# Schemas of a configuration's benches: rollout throughput and seconds of a GRPO step.


class BenchPoint(MeasuredPoint):
    """The fields that the points of both kinds of bench share."""

    weights: WeightFormat
    recipe: Recipe = "rtn"
    pack_delta_nets: bool = False
    rank: int

    @property
    def weights_name(self) -> str:
        """The name of the base's weights; not every point has the base's model."""
        return Base("", self.weights, self.recipe, self.pack_delta_nets).weights_name


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


# Schemas of the speed grid's files: decode speed, prefill time, rollouts of mixed lengths, and GRPO steps.

Bench = Literal["decode", "grpo_step", "rollout_mix", "prompts", "rollout", "step"]
#: The engines with their kernels, as tables name them; only this project's has a choice.
SERVING: tuple[str, ...] = (*(with_kernels("native", kernels) for kernels in get_args(Kernels)), *ENGINES[1:])


class Kind(Stored):
    """What all files of benches have. A configuration's own have a `kind` and their name as `bench`."""

    model_config = ConfigDict(extra="ignore")

    bench: str
    kind: str = ""

    @property
    def of_bench(self) -> str:
        """What was measured, a key of `SCHEMAS`."""
        return self.kind or self.bench


class Measurement(Stored):
    """A file of the grid: a workload, and what an engine took for it on one machine.

    `bench` names the kind, and every kind has its values in fields of its own.
    """

    bench: Bench
    work: Workload
    provenance: Provenance

    @model_validator(mode="after")
    def _shape_is_known(self) -> Self:
        if self.work.size not in SIZES:
            raise ValueError(f"work.size {self.work.size!r} is unknown; use one of {', '.join(SIZES)}")
        return self


# --- decode speed ----------------------------------------------------------------------------------------------------


class Ceilings(Stored):
    """Measured rates of a GPU: bytes per second that a copy reads and writes, FLOP/s of a bfloat16 product."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


class GpuState(Stored):
    """Clocks, temperature and power of a GPU. None if the driver doesn't report them."""

    sm_mhz: float | None
    memory_mhz: float | None
    celsius: float | None
    watts: float | None


class GpuStates(Stored):
    """A GPU before and after the points of a call."""

    before: GpuState | None
    after: GpuState | None


class DecodePoint(MeasuredPoint):
    """The point of one number of sequences, with samples in decoded tokens/s and the median seconds of prompts."""

    sequences: int
    prompt_seconds: float | None = None
    prompt_samples: list[float] = Field([])


class DecodeResult(Measurement):
    """points/decode-*.json, with one file per (engine, kernels, size, weights, rank); a CPU has no ceilings."""

    bench: Literal["decode"]
    work: Decoding
    sync_seconds: list[float] = Field(default=[])
    ceilings: Ceilings | None
    gpu: GpuStates | None = None
    points: list[DecodePoint]


# --- prompts ---------------------------------------------------------------------------------------------------------


class PromptPoint(Stored):
    """Seconds of calls with `prompts` prompts of `tokens` tokens, without the first call; a failed point has none."""

    prompts: int
    tokens: int
    status: str = OK
    first: float | None
    samples: list[float]
    reserved_bytes: Number | None = None


class PromptsResult(Measurement):
    """points/prompts-*.json, with one file per (size, weights, rank)."""

    bench: Literal["prompts"]
    work: Prompting
    sampler: str
    gpu: GpuState | None
    points: list[PromptPoint]


# --- products --------------------------------------------------------------------------------------------------------


class ProductPoint(Stored):
    """Microseconds of a launch of the packed product and of cuBLAS in bfloat16, and the error relative to float64."""

    layers: str
    rows: int
    rank: int
    error: float
    microseconds: list[float]
    cublas_microseconds: list[float]


class ProductsResult(Stored):
    """kernels/products-*.json: the packed products of a block, by `tests.gpu.time_products`."""

    bench: Literal["products"]
    size: str
    weights: WeightFormat
    points: list[ProductPoint]
    gpu: GpuState | None
    provenance: Provenance


# --- rollouts of mixed lengths ---------------------------------------------------------------------------------------


class TraceRow(Stored):
    """A line of traces/*.jsonl: token ids of a prompt and of its completions, logged by a run of this project."""

    prompt: list[int] = Field(min_length=1)
    completions: list[Annotated[list[int], Field(min_length=1)]] = Field(min_length=1)


class DecodeSeconds(Stored):
    """Decode steps of one batch size. `sequences` is the mean number of sequences of a step, without padding."""

    batch: int
    steps: int
    sequences: float
    seconds: float


class PhaseSeconds(Stored):
    """Seconds of a rollout by phase, as `qerl.rollout.scheduler` measures them on the device.

    `verify` has the steps that verify drafts, by batch size, with their rows in place of sequences.
    """

    prefill: float
    prefills: int
    decode: list[DecodeSeconds]
    verify: tuple[DecodeSeconds, ...] = ()
    between: float
    host_wait: float


class DraftsFound(Stored):
    """Drafted tokens of one source: those that steps verified, and those of them that were right."""

    source: Literal["prompt", "completion", "sibling", "earlier"]
    verified: int
    accepted: int


class DraftsVerified(Stored):
    """Verifications of a rollout, as `qerl.rollout.speculation` counts them: a sequence in a step is one.

    `rows_per_step` are without padding. `tokens_per_verification` has the token that a plain step would give, too.
    """

    steps: int
    verifications: int
    rows_per_step: float
    tokens_per_verification: float
    sources: list[DraftsFound]


class MixRun(Stored):
    """One timed rollout. Only this project's engine reports phases, and drafts where it verifies them."""

    seconds: float
    phases: PhaseSeconds | None = None
    drafts: DraftsVerified | None = None


class RolloutMixResult(Measurement):
    """points/mix-*.json: an engine's rollouts of one workload, or a `status` that says why there are none.

    `prompt_tokens` and `completion_tokens` are the drawn lengths, the latter by prompt. `ready_seconds` is the time
    until the engine accepts requests, `first_seconds` that of the first rollout, which compiles and captures graphs.
    """

    bench: Literal["rollout_mix"]
    work: Mix
    prompt_tokens: list[int]
    completion_tokens: list[list[int]]
    status: str
    sampler: str = ""
    ready_seconds: float | None = None
    first_seconds: float | None = None
    runs: tuple[MixRun, ...] = ()
    gpu: GpuStates | None = None

    @property
    def drawn(self) -> int:
        """Tokens of all completions."""
        return sum(map(sum, self.completion_tokens))


# --- GRPO steps ------------------------------------------------------------------------------------------------------


class TimedStep(Stored):
    """Seconds of a step and its parts, with the memory peaks that a system reports."""

    step: float
    sync: float
    rollout: float
    update: float
    rollout_peak_bytes: Number | None = None
    update_peak_bytes: Number | None = None
    peak_bytes: Number | None = None
    trl_step_time: float | None = None
    grad_norm: float | None = None
    mismatch_kl: float | None = Field(default=None, validation_alias="mismatch/kl", serialization_alias="mismatch/kl")


class StepMemory(Stored):
    """Bytes at the highest peak; `parts` are disjoint and make up what is there without the cache."""

    peak_bytes: Number
    kv_cache_bytes: Number
    without_kv_cache_bytes: Number
    parts: dict[str, Number]
    device_bytes: Number | None


class GivenUp(Stored):
    """What a step gave up for memory: the cache and kept activations that more memory would have allowed.

    With less than the wanted cache some sequences wait for others. `recomputed` are the most blocks of a micro-batch.
    """

    kv_cache_bytes: Number
    kv_cache_wanted_bytes: Number
    recomputed: int
    blocks: int


class GrpoStepResult(Measurement):
    """points/step-*.json: steps of this project or of TRL; without steps where `status` says why."""

    bench: Literal["grpo_step"]
    system: str
    work: StepWork
    settings: EngineStep | TrlStep
    status: str
    message: str = ""
    """That of the error by which a step failed. PyTorch's says how much memory was allocated and how much reserved."""
    sampler: str = ""
    warmup_steps: int = 0
    steps: tuple[TimedStep, ...] = ()
    memory: StepMemory | None = None
    given_up: GivenUp | None = None


#: A step, and its parts that are timed, in their order; the step has all of them and little else.
SECONDS = ("step", "sync", "rollout", "update")

#: The schema of a file by what it has (`Kind.of_bench`).
SCHEMAS: dict[str, type[Stored]] = {
    "decode": DecodeResult,
    "grpo_step": GrpoStepResult,
    "rollout_mix": RolloutMixResult,
    "prompts": PromptsResult,
    "products": ProductsResult,
    "rollout": RolloutBenchResult,
    "step": StepBenchResult,
}
