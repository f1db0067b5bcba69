"""Files of speeds, each a model with its rows in tables: a configuration's benches, and the speed grid.

`load` makes a tidy frame of the files of one bench. Times end in their unit, memory is in GB (10^9 bytes). Where a
point has no samples, `status` says why, and numbers are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from qerl.checkpoints.shapes import HALF, QWEN, SIZES, ModelShape, shape_of
from qerl.results.paths import weights_names
from qerl.results.schema import (
    OK,
    Amount,
    Count,
    MeasuredPoint,
    Number,
    Provenance,
    ResultError,
    Sample,
    Seconds,
    Stored,
    check_measured,
    read,
)
from qerl.settings.base import NonEmpty, PositiveInt
from qerl.settings.models import Base, Recipe, WeightFormat
from qerl.settings.run import Kernels
from qerl.settings.workloads import (
    ENGINES,
    Decoding,
    EngineStep,
    Mix,
    PointPart,
    Prompting,
    StepWork,
    TrlStep,
    Workload,
    with_kernels,
)

if TYPE_CHECKING:
    import pandas as pd

_GB = 1e9
Row = dict[str, Any]


def quartiles(measure: str, samples: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of samples as columns; NaN without any."""
    ends = np.quantile(samples or [np.nan], [0.5, 0.25, 0.75])
    return {f"{measure}{end}": float(value) for end, value in zip(("", "_p25", "_p75"), ends, strict=True)}


# A configuration's benches: rollout throughput and seconds of a GRPO step.


class BenchPoint(MeasuredPoint):
    """The fields that the points of both kinds of bench share."""

    weights: WeightFormat
    recipe: Recipe = "rtn"
    pack_delta_nets: bool = False
    rank: Count

    @property
    def weights_name(self) -> str:
        """The name of the base's weights; not every point has the base's model."""
        return Base("", self.weights, self.recipe, self.pack_delta_nets).weights_name


class RolloutPoint(BenchPoint):
    """A point of rollout throughput, with samples in tokens/s."""

    sequences: PositiveInt
    prompt_tokens: Count = 0
    completion_tokens: PositiveInt


