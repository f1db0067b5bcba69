"""The report of the speed grid: its tables, each by a specification, its figures, and the paper's numbers beside them.

Rows are made of the frames of `qerl.results.speeds`. A failed point shows its status, a point that wasn't
measured a dash. Only points of the same machine are compared. `machine` has the machines of a row's points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import numpy as np
import pandas as pd

from qerl.checkpoints.shapes import QWEN
from qerl.report import paper
from qerl.report.figures import bars_beside, decode_speed
from qerl.report.format import (
    DIFFERENT_MACHINES,
    caption_text,
    cell_text,
    gpu_label,
    present,
    three_digits,
    times,
    weights_label,
    with_gpus,
    write_table,
)
from qerl.report.paper import Point, beside, cells_of
from qerl.report_jobs import ShapesJob
from qerl.results import printed
from qerl.results.schema import OK, Head, read
from qerl.results.speeds import GIVEN_UP, LENGTHS, POLICY, SECONDS, load
from qerl.results.statistics import ENDS, ratio_interval

# Ratios of points: the quotient of their medians, or the reason why there is none.

NOT_MEASURED = "–"


def ratio(above: Point | None, below: Point | None) -> tuple[float | str, float, float]:
    """The ratio of two points' medians (None: not measured) and its interval, or the reason why there is none."""
    if above is None or below is None:
        return NOT_MEASURED, np.nan, np.nan
    for point in (above, below):
        if point["status"] != OK:
            return f"{point['engine']} {weights_label(point['weights'])}: {point['status']}", np.nan, np.nan
    if above["machine"] != below["machine"]:
        return DIFFERENT_MACHINES, np.nan, np.nan
    interval = ratio_interval(above["samples"], below["samples"])
    return interval.mean, interval.low, interval.high


_NO_SPEEDUP = {**dict.fromkeys((f"speedup{end}" for end in ENDS), np.nan), "note": ""}


def _speedup(above: Point | None, below: Point | None) -> Point:
    """The ratio of two points as columns, or a note that says why there is none."""
    value, low, high = ratio(above, below)
    found = {"note": value} if isinstance(value, str) else {"speedup": value}
    return {**_NO_SPEEDUP, "speedup_low": low, "speedup_high": high, **found}


def _faster(points: Sequence[Point | None]) -> Point | None:
    """The fastest point that didn't fail. None if some point wasn't measured, because it may be faster."""
    measured = [point for point in points if point is not None]
    if len(measured) < len(points):
        return None
    done = (point for point in measured if point["status"] == OK)
    return max(done, key=lambda point: float(point["tokens_per_second"]), default=measured[0])


def _machines(points: Iterable[Point | None]) -> str:
    return ", ".join(dict.fromkeys(str(point["machine"]) for point in points if point is not None))


def _value(point: Point | None, column: str) -> float | str:
    if point is None:
        return NOT_MEASURED
    if point["status"] != OK:
        return str(point["status"])
    return "no floor" if np.isnan(point[column]) else float(point[column])


# Rows of decode points, with a column per number of sequences.


def decode_table(points: pd.DataFrame, column: str = "tokens_per_second") -> pd.DataFrame:
    """A column's values at one size, by default median tokens/s, with a row per (engine, weights, rank)."""
    rows = []
    for key, group in points.groupby(POLICY, sort=False):
        cells = {point["sequences"]: point for point in group.to_dict("records")}
        values = {str(count): _value(cells.get(count), column) for count in sorted(set(points["sequences"]))}
        rows.append(dict(zip(POLICY, key, strict=True)) | {"machine": _machines(cells.values())} | values)
    return pd.DataFrame(rows)


