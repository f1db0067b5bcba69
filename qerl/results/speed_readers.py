"""Files of the speed grid as tidy data frames, and the floor of a decode step beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from qerl.checkpoints.shapes import ARCHITECTURES, HALF, SIZES, ModelShape, shape_of
from qerl.formats.codecs import stored_bytes
from qerl.results.paths import weights_names
from qerl.results.speeds import (
    SECONDS,
    SERVING,
    Bench,
    Ceilings,
    DecodePoint,
    DecodeResult,
    GrpoStepResult,
    MixRun,
    PromptsResult,
    RolloutBenchResult,
    RolloutMixResult,
    StepBenchResult,
)
from qerl.results.store import ResultError, read
from qerl.settings.models import Base
from qerl.settings.workloads import EngineStep, StepWork

# The floor of a decode step: its least time, by the bytes that it must move and the FLOPs that it must compute.
#
# Each byte counts once, as if caches were perfect. Writes other than to the KV cache and delta nets' states
# (activations, logits) don't count. Both counts are therefore lower bounds for any engine. Experts count as often as
# tokens take them that choose at random; the bytes of a less even choice are fewer.

_FLOAT32 = 4


def mean_context(prompt: int, tokens: int) -> float:
    """The mean number of cached tokens of a sequence over the steps that decode `tokens` after a prompt."""
    return prompt + tokens / 2


def byte_parts(base: Base, rank: int, sequences: int, context: float) -> dict[str, float]:
    """Bytes of one decode step by kind. `context` is the number of cached tokens per sequence before the step.

    Packed weights count as `qerl.models` stores them, with scales and tables (NF4 with double quantization); all
    else is bfloat16, but for routers and recurrent states in float32. Of the embedding one row per sequence is read, of
    the head everything, even if both are tied.
    """
    shape, weights = shape_of(base.model).with_packed_nets(base.packed_nets), base.weights
    norms = (2 * shape.layers + 1) * shape.hidden
    biases = shape.layers * (shape.query_width + 2 * shape.kv_width) * shape.biased
    return {
        "linear": _linear_bytes(shape, weights) + _expert_bytes(shape, weights, sequences),
        "adapter": float(HALF * shape.adapter_numbers(rank)),
        "head": float(HALF * shape.vocabulary * shape.hidden),
        "embedding": float(HALF * sequences * shape.hidden),
        "norms and biases": float(HALF * (norms + biases)),
        "cache": HALF * sequences * 2 * shape.kv_width * _attended(shape, context + 1),
        "states": 2.0 * sequences * shape.nets.state_bytes if shape.nets else 0.0,
    }


def step_bytes(base: Base, rank: int, sequences: int, context: float) -> float:
    """The bytes of one decode step, which are the sum of `byte_parts`."""
    return sum(byte_parts(base, rank, sequences, context).values())


def step_flops(size: str, rank: int, sequences: int, context: float) -> float:
    """FLOPs of one decode step: products, adapters, head, attention and recurrences; a multiply-add counts two."""
    shape = shape_of(size)
    router = shape.layers * shape.mixture.experts * shape.hidden if shape.mixture else 0
    products = shape.products + router + shape.adapter_numbers(rank) + shape.vocabulary * shape.hidden
    # q k^T and p v: 4 FLOPs per token of the context and element of a head.
    attention = 4 * shape.query_width * _attended(shape, context)
    return sequences * (2 * products + attention + _recurrence(shape))


def step_floor(moved: float, flops: float, ceilings: Ceilings) -> float:
    """The least seconds of a step. Moving bytes and computing overlap, so the slower of the two bounds it."""
    return max(moved / ceilings.copy_bytes_per_second, flops / ceilings.matmul_flops_per_second)


def _attended(shape: ModelShape, tokens: float) -> float:
    """The tokens that all blocks with attention read, of `tokens` in the cache."""
    return (shape.attentions - shape.windowed) * tokens + shape.windowed * min(tokens, shape.window)


def _linear_bytes(shape: ModelShape, weights: str) -> float:
    """Bytes of all layers outside of experts."""
    return float(stored_bytes(shape.attention_format(weights), shape.packable) + stored_bytes("bf16", shape.dense))


def _expert_bytes(shape: ModelShape, weights: str, sequences: int) -> float:
    """Bytes of the experts that some sequence takes, in the mean of random choices, and of the routers."""
    if shape.mixture is None:
        return 0.0
    experts = shape.mixture.experts
    taken = experts * (1 - (1 - shape.mixture.chosen / experts) ** sequences)
    return shape.layers * (taken * stored_bytes(weights, shape.expert_linears) + _FLOAT32 * experts * shape.hidden)


def _recurrence(shape: ModelShape) -> float:
    """FLOPs of a token in all delta nets: the state is read with the key, changed, and read with the query."""
    nets = shape.nets
    return 6.0 * nets.count * nets.value * nets.key_dim * nets.value_dim if nets else 0.0


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


def load(paths: Sequence[Path], bench: Bench) -> pd.DataFrame:
    """The files of one bench as a tidy frame with their stamps, sorted by size, engine, weights, rank and lengths.

    A row has its samples in `samples` and their medians in other columns. Where there are none, `status` says why, and
    numbers are NaN. Times end in their unit, memory is in GB. Raises ResultError without rows, and if two files have
    the same point. The rows are

    * decode: points. `tokens_per_second` has quartiles, `engine` its kernels. Without ceilings floors are NaN.
    * grpo_step: files, with seconds and memory by part (`<part>/gb`). `GIVEN_UP` tells what was done without.
    * rollout_mix: files. `workload` has the lengths. The median rollout gives `phases`, `verified` (its drafts) and
      `phase_seconds` (its time). `samples` are in tokens/s.
    * prompts: points, with the `milliseconds` of a call.
    * rollout, step: points of a configuration's benches. `samples` are in tokens/s of whole rollouts, and in seconds.

    The columns `model`, `bench`, `sequences` and, of decode and rollout points, `rollouts` (tokens/s of whole rollouts)
    are those by which numbers stand beside the paper's.
    """
    schema, rows_of, name = _BENCHES[bench]
    rows = [row for path in paths for row in rows_of(read(schema, path))]
    if not rows:
        raise ResultError(f"there are no {name} yet; {_MEASURE}")
    orders = {"size": SIZES, "engine": SERVING, "weights": weights_names()}
    rows.sort(key=lambda row: [orders[key].index(row[key]) if key in orders else row[key] for key in _SORTED[bench]])
    if bench == "decode":
        _check_once(rows)
    return pd.DataFrame(rows)


def _bench_rows(job: RolloutBenchResult | StepBenchResult) -> Iterator[dict[str, Any]]:
    identity = job.model_dump(exclude={"kind", "points", "provenance"}) | job.provenance.columns
    for point in job.points:
        columns = point.model_dump(exclude={"recipe", "pack_delta_nets", "sampler", "prompt_tokens", "varied"})
        columns |= {"weights": point.weights_name, "sequences": point.sequences}
        yield identity | columns | ({"rollouts": point.samples} if job.kind == "rollout" else {})


def _of_paper(size: str, system: str, stamp: dict[str, str]) -> dict[str, str]:
    """The model as configurations name it, and a bench of one system and machine: only its points are compared."""
    model = f"qwen2.5-{size.lower()}" if size in ARCHITECTURES else size
    return {"model": model, "bench": f"{system} on {stamp['machine']}"}


def _mix_rows(job: RolloutMixResult) -> Iterator[dict[str, Any]]:
    work, lengths = job.work, [tokens for group in job.completion_tokens for tokens in group]
    seconds = [run.seconds for run in job.runs]
    samples = [job.drawn / taken for taken in seconds]
    typical = _median_run(job.runs)
    yield {
        **work.model_dump(include={"engine", "size", "weights", "rank", "sequences"}),
        "work": f"{work.prompts} × {work.group_size}, {min(lengths)} to {max(lengths)} tokens, {job.drawn:,} in all"
        + (", drafts" if work.drafts else ""),
        "drafts": work.drafts,
        "trace": str(work.trace or ""),
        "workload": (tuple(job.prompt_tokens), tuple(map(tuple, job.completion_tokens))),
        "status": job.status,
        "samples": samples,
        **quartiles("tokens_per_second", samples),
        "seconds": median(seconds or [np.nan]),
        "ready_seconds": job.ready_seconds,
        "first_seconds": job.first_seconds,
        "phases": typical.phases if typical else None,
        "verified": typical.drafts if typical else None,
        "phase_seconds": typical.seconds if typical else np.nan,
        **job.provenance.columns,
    }


def quartiles(measure: str, samples: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of samples as columns; NaN without any."""
    ends = np.quantile(samples or [np.nan], [0.5, 0.25, 0.75])
    return {f"{measure}{end}": float(value) for end, value in zip(("", "_p25", "_p75"), ends, strict=True)}


