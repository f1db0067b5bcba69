"""Files of speeds, of a configuration's benches and of the speed grid: their schemas, and their rows as data frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from qerl.checkpoints.shapes import QWEN, SIZES
from qerl.results.paths import weights_names
from qerl.results.schema import OK, MeasuredPoint, Number, Provenance, Stored
from qerl.results.store import ResultError, read
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

if TYPE_CHECKING:
    import pandas as pd

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

    bench: str
    work: Workload
    provenance: Provenance

    @property
    def keys(self) -> Sequence[Any]:
        """What tells its points apart, as a job asks for them."""
        return [None]

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

    @property
    def keys(self) -> Sequence[Any]:
        """The numbers of sequences."""
        return [point.sequences for point in self.points]


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

    @property
    def keys(self) -> Sequence[Any]:
        """The numbers of prompts and of tokens."""
        return [(point.prompts, point.tokens) for point in self.points]


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
    """Seconds of a rollout by phase, as `qerl.rollout.engine` measures them on the device."""

    prefill: float
    prefills: int
    decode: list[DecodeSeconds]
    between: float
    host_wait: float


class MixRun(Stored):
    """One timed rollout. Only this project's engine reports phases."""

    seconds: float
    phases: PhaseSeconds | None = None


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

# Files of the speed grid as tidy data frames: a row per decode or prompt point, and per file of steps or rollouts.

_GB = 1e9
#: Columns that identify a file of decode points, besides its size and lengths.
POLICY = ["engine", "weights", "rank"]
#: Tokens of the prompt and decoded tokens; points of other lengths are in other tables.
LENGTHS = ["prompt", "tokens"]
#: What a step did without for memory, as text: the share of the KV cache with which no sequence waits, blocks that were
#: recomputed, tokens of a micro-batch, and what else was set.
GIVEN_UP = ["cache share", "recomputed", "micro-batch tokens", "set"]
_MEASURE = "`qerl grid` lists the commands that measure"


def load(paths: Sequence[Path], bench: str) -> pd.DataFrame:
    """The files of one bench as a tidy frame with their stamps, sorted by size, engine, weights, rank and lengths.

    A row has its samples in `samples` and their medians in other columns. Where there are none, `status` says why, and
    numbers are NaN. Times end in their unit, memory is in GB. Raises ResultError without rows, and if two files have
    the same point. The rows are

    * decode: points. `tokens_per_second` has quartiles, `engine` its kernels. Without ceilings floors are NaN.
    * grpo_step: files, with seconds and memory by part (`<part>/gb`). `GIVEN_UP` tells what was done without.
    * rollout_mix: files. `workload` has the lengths. The median rollout gives `phases` and `phase_seconds`
      (its time). `samples` are in tokens/s.
    * prompts: points, with the `milliseconds` of a call.
    * rollout, step: points of a configuration's benches. `samples` are in tokens/s of whole rollouts, and in seconds.

    The columns `model`, `bench`, `sequences` and, of decode and rollout points, `rollouts` (tokens/s of whole rollouts)
    place a number beside the paper's.
    """
    import pandas as pd  # which the plan, which reads the schemas, is spared

    schema, rows_of, name, order = _BENCHES[bench]
    rows = [row for path in paths for row in rows_of(read(schema, path))]
    if not rows:
        raise ResultError(f"there are no {name} yet; {_MEASURE}")
    orders = {"size": SIZES, "engine": SERVING, "weights": weights_names()}
    rows.sort(key=lambda row: [orders[key].index(row[key]) if key in orders else row[key] for key in order])
    for one, row in pairwise(rows) if bench == "decode" else ():
        if all(one[key] == row[key] for key in order):
            name = f"{row['engine']} {row['size']} {row['weights']} rank {row['rank']}, {row['sequences']} sequences"
            raise ResultError(f"{name} is in two decode files; give one of them")
    return pd.DataFrame(rows)