class StepPoint(BenchPoint):
    """A point of an arm's GRPO step, with samples in seconds."""

    model: str
    arm: str
    varied: dict[str, Any] = Field({})
    method: Literal["full", "lora"]
    prompts: PositiveInt
    group_size: PositiveInt
    gradient_checkpointing: bool | str
    rollout_seconds: list[Sample] = Field([])
    update_seconds: list[Sample] = Field([])

    @property
    def sequences(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group_size


class _Bench(Stored):
    bench: str
    kind: str
    points: Sequence[RolloutPoint | StepPoint]
    provenance: Provenance

    def rows(self) -> Iterator[Row]:
        """A row per point, with `samples` in seconds of a step, or in tokens/s of whole rollouts as `rollouts` are."""
        identity = self.model_dump(exclude={"kind", "points", "provenance"}) | self.provenance.columns
        for point in self.points:
            columns = point.model_dump(exclude={"recipe", "pack_delta_nets", "sampler", "prompt_tokens", "varied"})
            columns |= {"weights": point.weights_name, "sequences": point.sequences, "rollouts": point.samples}
            yield identity | columns


class RolloutBenchResult(_Bench):
    """profile/<bench>.json of kind rollout."""

    kind: Literal["rollout"]
    model: str
    points: NonEmpty[RolloutPoint]


class StepBenchResult(_Bench):
    """profile/<bench>.json of kind step; its points may be of several models."""

    kind: Literal["step"]
    points: NonEmpty[StepPoint]


# The speed grid's files: decode speed, prefill time, rollouts of mixed lengths, and GRPO steps.

#: The engines with their kernels, as tables name them; only this project's has a choice.
SERVING: tuple[str, ...] = (*(with_kernels("native", kernels) for kernels in get_args(Kernels)), *ENGINES[1:])


#: Columns that identify a file of decode points, besides its size and lengths.
POLICY = ["engine", "weights", "rank"]
#: Tokens of the prompt and decoded tokens; points of other lengths are in other tables.
LENGTHS = ["prompt", "tokens"]


class Measurement(Stored):
    """A file of the grid: a workload, and what an engine took for it on one machine.

    `bench` names the kind, as the workload does, and every kind has its values in fields of its own.
    """

    bench: str
    work: Workload
    provenance: Provenance

    @property
    def keys(self) -> Sequence[Any]:
        """What tells its points apart, as a job asks for them."""
        return [None]

    def lacking(self, part: PointPart[Any, Any]) -> list[Any]:
        """The points of a job's part that the file doesn't have."""
        return [point for point in part.points if point not in self.keys]

    @model_validator(mode="after")
    def _workload_is_known(self) -> Self:
        if self.bench != self.work.bench:
            raise ValueError(f"bench {self.bench!r} is not {self.work.bench!r}, as the workload's")
        if self.work.size not in SIZES:
            raise ValueError(f"work.size {self.work.size!r} is unknown; use one of {', '.join(SIZES)}")
        return self

    def _beside_paper(self, system: str) -> Row:
        """The stamp; the model as configurations name it; and a bench of one system and machine, for comparisons."""
        size, stamp = self.work.size, self.provenance.columns
        model = f"qwen2.5-{size.lower()}" if size in QWEN else size
        return {**stamp, "model": model, "bench": f"{system} on {stamp['machine']}"}


# --- decode speed ----------------------------------------------------------------------------------------------------


class Ceilings(Stored):
    """Measured rates of a GPU: bytes per second that a copy reads and writes, FLOP/s of a bfloat16 product."""

    copy_bytes_per_second: Sample
    matmul_flops_per_second: Sample


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
    """The point of one number of sequences of a run, with samples in decoded tokens/s of all runs and the median
    seconds of prompts.
    """

    sequences: PositiveInt
    prompt_seconds: Sample | None = None
    prompt_samples: list[Sample] = Field(default=[])


class DecodeResult(Measurement):
    """points/decode-*.json, with one file per (engine, kernels, size, weights, rank, runs); a CPU has no ceilings."""

    work: Decoding
    sync_seconds: list[Sample] = Field(default=[])
    ceilings: Ceilings | None
    gpu: GpuStates | None = None
    points: list[DecodePoint]

    @property
    def keys(self) -> Sequence[Any]:
        """The numbers of sequences."""
        return [point.sequences for point in self.points]

    def rows(self) -> Iterator[Row]:
        """A row per point; `engine` has its kernels, and `rollouts` are tokens/s with the time of the prompts.

        Floors are NaN without ceilings.
        """
        work = self.work
        for point in self.points:
            speeds = quartiles("tokens_per_second", point.samples)
            together = work.runs * point.sequences
            drawn, prompts = together * work.tokens, point.prompt_seconds or 0.0
            step, floor = together / speeds["tokens_per_second"], self._floor_seconds(together)
            yield {
                "engine": work.serving,
                "size": work.size,
                "weights": work.base.weights_name,
                **work.model_dump(include={"rank", "runs", *LENGTHS}),
                "sequences": point.sequences,
                "status": point.status,
                "samples": point.samples,
                "rollouts": [drawn / (drawn / rate + prompts) for rate in point.samples],
                **speeds,
                "floor_ms": 1e3 * floor,
                "percent_of_floor": 100 * floor / step,
                **self._beside_paper(work.serving),
            }

    def _floor_seconds(self, sequences: int) -> float:
        if self.ceilings is None:
            return np.nan
        work = self.work
        context = work.prompt + work.tokens / 2  # the mean number of cached tokens of a sequence
        parts = byte_parts(work.base, work.rank, sequences, context)
        moved = sum(parts.values()) + (work.runs - 1) * parts["adapter"]
        flops = step_flops(work.size, work.rank, sequences, context)
        # Moving bytes and computing overlap, so the slower of the two bounds a step.
        return max(moved / self.ceilings.copy_bytes_per_second, flops / self.ceilings.matmul_flops_per_second)


# --- prefill time ----------------------------------------------------------------------------------------------------


class PromptsPoint(Stored):
    """Seconds of calls with this number of prompts of `tokens` each, without the first call; a failed point has none.

    `reserved_bytes` is the memory that the first call reserved.
    """

    prompts: PositiveInt
    tokens: PositiveInt
    status: str = OK
    first: Sample | None
    samples: list[Sample]
    reserved_bytes: Number | None = None

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Self:
        check_measured(self.status, self.samples)
        return self


class PromptsResult(Measurement):
    """points/prompts-*.json, with one file per (size, weights, rank)."""

    work: Prompting
    sampler: str
    gpu: GpuState | None
    points: list[PromptsPoint]

    @property
    def keys(self) -> Sequence[Any]:
        """The numbers of prompts and the tokens of each."""
        return [(point.prompts, point.tokens) for point in self.points]

    def rows(self) -> Iterator[Row]:
        """A row per point, with the `milliseconds` of a call."""
        identity = self.work.model_dump(include={"size", "weights", "rank"}) | {"sampler": self.sampler}
        for point in self.points:
            milliseconds = 1e3 * median(point.samples or [np.nan])
            yield {
                **identity,
                **self.provenance.columns,
                **point.model_dump(exclude={"first"}),
                "milliseconds": milliseconds,
            }


# --- rollouts of mixed lengths ---------------------------------------------------------------------------------------


class TraceRow(Stored):
    """A line of traces/*.jsonl: token ids of a prompt and of its completions."""

    prompt: NonEmpty[Count]
    completions: NonEmpty[NonEmpty[Count]]


class DecodeSeconds(Stored):
    """Decode steps of one batch size. `sequences` is the mean number of sequences of a step, without padding."""

    batch: PositiveInt
    steps: PositiveInt
    sequences: Sample
    seconds: Sample


class PhaseSeconds(Stored):
    """Seconds of a rollout by phase, as `qerl.rollout.engine` measures them on the device."""

    prefill: Seconds
    prefills: Count
    decode: list[DecodeSeconds]
    between: Seconds
    host_wait: Seconds


class MixRun(Stored):
    """One timed rollout. Only this project's engine reports phases."""

    seconds: Sample
    phases: PhaseSeconds | None = None


class RolloutMixResult(Measurement):
    """points/mix-*.json: an engine's rollouts of one workload, or a `status` that says why there are none.

    `prompt_tokens` and `completion_tokens` are the drawn lengths of a run, the latter by prompt. `ready_seconds` is the
    time until the engine accepts requests, and `first_seconds` the time of the first rollout, which compiles and
    captures graphs.
    """

    work: Mix
    prompt_tokens: NonEmpty[PositiveInt]
    completion_tokens: NonEmpty[NonEmpty[PositiveInt]]
    status: str
    sampler: str = ""
    ready_seconds: Seconds | None = None
    first_seconds: Seconds | None = None
    runs: tuple[MixRun, ...] = ()
    gpu: GpuStates | None = None

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Self:
        check_measured(self.status, self.runs)
        return self

    @property
    def drawn(self) -> int:
        """Tokens of all completions of all runs."""
        return self.work.runs * sum(map(sum, self.completion_tokens))

    def rows(self) -> Iterator[Row]:
        """One row, with `samples` in tokens/s of all runs. `work` and `workload` have the lengths of one.

        The median rollout gives `phases`, and its time `phase_seconds`.
        """
        work, lengths = self.work, [tokens for group in self.completion_tokens for tokens in group]
        spread = f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all"
        runs = sorted(self.runs, key=lambda run: run.seconds)
        samples = [self.drawn / run.seconds for run in self.runs]
        typical = runs[len(runs) // 2] if runs else MixRun.model_construct(seconds=np.nan)
        yield {
            **work.model_dump(include={"engine", "size", "weights", "rank", "runs", "sequences"}),
            "work": f"{work.prompts} × {work.group_size}, {spread}",
            "trace": str(work.trace or ""),
            "workload": (tuple(self.prompt_tokens), tuple(map(tuple, self.completion_tokens))),
            "status": self.status,
            "samples": samples,
            **quartiles("tokens_per_second", samples),
            "seconds": median([run.seconds for run in runs] or [np.nan]),
            "ready_seconds": self.ready_seconds,
            "first_seconds": self.first_seconds,
            "phases": typical.phases,
            "phase_seconds": typical.seconds,
            **self.provenance.columns,
        }


# --- GRPO steps ------------------------------------------------------------------------------------------------------


class TimedStep(Stored):
    """Seconds of a step and its parts, with the memory peaks that a system reports."""

    step: Sample
    sync: Seconds
    rollout: Seconds
    update: Seconds
    rollout_peak_bytes: Amount | None = None
    update_peak_bytes: Amount | None = None
    peak_bytes: Amount | None = None
    trl_step_time: float | None = None
    grad_norm: float | None = None
    mismatch_kl: float | None = Field(default=None, validation_alias="mismatch/kl", serialization_alias="mismatch/kl")


class StepMemory(Stored):
    """Bytes at the highest peak; `parts` are disjoint and make up what is there without the cache."""

    peak_bytes: Amount
    kv_cache_bytes: Amount
    without_kv_cache_bytes: Number
    parts: dict[str, Number]
    device_bytes: Amount | None


class GivenUp(Stored):
    """What a step gave up for memory: the cache and kept activations that more memory would have allowed.

    With less than the wanted cache some sequences wait for others. `recomputed` are the most blocks of a micro-batch.
    """

    kv_cache_bytes: Amount
    kv_cache_wanted_bytes: Amount
    recomputed: Count
    blocks: Count


#: A step, and its parts that are timed, in their order; the step has all of them and little else.
SECONDS = ("step", "sync", "rollout", "update")
#: What a step did without for memory, as text: the share of the KV cache with which no sequence waits, blocks that were
#: recomputed, tokens of a micro-batch, and what else was set.
GIVEN_UP = ["cache share", "recomputed", "micro-batch tokens", "set"]


class GrpoStepResult(Measurement):
    """points/step-*.json: steps of this project or of TRL; without steps where `status` says why."""

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

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Self:
        check_measured(self.status, self.steps)
        return self

    def lacking(self, part: PointPart[Any, Any]) -> list[Any]:
        """The step, if it had other settings, which no file's name tells. TRL's file has a share that was chosen."""
        return [] if isinstance(part.settings, TrlStep) or part.settings == self.settings else part.points

    def rows(self) -> Iterator[Row]:
        """One row, with seconds and memory by part (`<part>/gb`), and `GIVEN_UP`, which is empty where not stored."""
        work, cap, system = self.work, self.settings.memory_gb, self.system.split()[0]
        tokens = f"{work.median} to {work.tokens}" if work.median else f"{work.tokens}"
        seconds = {part: [getattr(step, part) for step in self.steps] or [np.nan] for part in SECONDS}
        yield {
            "system": self.system,
            "sampler": self.sampler,
            "size": work.size,
            "weights": work.base.weights_name,
            **work.model_dump(include={"rank", "prompts", "group_size", *LENGTHS}),
            "median": work.median or 0,
            "equal_groups": float(work.equal_groups),
            "work": f"{work.prompts} × {work.group_size}, {work.prompt} + {tokens} tokens"
            + (f", {work.equal_groups:.0%} of the groups equal" if work.equal_groups else ""),
            "recompute": str(self.settings.recompute).lower(),
            "cap": "" if cap is None else f"{cap:g} GB",
            **dict(zip(GIVEN_UP, self._given_up(), strict=True)),
            "status": self.status,
            "repeats": len(self.steps),
            "samples": [step.step for step in self.steps],
            **{f"{part}_seconds": median(values) for part, values in seconds.items()},
            **{f"{part.replace('_', ' ')}/gb": value / _GB for part, value in self._memory_parts().items()},
            **self._beside_paper(system),
            "arm": work.base.weights_name,
            "method": "lora",
            "gradient_checkpointing": self.settings.recompute,
            "sequences": work.completions,
            "size_bytes": self.memory.parts.get("weights", np.nan) if self.memory else np.nan,
        }

    def _given_up(self) -> tuple[Any, ...]:
        given, ours = self.given_up, self.settings if isinstance(self.settings, EngineStep) else None
        share = f"{given.kv_cache_bytes / given.kv_cache_wanted_bytes:.0%}" if given else ""
        recomputed = f"{given.recomputed} of {given.blocks}" if given else ""
        if ours is None:
            return share, recomputed, "", ""
        chosen = [] if ours.kv_cache_gib is None else [f"KV cache of {ours.kv_cache_gib:g} GiB"]
        return share, recomputed, ours.micro_batch_tokens, ", ".join([*chosen, *["released"] * ours.sleep])

    def _memory_parts(self) -> dict[str, float]:
        if self.memory is None:
            return {}
        peaks = {part: [getattr(step, f"{part}_peak_bytes") for step in self.steps] for part in ("rollout", "update")}
        return {
            **{f"{part} peak": max(values) for part, values in peaks.items() if None not in values},
            "without KV cache": self.memory.without_kv_cache_bytes,
            "KV cache": self.memory.kv_cache_bytes,
            **self.memory.parts,
        }


#: The columns that sort the rows of a bench; others keep the order of the files.
_ORDER = {
    "decode": ["size", *POLICY, *LENGTHS, "sequences", "runs"],
    "grpo_step": ["size"],
    "rollout_mix": ["size", "engine", "weights", "runs"],
}
#: The model of a file by its `kind`, or else by its `bench`.
SCHEMAS: dict[str, type[Any]] = {
    Decoding.bench: DecodeResult,
    Prompting.bench: PromptsResult,
    Mix.bench: RolloutMixResult,
    StepWork.bench: GrpoStepResult,
    "rollout": RolloutBenchResult,
    "step": StepBenchResult,
}


def load(paths: Sequence[Path], bench: str) -> pd.DataFrame:
    """The rows of the files of one bench with their stamps, sorted by size, engine, weights, rank and lengths.

    A row has its samples in `samples` and their medians and quartiles in other columns. The columns `model`, `bench`,
    `sequences` and, of decode and rollout points, `rollouts` place a number beside the paper's. Raises ResultError
    without rows, and if two files have the same decode point.
    """
    import pandas as pd  # which the plan, which reads the schemas, is spared

    schema, order = SCHEMAS[bench], _ORDER.get(bench, [])
    rows = [row for path in paths for row in read(schema, path).rows()]
    if not rows:
        raise ResultError(f"there are no points of {bench} yet; `qerl grid` lists the commands that measure")
    orders = {"size": SIZES, "engine": SERVING, "weights": weights_names()}
    rows.sort(key=lambda row: [orders[key].index(row[key]) if key in orders else row[key] for key in order])
    for one, row in pairwise(rows) if bench == "decode" else ():
        if all(one[key] == row[key] for key in order):
            name = f"{row['engine']} {row['size']} {row['weights']} rank {row['rank']}, {row['sequences']} sequences"
            raise ResultError(f"{name} is in two decode files; give one of them")
    return pd.DataFrame(rows)


# The floor of a decode step: its least time, by the bytes that it must move and the FLOPs that it must compute.
#
# Each byte counts once, as if caches were perfect. Writes other than to the KV cache and delta nets' states
# (activations, logits) don't count. Both counts are therefore lower bounds for any engine. Experts count as often as
# tokens take them that choose at random; the bytes of a less even choice are fewer.


def byte_parts(base: Base, rank: int, sequences: int, context: float) -> dict[str, float]:
    """Bytes of one decode step by kind. `context` is the number of cached tokens per sequence before the step.

    Packed weights count as `qerl.models` stores them, with scales and tables (NF4 with double quantization); all
    else is bfloat16, but for routers and recurrent states in float32. Of the embedding one row per sequence is read, of
    the head everything, even if both are tied.
    """
    from qerl.formats.codecs import stored_bytes  # which needs torch, and a plan doesn't

    shape, weights = shape_of(base.model).with_packed_nets(base.packed_nets), base.weights
    linear = float(stored_bytes(shape.attention_format(weights), shape.packable) + stored_bytes("bf16", shape.dense))
    if shape.mixture:
        experts = shape.mixture.experts
        taken = experts * (1 - (1 - shape.mixture.chosen / experts) ** sequences)  # by some sequence, on average
        routers = 4 * experts * shape.hidden  # in float32
        linear += shape.layers * (taken * stored_bytes(weights, shape.expert_linears) + routers)
    norms = (2 * shape.layers + 1) * shape.hidden
    biases = shape.layers * (shape.query_width + 2 * shape.kv_width) * shape.biased
    return {
        "linear": linear,
        "adapter": float(HALF * shape.adapter_numbers(rank)),
        "head": float(HALF * shape.vocabulary * shape.hidden),
        "embedding": float(HALF * sequences * shape.hidden),
        "norms and biases": float(HALF * (norms + biases)),
        "cache": HALF * sequences * 2 * shape.kv_width * _attended(shape, context + 1),
        "states": 2.0 * sequences * shape.nets.state_bytes if shape.nets else 0.0,
    }


def step_flops(size: str, rank: int, sequences: int, context: float) -> float:
    """FLOPs of one decode step: products, adapters, head, attention and recurrences; a multiply-add counts two."""
    shape = shape_of(size)
    router = shape.layers * shape.mixture.experts * shape.hidden if shape.mixture else 0
    products = shape.products + router + shape.adapter_numbers(rank) + shape.vocabulary * shape.hidden
    # q k^T and p v: 4 FLOPs per token of the context and element of a head.
    attention = 4 * shape.query_width * _attended(shape, context)
    # A delta net reads its state with the key, changes it, and reads it with the query.
    nets = shape.nets
    recurrence = 6.0 * nets.count * nets.value * nets.key_dim * nets.value_dim if nets else 0.0
    return sequences * (2 * products + attention + recurrence)


def _attended(shape: ModelShape, tokens: float) -> float:
    """The tokens that all blocks with attention read, of `tokens` in the cache."""
    return (shape.attentions - shape.windowed) * tokens + shape.windowed * min(tokens, shape.window)