def _median_run(runs: Sequence[MixRun]) -> MixRun | None:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2] if runs else None


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
        step, floor = point.sequences / speeds["tokens_per_second"], _floor_seconds(job, point.sequences)
        yield {
            **identity,
            "sequences": point.sequences,
            "status": point.status,
            "samples": point.samples,
            "rollouts": [_with_prompts(point, work.tokens, rate) for rate in point.samples],
            **speeds,
            "step_ms": 1e3 * step,
            "floor_ms": 1e3 * floor,
            "percent_of_floor": 100 * floor / step,
            "peak_memory_gb": np.nan if point.peak_memory_bytes is None else point.peak_memory_bytes / _GB,
            **job.provenance.columns,
            **_of_paper(work.size, work.serving, job.provenance.columns),
        }


def _with_prompts(point: DecodePoint, tokens: int, rate: float) -> float:
    """Tokens/s of a whole rollout, by those of decoding."""
    assert point.prompt_seconds is not None
    drawn = point.sequences * tokens
    return drawn / (drawn / rate + point.prompt_seconds)


def _floor_seconds(job: DecodeResult, sequences: int) -> float:
    if job.ceilings is None:
        return np.nan
    work = job.work
    context = mean_context(work.prompt, work.tokens)
    moved = step_bytes(work.base, work.rank, sequences, context)
    return step_floor(moved, step_flops(work.size, work.rank, sequences, context), job.ceilings)