def _bench_rows(job: RolloutBenchResult | StepBenchResult) -> Iterator[dict[str, Any]]:
    identity = job.model_dump(exclude={"kind", "points", "provenance"}) | job.provenance.columns
    for point in job.points:
        columns = point.model_dump(exclude={"recipe", "pack_delta_nets", "sampler", "prompt_tokens", "varied"})
        columns |= {"weights": point.weights_name, "sequences": point.sequences}
        yield identity | columns | ({"rollouts": point.samples} if job.kind == "rollout" else {})


def _of_paper(size: str, system: str, stamp: dict[str, str]) -> dict[str, str]:
    """The model as configurations name it, and a bench of one system and machine: only its points are compared."""
    model = f"qwen2.5-{size.lower()}" if size in QWEN else size
    return {"model": model, "bench": f"{system} on {stamp['machine']}"}


def _mix_rows(job: RolloutMixResult) -> Iterator[dict[str, Any]]:
    work, lengths = job.work, [tokens for group in job.completion_tokens for tokens in group]
    seconds = [run.seconds for run in job.runs]
    samples = [job.drawn / taken for taken in seconds]
    typical = sorted(job.runs, key=lambda run: run.seconds)[len(job.runs) // 2] if job.runs else None
    yield {
        **work.model_dump(include={"engine", "size", "weights", "rank", "sequences"}),
        "work": f"{work.prompts} × {work.group_size}, {min(lengths)} to {max(lengths)} tokens, {job.drawn:,} in all",
        "trace": str(work.trace or ""),
        "workload": (tuple(job.prompt_tokens), tuple(map(tuple, job.completion_tokens))),
        "status": job.status,
        "samples": samples,
        **quartiles("tokens_per_second", samples),
        "seconds": median(seconds or [np.nan]),
        "ready_seconds": job.ready_seconds,
        "first_seconds": job.first_seconds,
        "phases": typical.phases if typical else None,
        "phase_seconds": typical.seconds if typical else np.nan,
        **job.provenance.columns,
    }


def quartiles(measure: str, samples: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of samples as columns; NaN without any."""
    ends = np.quantile(samples or [np.nan], [0.5, 0.25, 0.75])
    return {f"{measure}{end}": float(value) for end, value in zip(("", "_p25", "_p75"), ends, strict=True)}


def _prompt_rows(job: PromptsResult) -> Iterator[dict[str, Any]]:
    identity = (
        job.work.model_dump(include={"size", "weights", "rank"}) | {"sampler": job.sampler} | job.provenance.columns
    )
    for point in job.points:
        middle = 1e3 * median(point.samples) if point.samples else np.nan
        yield identity | point.model_dump(exclude={"first"}) | {"milliseconds": middle}


def _point_rows(job: DecodeResult) -> Iterator[dict[str, Any]]:
    work = job.work
    identity: dict[str, Any] = {"engine": work.serving, "size": work.size, "weights": work.base.weights_name}
    identity |= work.model_dump(include={"rank", "prompt", "tokens"})
    for point in job.points:
        speeds = quartiles("tokens_per_second", point.samples)
        drawn, prompts = point.sequences * work.tokens, point.prompt_seconds or 0.0
        step, floor = point.sequences / speeds["tokens_per_second"], _floor_seconds(job, point.sequences)
        yield {
            **identity,
            "sequences": point.sequences,
            "status": point.status,
            "samples": point.samples,
            "rollouts": [drawn / (drawn / rate + prompts) for rate in point.samples],  # with the time of prompts
            **speeds,
            "step_ms": 1e3 * step,
            "floor_ms": 1e3 * floor,
            "percent_of_floor": 100 * floor / step,
            "peak_memory_gb": np.nan if point.peak_memory_bytes is None else point.peak_memory_bytes / _GB,
            **job.provenance.columns,
            **_of_paper(work.size, work.serving, job.provenance.columns),
        }


def _floor_seconds(job: DecodeResult, sequences: int) -> float:
    if job.ceilings is None:
        return np.nan
    from qerl.results.floor import mean_context, step_bytes, step_flops  # which need torch, and a plan doesn't

    work = job.work
    context = mean_context(work.prompt, work.tokens)
    moved = step_bytes(work.base, work.rank, sequences, context)
    flops = step_flops(work.size, work.rank, sequences, context)
    # Moving bytes and computing overlap, so the slower of the two bounds a step.
    return max(moved / job.ceilings.copy_bytes_per_second, flops / job.ceilings.matmul_flops_per_second)


def _step_rows(job: GrpoStepResult) -> Iterator[dict[str, Any]]:
    work, cap = job.work, job.settings.memory_gb
    tokens = f"{work.median} to {work.tokens}" if work.median else f"{work.tokens}"
    seconds = {part: [getattr(step, part) for step in job.steps] or [np.nan] for part in SECONDS}
    yield {
        "system": job.system,
        "sampler": job.sampler,
        "size": work.size,
        "weights": work.base.weights_name,
        "rank": work.rank,
        "prompts": work.prompts,
        "group_size": work.group_size,
        "prompt": work.prompt,
        "tokens": work.tokens,
        "median": work.median or 0,
        "equal_groups": float(work.equal_groups),
        "work": f"{work.prompts} × {work.group_size}, {work.prompt} + {tokens} tokens"
        + (f", {work.equal_groups:.0%} of the groups equal" if work.equal_groups else ""),
        "recompute": str(job.settings.recompute).lower(),
        "cap": "" if cap is None else f"{cap:g} GB",
        **_given_up(job),
        "status": job.status,
        "repeats": len(job.steps),
        "samples": [step.step for step in job.steps],
        **{f"{part}_seconds": median(values) for part, values in seconds.items()},
        **{f"{part.replace('_', ' ')}/gb": value / _GB for part, value in _memory_parts(job).items()},
        **job.provenance.columns,
        **_of_paper(work.size, job.system.split()[0], job.provenance.columns),
        "arm": work.base.weights_name,
        "method": "lora",
        "gradient_checkpointing": job.settings.recompute,
        "sequences": work.completions,
        "size_bytes": job.memory.parts.get("weights", np.nan) if job.memory else np.nan,
    }


def _given_up(job: GrpoStepResult) -> dict[str, Any]:
    """What this project's step did without for memory, and the settings by which it did; empty where not stored."""
    given, ours = job.given_up, job.settings if isinstance(job.settings, EngineStep) else None
    chosen = [f"KV cache of {ours.kv_cache_gib:g} GiB"] if ours and ours.kv_cache_gib is not None else []
    values = (
        f"{given.kv_cache_bytes / given.kv_cache_wanted_bytes:.0%}" if given else "",
        f"{given.recomputed} of {given.blocks}" if given else "",
        ours.micro_batch_tokens if ours else "",
        ", ".join([*chosen, *(["released"] if ours and ours.sleep else [])]),
    )
    return dict(zip(GIVEN_UP, values, strict=True))


def _memory_parts(job: GrpoStepResult) -> dict[str, float]:
    memory = job.memory
    if memory is None:
        return {}
    peaks = {part: [getattr(step, f"{part}_peak_bytes") for step in job.steps] for part in ("rollout", "update")}
    of_peaks = {f"{part} peak": max(values) for part, values in peaks.items() if None not in values}
    return {
        **of_peaks,
        "without KV cache": memory.without_kv_cache_bytes,
        "KV cache": memory.kv_cache_bytes,
        **memory.parts,
    }


#: By bench the schema of its files, their rows, what these are, and the columns that sort them.
_BENCHES: dict[str, tuple[type[Any], Callable[[Any], Iterator[dict[str, Any]]], str, list[str]]] = {
    "decode": (DecodeResult, _point_rows, "points of decode speed", ["size", *POLICY, *LENGTHS, "sequences"]),
    "grpo_step": (GrpoStepResult, _step_rows, "GRPO steps", ["size"]),
    "rollout_mix": (RolloutMixResult, _mix_rows, "rollouts of mixed lengths", ["size", "engine", "weights"]),
    "prompts": (PromptsResult, _prompt_rows, "times of prompts", []),
    "rollout": (RolloutBenchResult, _bench_rows, "points of rollouts", []),
    "step": (StepBenchResult, _bench_rows, "points of steps", []),
}
#: The schema of a file by what it has (`Kind.of_bench`).
SCHEMAS: dict[str, type[Stored]] = {**{bench: kind[0] for bench, kind in _BENCHES.items()}, "products": ProductsResult}
