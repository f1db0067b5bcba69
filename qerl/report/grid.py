"""The speed grid as tables: decode speed by engine, weights, rank and sequences, and GRPO steps by system.

Tables have a column a number of sequences. What failed shows its status, what wasn't measured a dash; points are
compared on one machine only. `percent_of_floor` is the floor of `qerl.results.roofline` over the measured step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
from pydantic import AfterValidator

from qerl.bench.sizes import SHAPES
from qerl.config import WeightFormat
from qerl.report.formatting import cell_text, present, three_digits, times, weights_label
from qerl.report.goals import write_goals
from qerl.report.grid_paper import write_rollout_tables, write_step_tables
from qerl.report.ratios import NOT_MEASURED, Row, faster, ratio
from qerl.report.tables import caption_text, write_table
from qerl.results.readers import ResultError, read
from qerl.results.roofline import Ceilings, mean_context, step_bytes, step_floor, step_flops
from qerl.results.schema.stored import OK, Measured, Provenance, Stored

Engine = Literal["native", "vllm", "transformers"]
ENGINES: tuple[str, ...] = get_args(Engine)

_GB = 1e9
_KEY = ["engine", "weights", "rank"]
#: Tokens of a prompt and decoded ones: points of other lengths are other tables.
_LENGTHS = ["prompt", "tokens"]
#: What the ratio of two weights is told by.
_CROSSED = ["size", "engine", "rank", *_LENGTHS]
_MEASURE = "`qerl grid` lists the commands that measure"
_SAMPLES = "Medians of the repeats"
_INTERVAL = "95 % intervals: percentile bootstrap of the medians over the repeats"
_DASH = f"{NOT_MEASURED}: not measured"
_CROSSES = (
    "crosses 1 at: the number of sequences, interpolated over its logarithm; > n: NVFP4 is the faster at all numbers, "
    "≤ n: at none"
)
_FLOOR = (
    "the floor is the least time of a step, its bytes over the bandwidth of a copy or its FLOPs over the rate of a "
    "BF16 product, both measured in the same job; NF4 counts with double quantization"
)


# --- files -----------------------------------------------------------------------------------------------------------


def _known_shape(size: str) -> str:
    if size not in SHAPES:
        raise ValueError(f"there is no shape {size}; use one of {', '.join(SHAPES)}")
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


def load_points(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a point of decode files, sorted by size, engine, weights, rank, lengths and sequences.

    Times in ms, memory in GB, `tokens_per_second` the median with its quartiles; not numbers where the point failed,
    the floor's where there are no ceilings. A ResultError where there are no points, and where two files have the same.
    """
    rows = [row for path in paths for row in _point_rows(read(Decode, path))]
    if not rows:
        raise ResultError(f"there are no points of decode speed yet; {_MEASURE}")
    rows.sort(key=_place)
    points = pd.DataFrame(rows)
    _check_once(points)
    return points