def _step_rows(job: GrpoStepResult) -> Iterator[dict[str, Any]]:
    work, cap = job.work, job.settings.memory_gb
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
        "work": f"{work.prompts} × {work.group_size}, {work.prompt} + {_completion_tokens(work)} tokens"
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


def _completion_tokens(work: StepWork) -> str:
    return f"{work.median} to {work.tokens}" if work.median else f"{work.tokens}"


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


def _check_once(rows: Sequence[dict[str, Any]]) -> None:
    for one, row in pairwise(rows):  # they are sorted
        if all(one[key] == row[key] for key in _SORTED["decode"]):
            name = f"{row['engine']} {row['size']} {row['weights']} rank {row['rank']}, {row['sequences']} sequences"
            raise ResultError(f"{name} is in two decode files; give one of them")


#: The schema of a bench's files, their rows, and what these are.
_BENCHES: dict[Bench, tuple[type[Any], Callable[[Any], Iterator[dict[str, Any]]], str]] = {
    "decode": (DecodeResult, _point_rows, "points of decode speed"),
    "grpo_step": (GrpoStepResult, _step_rows, "GRPO steps"),
    "rollout_mix": (RolloutMixResult, _mix_rows, "rollouts of mixed lengths"),
    "prompts": (PromptsResult, _prompt_rows, "times of prompts"),
    "rollout": (RolloutBenchResult, _bench_rows, "points of rollouts"),
    "step": (StepBenchResult, _bench_rows, "points of steps"),
}
_SORTED: dict[Bench, list[str]] = {
    "decode": ["size", *POLICY, *LENGTHS, "sequences"],
    "grpo_step": ["size"],
    "rollout_mix": ["size", "engine", "weights"],
    "prompts": [],
    "rollout": [],
    "step": [],
}