def ratio_table(points: pd.DataFrame) -> pd.DataFrame:
    """Speed ratios of the native engine to vLLM at one size and the same rank, with 95 % intervals.

    Each (weights, rank) has two rows: against the faster of vLLM's BF16 and NVFP4 for each number of sequences, and
    against vLLM on the same weights. Where ours has packed delta nets, vLLM's with them is among the former. A row
    without any base is left out.
    """
    cells = {(*(point[key] for key in POLICY), point["sequences"]): point for point in points.to_dict("records")}
    counts = sorted(set(points["sequences"]))
    rows = []
    for weights, rank in dict.fromkeys((weights, rank) for engine, weights, rank, _ in cells if engine == "native"):
        ours = [cells.get(("native", weights, rank, count)) for count in counts]
        rivals = dict.fromkeys(("bf16", "nvfp4", *([weights] if weights.startswith("nvfp4") else ())))
        fastest = [_faster([cells.get(("vllm", base, rank, count)) for base in rivals]) for count in counts]
        same = [cells.get(("vllm", weights, rank, count)) for count in counts]
        of = f"faster of {', '.join(map(weights_label, rivals))}"
        for against, bases in ((of, fastest), (weights_label(weights), same)):
            row: Point = {"weights": weights, "rank": rank, "against vLLM": against}
            row["machine"] = _machines([*ours, *bases])
            found = [ratio(*pair) for pair in zip(ours, bases, strict=True)]
            for count, values in zip(counts, found, strict=True):
                row |= {f"{count}{end}": value for end, value in zip(ENDS, values, strict=True)}
            if any(value != NOT_MEASURED for value, _, _ in found):
                rows.append(row)
    return pd.DataFrame(rows)


# Rows of GRPO steps: seconds, and memory.

_STEP = ["size", "system", "sampler", "rank", "work", "recompute", "cap", "machine", "status"]


def step_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of each GRPO step and of its parts."""
    return timed[[*_STEP, *(f"{part}_seconds" for part in SECONDS), "repeats"]]


def memory_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Memory of a GRPO step by part in GB, parts that a system doesn't report in `rest`, and what it did without."""
    parts = sorted((name for name in map(str, timed) if name.endswith("/gb")), key=lambda name: name == "rest/gb")
    return timed[[*(name for name in _STEP if name not in ("sampler", "rank")), *parts, *GIVEN_UP]]


# Rows of rollouts of mixed lengths: end-to-end tokens/s compared with vLLM's, and our engine's time by phase.

_MIX = ["size", "engine", "weights", "rank", "work", "sequences", "machine", "status", "tokens_per_second"]
_MIX += ["tokens_per_second_p25", "tokens_per_second_p75", "seconds", "ready_seconds", "first_seconds"]


def mix_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """One row per engine and weight format; ours have the speed-up over vLLM's faster one, or a note why not."""
    rows, shown = mixes.to_dict("records"), []
    for row in rows:
        made = {**{key: row[key] for key in _MIX}, **_NO_SPEEDUP}
        if row["engine"] != "vllm":
            same = [
                one for one in rows if all(one[key] == row[key] for key in ("size", "rank", "sequences", "workload"))
            ]
            rivals = {one["weights"]: one for one in reversed(same) if one["engine"] == "vllm"}
            made |= _speedup(row, _faster([rivals.get("bf16"), rivals.get("nvfp4")]))
        shown.append({**made, "repeats": len(row["samples"])})
    return pd.DataFrame(shown)


def phase_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """Seconds of the median rollout, with a row per rollout and phase, and the phase's share in %."""
    return pd.DataFrame([phase for row in mixes.to_dict("records") if row["phases"] for phase in _phases(row)])


def _phases(row: Point) -> Iterator[Point]:
    phases, whole = row["phases"], row["phase_seconds"]
    key = {name: row[name] for name in ("size", "weights", "rank", "work", "machine")}
    parts: list[Point] = [{"phase": "prefill and first tokens", "seconds": phases.prefill, "steps": phases.prefills}]
    for decode in reversed(phases.decode):
        steps = decode.model_dump(include={"seconds", "steps", "sequences"})
        parts.append({"phase": f"decode, batch of {decode.batch}", **steps})
    parts.append({"phase": "between steps", "seconds": phases.between})
    parts.append({"phase": "before and after", "seconds": whole - sum(part["seconds"] for part in parts)})
    for part in parts:
        per_step = 1e3 * part["seconds"] / part["steps"] if "steps" in part else np.nan
        yield {**key, **part, "share": 100 * part["seconds"] / whole, "ms/step": per_step}
    yield {**key, "phase": "host waits during these", "seconds": phases.host_wait}


# Rows of several runs in one engine, of decode points or of rollouts of mixed lengths.

#: What points that differ in their runs alone have in common.
_ONE_RUN = ["size", "engine", "weights", "rank", "work", "workload", *LENGTHS, "sequences"]