def load_steps(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a file of GRPO steps: median seconds by part, memory in GB (`<part>/gb`); ResultError without files.

    `samples` are the seconds of each step, `prompt` and `tokens` the lengths of prompts and completions.

    Where a system came to no result there are no numbers, and `status` says why.
    """
    if not paths:
        raise ResultError(f"there are no GRPO steps yet; {_MEASURE}")
    jobs = sorted((read(GrpoStep, path) for path in paths), key=lambda job: [*SHAPES].index(job.work.size))
    return pd.DataFrame([_step_row(job) for job in jobs])


def _point_rows(job: Decode) -> Iterator[dict[str, Any]]:
    identity = job.model_dump(include={"engine", "size", "weights", "rank", "prompt", "tokens"})
    for point in job.points:
        samples = point.samples or [np.nan]
        middle, low, high = (float(value) for value in np.quantile(samples, [0.5, 0.25, 0.75]))
        step, floor = point.sequences / middle, _floor_seconds(job, point.sequences)
        yield {
            **identity,
            "sequences": point.sequences,
            "status": point.status,
            "samples": point.samples,
            "prompt_seconds": point.prompt_seconds,
            "tokens_per_second": middle,
            "tokens_per_second_p25": low,
            "tokens_per_second_p75": high,
            "step_ms": 1e3 * step,
            "floor_ms": 1e3 * floor,
            "percent_of_floor": 100 * floor / step,
            "peak_memory_gb": np.nan if point.peak_memory_bytes is None else point.peak_memory_bytes / _GB,
            **job.provenance.columns,
        }


def _floor_seconds(job: Decode, sequences: int) -> float:
    if job.ceilings is None:
        return np.nan
    context = mean_context(job.prompt, job.tokens)
    moved = step_bytes(job.size, job.weights, job.rank, sequences, context)
    return step_floor(moved, step_flops(job.size, job.rank, sequences, context), job.ceilings)


def _step_row(job: GrpoStep) -> dict[str, Any]:
    work, cap = job.work, job.settings.memory_gb
    seconds = {part: [getattr(step, part) for step in job.steps] or [np.nan] for part in StepSeconds.model_fields}
    return {
        "system": job.system,
        "sampler": job.sampler,
        "size": work.size,
        "weights": work.weights,
        "rank": work.rank,
        "prompts": work.prompts,
        "group_size": work.group,
        "prompt": work.prompt_tokens,
        "tokens": work.completion_tokens,
        "work": f"{work.prompts} × {work.group}, {work.prompt_tokens} + {work.completion_tokens} tokens",
        "recompute": str(job.settings.recompute).lower(),
        "cap": "" if cap is None else f"{cap:g} GB",
        "status": job.status,
        "repeats": len(job.steps),
        "samples": [step.step for step in job.steps],
        **{f"{part}_seconds": median(values) for part, values in seconds.items()},
        **{f"{part.replace('_', ' ')}/gb": value / _GB for part, value in _memory_parts(job).items()},
        **job.provenance.columns,
    }


def _memory_parts(job: GrpoStep) -> dict[str, float]:
    memory = job.memory
    if memory is None:
        return {}
    peaks = {part: [getattr(step, f"{part}_peak_bytes") for step in job.steps] for part in ("rollout", "update")}
    told = {f"{part} peak": max(values) for part, values in peaks.items() if None not in values}
    return {
        **told,
        "without KV cache": memory.without_kv_cache_bytes,
        "KV cache": memory.kv_cache_bytes,
        **memory.parts,
    }


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    orders = {"size": [*SHAPES], "engine": ENGINES, "weights": get_args(WeightFormat)}
    numbers = (row[key] for key in ("rank", *_LENGTHS, "sequences"))
    return (*(order.index(row[key]) for key, order in orders.items()), *numbers)


def _check_once(points: pd.DataFrame) -> None:
    twice = points[points.duplicated(["size", *_KEY, *_LENGTHS, "sequences"])]
    if len(twice):
        row = twice.iloc[0]
        name = f"{row['engine']} {row['size']} {row['weights']} rank {row['rank']}, {row['sequences']} sequences"
        raise ResultError(f"{name} is in two decode files; give one of them")


# --- tables ----------------------------------------------------------------------------------------------------------


def decode_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Median tokens a second of a size: a row an (engine, weights, rank)."""
    return _value_table(_of_size(points, size), "tokens_per_second")


def floor_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Percent of the floor of a size: a row an (engine, weights, rank)."""
    return _value_table(_of_size(points, size), "percent_of_floor")


def ratio_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Native over vLLM of a size and the same rank, with 95 % intervals; two rows each native (weights, rank).

    One row is against the faster of vLLM's BF16 and NVFP4 for each number of sequences, one against vLLM on the same
    weights. Without any base a row is left out.
    """
    chosen = _of_size(points, size)
    found = {(*(point[key] for key in _KEY), point["sequences"]): point for point in chosen.to_dict("records")}
    counts = _counts(chosen)
    rows = []
    for weights, rank in dict.fromkeys((weights, rank) for engine, weights, rank, _ in found if engine == "native"):
        own = [found.get(("native", weights, rank, count)) for count in counts]
        fastest = [faster([found.get(("vllm", base, rank, count)) for base in ("bf16", "nvfp4")]) for count in counts]
        same = [found.get(("vllm", weights, rank, count)) for count in counts]
        for against, bases in (("faster of BF16, NVFP4", fastest), (weights_label(weights), same)):
            key = {"weights": weights, "rank": rank, "against vLLM": against}
            rows.append(key | _ratio_columns(counts, own, bases))
    return _measured_rows(rows, counts)


def crossover(points: pd.DataFrame) -> pd.DataFrame:
    """NVFP4 over BF16 of each (size, engine, rank, prompt, tokens), with 95 % intervals, and where it `crosses` 1.

    Rows that have neither are left out.
    """
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(_CROSSED, sort=False):
        found = {(point["weights"], point["sequences"]): point for point in group.to_dict("records")}
        above, below = ([found.get((weights, count)) for count in counts] for weights in ("nvfp4", "bf16"))
        ratios = _ratio_columns(counts, above, below)
        rows.append(dict(zip(_CROSSED, key, strict=True)) | {"crosses": _crosses(counts, ratios)} | ratios)
    return _measured_rows(rows, counts)


def adapters(points: pd.DataFrame) -> pd.DataFrame:
    """Speed with an adapter over that without one of each (size, engine, weights, rank), with 95 % intervals.

    Points of one length; rows that have neither are left out.
    """
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(["size", "engine", "weights"], sort=False):
        found = {(point["rank"], point["sequences"]): point for point in group.to_dict("records")}
        without = [found.get((0, count)) for count in counts]
        for rank in sorted({rank for rank, _ in found} - {0}):
            own = [found.get((rank, count)) for count in counts]
            named = dict(zip(("size", "engine", "weights"), key, strict=True)) | {"rank": rank}
            rows.append(named | _ratio_columns(counts, own, without))
    return _measured_rows(rows, counts)


def contexts(points: pd.DataFrame) -> pd.DataFrame:
    """Those points that were measured with prompts of several lengths, all else alike."""
    alike = [name for name in _CROSSED if name != "prompt"]
    return points[points.groupby(alike)["prompt"].transform("nunique") > 1]


def memory_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Memory of a GRPO step by part in GB: a row a (size, system); a part that a system doesn't tell is in `rest`."""
    parts = [name for name in map(str, steps) if name.endswith("/gb")]
    parts.sort(key=lambda name: name == "rest/gb")
    return steps[["size", "system", "work", "recompute", "cap", "status", *parts]]


def step_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of a GRPO step and its parts: a row a (size, system)."""
    seconds = [f"{part}_seconds" for part in StepSeconds.model_fields]
    return steps[["size", "system", "sampler", "rank", "work", "recompute", "cap", "status", *seconds, "repeats"]]


def count_columns(table: pd.DataFrame) -> list[str]:
    """The columns that are numbers of sequences."""
    return [str(column) for column in table if str(column).isdigit()]


def _of_size(points: pd.DataFrame, size: str) -> pd.DataFrame:
    return points[points["size"] == size]


def _counts(points: pd.DataFrame) -> list[int]:
    return sorted(set(points["sequences"]))


def _value_table(points: pd.DataFrame, column: str) -> pd.DataFrame:
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(_KEY, sort=False):
        found = {point["sequences"]: point for point in group.to_dict("records")}
        values = {str(count): _value(found.get(count), column) for count in counts}
        rows.append(dict(zip(_KEY, key, strict=True)) | values)
    return pd.DataFrame(rows)


def _value(point: Row | None, column: str) -> float | str:
    if point is None:
        return NOT_MEASURED
    if point["status"] != OK:
        return str(point["status"])
    return "no ceilings" if np.isnan(point[column]) else float(point[column])


def _ratio_columns(counts: Iterable[int], above: Iterable[Row | None], below: Iterable[Row | None]) -> Row:
    columns: Row = {}
    for count, *pair in zip(counts, above, below, strict=True):
        columns |= {f"{count}{end}": value for end, value in zip(("", "_low", "_high"), ratio(*pair), strict=True)}
    return columns


def _crosses(counts: Iterable[int], ratios: Row) -> str:
    """The numbers of sequences where a ratio passes 1; where it never does, on which side of those measured."""
    measured = [(count, ratios[str(count)]) for count in counts if not isinstance(ratios[str(count)], str)]
    if not measured:
        return NOT_MEASURED
    found = []
    for (left, before), (right, after) in pairwise(measured):
        if (before > 1) != (after > 1):
            found.append(f"{left * (right / left) ** ((before - 1) / (before - after)):.0f}")
    (first, at_first), (last, _) = measured[0], measured[-1]
    return ", ".join(dict.fromkeys(found)) or (f"> {last}" if at_first > 1 else f"≤ {first}")


def _measured_rows(rows: Iterable[Row], counts: Iterable[int]) -> pd.DataFrame:
    """The rows that have more than dashes."""
    return pd.DataFrame([row for row in rows if any(row[str(count)] != NOT_MEASURED for count in counts)])


# --- writing ---------------------------------------------------------------------------------------------------------


def write_all(files: Sequence[Path], out: Path) -> None:
    """Write to `out` all tables (.csv, .md, .tex) and figures (.svg, .png) of files of points and of GRPO steps.

    decode-<size>-<lengths>, floor-..., ratio-..., crossover-<lengths>, adapters-..., with figures
    decode-rank<rank>-<lengths> and crossover-rank<rank>-<lengths>, lengths as in 128x256; of prompts of several lengths
    contexts-<tokens>, with figures contexts-rank<rank>-<tokens>; steps, memory; goals (`qerl.report.goals`). Tables
    without a row are left out. ResultError without any file. Of points and steps at the paper's lengths, its tables too
    (`qerl.report.grid_paper`).
    """
    kinds = {path: read(Kind, path).bench for path in files}
    decode, steps = ([path for path, kind in kinds.items() if kind == wanted] for wanted in ("decode", "grpo_step"))
    points = measured = pd.DataFrame()
    if decode or not steps:
        points = load_points(decode)
        for lengths, group in points.groupby(_LENGTHS, sort=False):
            _write_decode(group, out, "{}x{}".format(*lengths))
        for tokens, group in contexts(points).groupby("tokens"):
            _write_contexts(group, out, f"{tokens}")
        write_rollout_tables(points, out)
    if steps:
        measured = load_steps(steps)
        _write_steps(measured, out)
        write_step_tables(measured, out)
    write_goals(points, measured, out / "goals")


def _write_decode(points: pd.DataFrame, out: Path, lengths: str) -> None:
    from qerl.report import grid_figures

    for size, group in points.groupby("size", sort=False):
        _write_size(str(size), group, out, lengths)
    measured = f"by number of sequences; {_lengths(points)}"
    title = f"Decode speed of NVFP4 over BF16 {measured}. {_INTERVAL}. {_CROSSES}. {_DASH}"
    _write_counts(crossover(points), out / f"crossover-{lengths}", title, points, times)
    cost = f"Decode speed with an adapter over that without {measured}. {_INTERVAL}. {_DASH}"
    _write_counts(adapters(points), out / f"adapters-{lengths}", cost, points, times)
    for rank, group in points.groupby("rank"):
        grid_figures.decode_speed(group, out / f"decode-rank{rank}-{lengths}")
        if not crossover(group).empty:
            grid_figures.crossover_by_sequences(crossover(group), out / f"crossover-rank{rank}-{lengths}")


def _write_contexts(points: pd.DataFrame, out: Path, tokens: str) -> None:
    from qerl.report import grid_figures

    measured = f"by tokens of the prompt and number of sequences; {tokens} decoded"
    title = f"Decode speed of NVFP4 over BF16 {measured}. {_INTERVAL}. {_CROSSES}. {_DASH}"
    _write_counts(crossover(points), out / f"contexts-{tokens}", title, points, times)
    for rank, group in points.groupby("rank"):
        if not crossover(group).empty:
            grid_figures.crossover_by_context(crossover(group), out / f"contexts-rank{rank}-{tokens}")


def _write_size(size: str, points: pd.DataFrame, out: Path, lengths: str) -> None:
    measured, of = f"{size} by number of sequences; {_lengths(points)}", f"{size}-{lengths}"
    speed = f"Decoded tokens/s of {measured}. {_SAMPLES}. {_DASH}"
    _write_counts(decode_table(points, size), out / f"decode-{of}", speed, points, three_digits)
    share = f"Floor over measured time of a decode step (%), {measured}; {_FLOOR}. {_SAMPLES}. {_DASH}"
    _write_counts(floor_table(points, size), out / f"floor-{of}", share, points, lambda percent: f"{percent:.0f}")
    lead = f"Decode speed of the native engine over vLLM's, {measured}, the same rank. {_INTERVAL}. {_DASH}"
    _write_counts(ratio_table(points, size), out / f"ratio-{of}", lead, points, times)


def _write_steps(steps: pd.DataFrame, out: Path) -> None:
    medians = f"Seconds of a GRPO step, prompts × completions of each, prompt + completion tokens. {_SAMPLES}"
    write_table(step_table(steps), out / "steps", caption_text(medians, steps[["machine", "commit"]]))
    parts = (
        "Memory of a GRPO step at its highest peak by part, GB of 10^9 bytes; the parts without the KV cache make up "
        "the column of that name, a part that a system doesn't tell is in rest. A cache with less memory than it could "
        "use is given back before the update, so that the highest peak may be the rollout's"
    )
    write_table(memory_table(steps), out / "memory", caption_text(parts, steps[["machine", "commit"]]))


def _lengths(points: pd.DataFrame) -> str:
    return f"prompts of {points['prompt'].iloc[0]} tokens, {points['tokens'].iloc[0]} decoded"


def _write_counts(
    table: pd.DataFrame, stem: Path, title: str, points: pd.DataFrame, text: Callable[[float], str]
) -> None:
    """Write a table whose cells by number of sequences are values or the reason why there is none."""
    if table.empty:
        return
    counts = count_columns(table)
    keys = [column for column in table if str(column).partition("_")[0] not in counts]
    shown = present(table[keys])
    for count in counts:
        shown[count] = [cell_text(row, count, _or_reason(text)) for row in table.to_dict("records")]
    write_table(table, stem, caption_text(title, points[["machine", "commit"]]), shown)


def _or_reason(text: Callable[[float], str]) -> Callable[[float | str], str]:
    return lambda value: value if isinstance(value, str) else text(value)