def cohort_table(points: pd.DataFrame) -> pd.DataFrame:
    """Tokens/s of all runs, and their speed-up over one after another, whose rate is that of one; or a note why not.

    What was measured with one run alone is left out.
    """
    keys, shown = [key for key in _ONE_RUN if key in points], []
    for _, group in points.groupby(keys, sort=False):
        rows = group.sort_values("runs").to_dict("records")
        alone = next((row for row in rows if row["runs"] == 1), None)
        for row in rows if rows[-1]["runs"] > 1 else ():
            made = {key: row[key] for key in (*keys, "runs", "machine", "status") if key != "workload"}
            made |= {f"tokens_per_second{end}": row[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75")}
            made |= _speedup(row, alone) if row["runs"] > 1 else _NO_SPEEDUP
            shown.append({**made, "repeats": len(row["samples"])})
    return pd.DataFrame(shown)


# Rows of prompts: milliseconds of a call that draws a token after each prompt.


def prompt_table(prompts: pd.DataFrame) -> pd.DataFrame:
    """Median milliseconds of the calls of one size, with a row per (prompts, tokens) and a column per (weights, rank).

    A call that failed shows its status, one that wasn't measured a dash. Columns of several machines name their GPU.
    """
    policies: dict[str, dict[tuple[int, int], Point]] = {}
    several = prompts["machine"].nunique() > 1
    for point in prompts.sort_values(["weights", "rank"]).to_dict("records"):
        policy = f"{weights_label(point['weights'])} r{point['rank']}"
        policy += f", {gpu_label(point['machine'])}" if several else ""
        policies.setdefault(policy, {})[point["prompts"], point["tokens"]] = point
    return pd.DataFrame(
        {"prompts": count, "tokens": tokens}
        | {name: _value(points.get((count, tokens)), "milliseconds") for name, points in policies.items()}
        for count, tokens in sorted({call for points in policies.values() for call in points})
    )


# The tables, each by its specification.


def _by_count(text: Callable[[float], str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Makes the text of a table with a column per number of sequences, whose cells are values or reasons."""

    def or_reason(value: float | str) -> str:
        return value if isinstance(value, str) else text(value)

    def shown(rows: pd.DataFrame) -> pd.DataFrame:
        counts = [str(column) for column in rows if str(column).isdigit()]
        keys = [column for column in rows if str(column).partition("_")[0] not in counts]
        cells = {count: [cell_text(row, count, or_reason) for row in rows.to_dict("records")] for count in counts}
        return present(rows[keys]).assign(**cells)

    return shown


def _digits(rows: pd.DataFrame) -> pd.DataFrame:
    """The text of a table whose numbers have three digits, but for counts of steps, and whose headings stay."""

    def text(value: object) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else three_digits(value)
        return str(value)

    shown = rows.map(text)
    if "steps" in rows:
        shown["steps"] = rows["steps"].map(lambda steps: "" if np.isnan(steps) else f"{steps:.0f}")
    return shown


@dataclass(frozen=True)
class Table:
    """A table of a bench's rows. Its name and title have the columns in braces by whose values the rows are split."""

    bench: str
    name: str
    rows: Callable[[pd.DataFrame], pd.DataFrame]
    title: str
    shown: Callable[[pd.DataFrame], pd.DataFrame] = present
    several: bool = False
    """Whether it has several runs in one engine, which other tables leave out."""

    @property
    def by(self) -> list[str]:
        """The columns by whose values the rows are split."""
        return [column for _, column, _, _ in Formatter().parse(self.name) if column]


_SAMPLES = "Medians of the repeats"
_INTERVAL = "95 % intervals: percentile bootstrap of the medians over the repeats"
_DASH = f"{NOT_MEASURED}: not measured"
_COHORT = (
    "LoRA adapters of several runs on one base in one engine, {what}: tokens per second of all runs, median "
    "[quartiles] of the repeats. {each} are of each run. The speed-up is over the same runs one after another, whose "
    "rate is that of one, with a 95 % interval (percentile bootstrap of the medians)"
)
_LENGTHS = "prompts of {prompt} tokens, {tokens} tokens decoded"
_FLOOR = (
    "the floor is the least time of a step: the larger of its bytes over the rate of copies and its FLOPs over the "
    "rate of BF16 products, both measured in the same job; NF4 has double quantization, and experts are read as often "
    "as random choices take them"
)
TABLES = (
    Table(
        "rollout_mix", "mixes", mix_table,
        "Rollouts of completions of mixed lengths, the same for all engines: tokens per second end to end, median "
        "[quartiles] of the repeats. Admission, prefill and the tail of the last sequences count. The speed-up is over "
        "the faster of vLLM's BF16 and NVFP4 with a 95 % interval (percentile bootstrap of the medians). Start-up: "
        "until the engine takes requests; first rollout: with the kernels that it compiles and the graphs that it "
        "captures",
    ),
    Table(
        "rollout_mix", "mix-phases", phase_table,
        "Time of our engine's median rollout by phase, measured on the device. A decode row has the steps of one size "
        "of batch, and the mean number of sequences in them. Between steps: the device copies results, or waits for "
        "the host. Before and after: before the first launch and after the last",
        _digits,
    ),
    Table(
        "rollout_mix", "cohorts-mixes", cohort_table,
        _COHORT.format(what="rollouts of completions of mixed lengths end to end", each="Prompts and completions"),
        several=True,
    ),
    Table(
        "decode", "cohorts-decode", cohort_table,
        _COHORT.format(what="decoding without prompts", each="Sequences"),
        several=True,
    ),
    Table(
        "prompts", "prompts-{size}", prompt_table,
        "Milliseconds of a call of our engine that draws a token after each prompt, {size}, by the number of "
        f"prompts and the tokens of each. {_SAMPLES}. {_DASH}",
        _digits,
    ),
    Table(
        "decode", "decode-{size}-{prompt}x{tokens}", decode_table,
        f"Decoded tokens/s of {{size}} by number of sequences; {_LENGTHS}. {_SAMPLES}. {_DASH}",
        _by_count(three_digits),
    ),
    Table(
        "decode", "floor-{size}-{prompt}x{tokens}", lambda points: decode_table(points, "percent_of_floor"),
        f"Floor over measured time of a decode step (%), {{size}} by number of sequences; {_LENGTHS}; {_FLOOR}. "
        f"{_SAMPLES}. {_DASH}",
        _by_count(lambda percent: f"{percent:.0f}"),
    ),
    Table(
        "decode", "ratio-{size}-{prompt}x{tokens}", ratio_table,
        f"Decode speed of the native engine over vLLM's at the same rank, {{size}} by number of sequences; {_LENGTHS}. "
        f"{_INTERVAL}. {_DASH}",
        _by_count(times),
    ),
    Table(
        "grpo_step", "steps", step_table,
        f"Seconds of a GRPO step; work: prompts × completions of each, prompt + completion tokens. {_SAMPLES}",
    ),
    Table(
        "grpo_step", "memory", memory_table,
        "Memory of a GRPO step at its highest peak by part, in GB (10^9 bytes). The parts except the KV cache add up "
        "to the column without KV cache; rest includes parts that a system doesn't report. A cache with less memory "
        "than it could use is released before the update, so that the highest peak may be the rollout's. A cap stands "
        "in for a smaller GPU, and doesn't count CUDA's context. Cache share: of one with which no sequence waits; "
        "recomputed: most blocks of a micro-batch",
    ),
)  # fmt: skip


def write_shapes(job: ShapesJob) -> None:
    """Write all tables (.csv, .md, .tex) and figures (.svg, .png) of the files to `job.out`.

    Figures are decode-rank<rank>-<lengths>. Tables without a row are left out. At the paper's lengths its tables are
    there, too. Raises ResultError without any file.
    """
    of_bench: dict[str, list[Path]] = {}
    for file in job.files:
        of_bench.setdefault(read(Head, file).of_bench, []).append(file)
    together = {bench: load(files, bench) for bench, files in (of_bench or {"decode": []}).items()}
    frames = {bench: rows[rows["runs"] == 1] if "runs" in rows else rows for bench, rows in together.items()}
    for table in (one for one in TABLES if one.bench in frames):
        records = (together if table.several else frames)[table.bench]
        for key, part in records.groupby(table.by, sort=False) if table.by else [((), records)]:
            values = dict(zip(table.by, key, strict=True))
            rows = table.rows(part)
            if not rows.empty:
                rows = with_gpus(rows, part) if "machine" in rows else rows
                caption = caption_text(table.title.format(**values), part[["machine", "commit"]])
                write_table(rows, job.out / table.name.format(**values), caption, table.shown(rows))
    points, timed = (frames.get(bench, pd.DataFrame()) for bench in ("decode", "grpo_step"))
    for (rank, *lengths), group in points.groupby(["rank", *LENGTHS]) if len(points) else ():
        decode_speed(group, job.out / "decode-rank{}-{}x{}".format(rank, *lengths))
    write_rollout_tables(points, job.out)
    write_step_tables(timed, job.out)


# The paper's speeds beside the speed grid's: rollouts (Tables 5 to 9, Figures 1 and 11) and GRPO steps.
#
# The paper's lengths are prompts of 256 tokens and completions of 2,048. It doesn't state what its batch size counts:
# one reading takes it as concurrent sequences, another as prompts of 8 completions each. It measured with vLLM; here
# each engine has its own tables. So has each system that makes steps, compared with its own BF16 LoRA.

#: By reading of the paper's batch size: the number of sequences that a batch size of one means, and what it counts.
READINGS = {"sequences": (1, "concurrent sequences"), "prompts": (8, "prompts of 8 completions")}
ROLLOUT_TABLES = ("table5", "table6", "table7", "table8", "table9")
STEP_TABLES = ("table5", "table6", "table7", "table8")


def write_rollout_tables(points: pd.DataFrame, out: Path) -> None:
    """Write the tables and figures <name>-<engine>-<reading> that have at least one measured point.

    points: of `speeds.load`, or none; points of other models and lengths are ignored.
    """
    for engine, reading, counted, bench in _readings(points, "engine"):
        results = [*paper.rollouts(bench)]
        for name in ROLLOUT_TABLES:
            title = f"Rollout throughput beside the paper's {_title(name, engine, counted)}"
            _write(beside(cells_of(name, kinds=["rollout"]), results), out / f"{name}-{engine}-{reading}", title, bench)
        for name, files in printed.BARS.items():
            frame = beside(cells_of(*files, kinds=["rollout"]), results)
            if (frame["status"] == OK).any():
                bars_beside(frame, out / f"{name}-{engine}-{reading}")


def write_step_tables(measured: pd.DataFrame, out: Path) -> None:
    """Write table5 to table8-<system>-<reading>, and table3-<system>-<reading>-gc-on and -off.

    Table 3 has both because the paper doesn't state its gradient checkpointing. Tables without a measured step are left
    out.

    measured: of `speeds.load`, or none; steps of other models, of other or mixed lengths, under a memory cap,
        with equal rewards, or whose system chooses what to recompute are ignored.
    """
    if measured.empty:
        return
    plain = (measured["equal_groups"] == 0) & (measured["median"] == 0) & (measured["cap"] == "")
    measured = measured[plain & (measured["gradient_checkpointing"] != "auto")]
    for system, reading, counted, bench in _readings(
        measured.assign(system=measured["system"].str.split().str[0]), "system"
    ):
        stem = f"{system.lower()}-{reading}"
        for name in STEP_TABLES:
            _write_steps(name, bench, out / f"{name}-{stem}", _title(name, system, counted))
        for on in (True, False):
            group = bench[bench["gradient_checkpointing"] == on]
            title = f"{_title('table3', system, counted)}, {'with' if on else 'without'} gradient checkpointing"
            _write_steps("table3", group, out / f"table3-{stem}-gc-{'on' if on else 'off'}", title)


def _readings(measured: pd.DataFrame, by: str) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """The points of the paper's models and lengths, by engine or system and by reading of the paper's batch size.

    `sequences` becomes the batch that the paper would state. Points that no batch can be are left out.
    """
    if measured.empty:
        return
    of_lengths = (measured["prompt"] == printed.PROMPT) & (measured["tokens"] == printed.TOKENS)
    for name, group in measured[of_lengths & measured["size"].isin(QWEN)].groupby(by, sort=False):
        for reading, (sequences, counted) in READINGS.items():
            whole = group[group["sequences"] % sequences == 0]
            if sequences > 1 and "group_size" in whole:
                whole = whole[whole["group_size"] == sequences]
            yield str(name), reading, counted, whole.assign(sequences=whole["sequences"] // sequences)


def _write_steps(name: str, bench: pd.DataFrame, stem: Path, reading: str) -> None:
    sized = paper.sizes(bench.dropna(subset="size_bytes"), "weights in memory")
    frame = beside(cells_of(name, kinds=["step", "size"]), [*paper.steps(bench), *sized])
    _write(frame, stem, f"GRPO step beside the paper's {reading}; our sizes are those in memory", bench)


def _title(table: str, system: str, counted: str) -> str:
    return f"Table {table.removeprefix('table')}: {system}, batch size read as {counted}"


def _write(frame: pd.DataFrame, stem: Path, title: str, bench: pd.DataFrame) -> None:
    if any(map(paper.measured, frame.to_dict("records"))):
        shown, footnotes = paper.paper_shape(frame)
        caption = caption_text(f"{title}. {paper.SPEED}", bench[["machine", "commit"]])
        write_table(frame, stem, caption, shown, footnotes)
