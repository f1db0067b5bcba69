"""The report of the speed grid: its tables, each by a specification, its figures, and the paper's numbers beside them.

Rows are made of the frames of `qerl.results.speeds`. A failed point shows its status, a point that wasn't
measured a dash. Only points of the same machine are compared. `machine` has the machines of a row's points.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import numpy as np
import pandas as pd

from qerl.checkpoints.shapes import QWEN
from qerl.jobs import ShapesJob
from qerl.report import paper
from qerl.report.figures import bars_beside, decode_speed
from qerl.report.format import (
    NOT_MEASURED,
    Row,
    cell_text,
    faster,
    gpu_label,
    present,
    ratio,
    stated,
    three_digits,
    times,
    weights_label,
    with_gpus,
)
from qerl.report.paper import SPEED, Result, beside, rollouts, sizes, steps, with_ratios, with_steps
from qerl.report.tables import caption_text, write_table
from qerl.results import printed
from qerl.results.schema import OK
from qerl.results.speeds import GIVEN_UP, LENGTHS, POLICY, SECONDS, Kind, load
from qerl.results.store import read

# Rows of decode points, with a column per number of sequences, and of GRPO steps.


def decode_table(points: pd.DataFrame, column: str = "tokens_per_second") -> pd.DataFrame:
    """A column's values at one size, by default median tokens/s, with a row per (engine, weights, rank)."""
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(POLICY, sort=False):
        cells = {point["sequences"]: point for point in group.to_dict("records")}
        values = {str(count): _value(cells.get(count), column) for count in counts}
        rows.append(dict(zip(POLICY, key, strict=True)) | {"machine": stated("machine", cells.values())} | values)
    return pd.DataFrame(rows)


def ratio_table(points: pd.DataFrame) -> pd.DataFrame:
    """Speed ratios of the native engine to vLLM at one size and the same rank, with 95 % intervals.

    Each (weights, rank) has two rows: against the faster of vLLM's BF16 and NVFP4 for each number of sequences, and
    against vLLM on the same weights. Where ours has packed delta nets, vLLM's with them is among the former. A row
    without any base is left out.
    """
    cells = {(*(point[key] for key in POLICY), point["sequences"]): point for point in points.to_dict("records")}
    counts = _counts(points)
    rows = []
    for weights, rank in dict.fromkeys((weights, rank) for engine, weights, rank, _ in cells if engine == "native"):
        ours = [cells.get(("native", weights, rank, count)) for count in counts]
        rivals = dict.fromkeys(("bf16", "nvfp4", *([weights] if weights.startswith("nvfp4") else ())))
        fastest = [faster([cells.get(("vllm", base, rank, count)) for base in rivals]) for count in counts]
        same = [cells.get(("vllm", weights, rank, count)) for count in counts]
        of = f"faster of {', '.join(map(weights_label, rivals))}"
        for against, bases in ((of, fastest), (weights_label(weights), same)):
            row: Row = {"weights": weights, "rank": rank, "against vLLM": against}
            row["machine"] = stated("machine", [*ours, *bases])
            found = [ratio(*pair) for pair in zip(ours, bases, strict=True)]
            for count, values in zip(counts, found, strict=True):
                row |= {f"{count}{end}": value for end, value in zip(("", "_low", "_high"), values, strict=True)}
            if any(value != NOT_MEASURED for value, _, _ in found):
                rows.append(row)
    return pd.DataFrame(rows)


def memory_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Memory of a GRPO step by part in GB; parts that a system doesn't report are in `rest`.

    The last columns are what this project's step did without for memory, and the settings by which it did.
    """
    parts = [name for name in map(str, timed) if name.endswith("/gb")]
    parts.sort(key=lambda name: name == "rest/gb")
    return timed[["size", "system", "work", "recompute", "cap", "machine", "status", *parts, *GIVEN_UP]]


def step_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of each GRPO step and of its parts."""
    seconds = [f"{part}_seconds" for part in SECONDS]
    keys = ["size", "system", "sampler", "rank", "work", "recompute", "cap", "machine"]
    return timed[[*keys, "status", *seconds, "repeats"]]


def _counts(points: pd.DataFrame) -> list[int]:
    return sorted(set(points["sequences"]))


def _value(point: Row | None, column: str) -> float | str:
    if point is None:
        return NOT_MEASURED
    if point["status"] != OK:
        return str(point["status"])
    return "no floor" if np.isnan(point[column]) else float(point[column])


# Rows of rollouts of mixed lengths: end-to-end tokens/s compared with vLLM's, and our engine's time by phase.

_SHOWN = ["size", "engine", "weights", "rank", "work", "sequences", "machine", "status", "tokens_per_second"]
_TIMES = ["seconds", "ready_seconds", "first_seconds"]


def mix_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """One row per engine and weight format; ours have the speed-up over vLLM's faster one, or a note why not."""
    rows = mixes.to_dict("records")
    return pd.DataFrame([_mix_row(row, rows) for row in rows])


def mix_speedup(row: Row, rows: list[Row]) -> tuple[float | str, float, float]:
    """Tokens/s over those of vLLM's faster weight format on the same workload."""
    alike = [other for other in rows if other["engine"] == "vllm" and _same(row, other)]
    bases = [next((other for other in alike if other["weights"] == weights), None) for weights in ("bf16", "nvfp4")]
    return ratio(row, faster(bases))


def phase_table(mixes: pd.DataFrame) -> pd.DataFrame:
    """Seconds of the median rollout, with a row per rollout and phase, and the phase's share in %."""
    measured = [row for row in mixes.to_dict("records") if row["phases"] is not None]
    return pd.DataFrame([phase for row in measured for phase in _phases(row)])


def _mix_row(row: Row, rows: list[Row]) -> Row:
    ends = [f"tokens_per_second_{end}" for end in ("p25", "p75")]
    shown = {key: row[key] for key in (*_SHOWN, *ends, *_TIMES)}
    value, low, high = mix_speedup(row, rows) if row["engine"] != "vllm" else ("", np.nan, np.nan)
    reason = isinstance(value, str)
    return {
        **shown,
        "speedup": np.nan if reason else value,
        "speedup_low": low,
        "speedup_high": high,
        "note": value if reason else "",
        "repeats": len(row["samples"]),
    }


def _same(row: Row, other: Row) -> bool:
    return all(row[key] == other[key] for key in ("size", "rank", "sequences", "workload"))


def _phases(row: Row) -> Iterator[Row]:
    phases, whole = row["phases"], row["phase_seconds"]
    key = {name: row[name] for name in ("size", "weights", "rank", "work", "machine")}
    parts: list[Row] = [{"phase": "prefill and first tokens", "seconds": phases.prefill, "steps": phases.prefills}]
    for decode in reversed(phases.decode):
        figures = {"seconds": decode.seconds, "steps": decode.steps, "sequences": decode.sequences}
        parts.append({"phase": f"decode, batch of {decode.batch}", **figures})
    parts.append({"phase": "between steps", "seconds": phases.between})
    parts.append({"phase": "before and after", "seconds": whole - sum(part["seconds"] for part in parts)})
    for part in parts:
        per_step = 1e3 * part["seconds"] / part["steps"] if "steps" in part else np.nan
        yield {**key, **part, "share": 100 * part["seconds"] / whole, "ms/step": per_step}
    yield {**key, "phase": "host waits during these", "seconds": phases.host_wait}


# Rows of prompts: milliseconds of a call that draws a token after each prompt.

_CALL = ["prompts", "tokens"]


def prompt_table(prompts: pd.DataFrame) -> pd.DataFrame:
    """Median milliseconds of the calls of one size, with a row per (prompts, tokens) and a column per (weights, rank).

    A call that failed shows its status, one that wasn't measured a dash. Columns of several machines name their GPU.
    """
    policies: dict[str, dict[tuple[int, int], Row]] = {}
    several = prompts["machine"].nunique() > 1
    for point in prompts.sort_values(["weights", "rank"]).to_dict("records"):
        policy = f"{weights_label(point['weights'])} r{point['rank']}"
        policy += f", {gpu_label(point['machine'])}" if several else ""
        policies.setdefault(policy, {})[point["prompts"], point["tokens"]] = point
    calls = sorted({call for points in policies.values() for call in points})
    return pd.DataFrame(
        dict(zip(_CALL, call, strict=True))
        | {name: _value(points.get(call), "milliseconds") for name, points in policies.items()}
        for call in calls
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
    text = rows.map(_text)
    if "steps" in rows:
        text["steps"] = rows["steps"].map(lambda steps: "" if np.isnan(steps) else f"{steps:.0f}")
    return text


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else three_digits(value)
    return str(value)


@dataclass(frozen=True)
class Table:
    """A table of a bench's rows. Its name and title have the columns in braces by whose values the rows are split."""

    bench: str
    name: str
    rows: Callable[[pd.DataFrame], pd.DataFrame]
    title: str
    shown: Callable[[pd.DataFrame], pd.DataFrame] = present

    @property
    def by(self) -> list[str]:
        """The columns by whose values the rows are split."""
        return [column for _, column, _, _ in Formatter().parse(self.name) if column]


_SAMPLES = "Medians of the repeats"
_INTERVAL = "95 % intervals: percentile bootstrap of the medians over the repeats"
_DASH = f"{NOT_MEASURED}: not measured"
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
        of_bench.setdefault(read(Kind, file).of_bench, []).append(file)
    frames = {bench: load(files, bench) for bench, files in (of_bench or {"decode": []}).items()}
    for table in (one for one in TABLES if one.bench in frames):
        records = frames[table.bench]
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

    points: of `speeds.load`, or none; those of other models and lengths are ignored.
    """
    measured = _of_paper(points)
    for engine, of_engine in measured.groupby("engine", sort=False) if len(measured) else ():
        for reading, (sequences, counted) in READINGS.items():
            bench = _read_as(of_engine, sequences)
            for name in ROLLOUT_TABLES:
                frame = beside_printed([name], ["rollout"], rollouts(bench))
                title = f"Rollout throughput beside the paper's {_told(name, str(engine), counted)}"
                _write(frame, out / f"{name}-{engine}-{reading}", title, bench)
            for name, files in printed.BARS.items():
                frame = beside_printed(files, ["rollout"], rollouts(bench))
                if (frame["status"] == OK).any():
                    bars_beside(frame, out / f"{name}-{engine}-{reading}")


def write_step_tables(measured: pd.DataFrame, out: Path) -> None:
    """Write table5 to table8-<system>-<reading>, and table3-<system>-<reading>-gc-on and -off.

    Table 3 has both because the paper doesn't state its gradient checkpointing. Tables without a measured step are left
    out.

    measured: of `speeds.load`, or none; steps of other models, of other or mixed lengths, under a memory cap,
        with equal rewards, or whose system chooses what to recompute are ignored.
    """
    measured = _of_paper(measured)
    if measured.empty:
        return
    plain = (measured["equal_groups"] == 0) & (measured["median"] == 0) & (measured["cap"] == "")
    measured = measured[plain & (measured["gradient_checkpointing"] != "auto")]
    for system, of_system in measured.groupby(measured["system"].str.split().str[0], sort=False):
        for reading, (sequences, counted) in READINGS.items():
            groups = of_system if sequences == 1 else of_system[of_system["group_size"] == sequences]
            bench, stem = _read_as(groups, sequences), f"{str(system).lower()}-{reading}"
            for name in STEP_TABLES:
                _write_steps(name, bench, out / f"{name}-{stem}", _told(name, str(system), counted))
            for on in (True, False):
                group = bench[bench["gradient_checkpointing"] == on]
                title = f"{_told('table3', str(system), counted)}, {'with' if on else 'without'} gradient checkpointing"
                _write_steps("table3", group, out / f"table3-{stem}-gc-{'on' if on else 'off'}", title)


def beside_printed(files: Sequence[str], kinds: Collection[str], results: Iterable[Result]) -> pd.DataFrame:
    """Printed numbers of these kinds and files beside ours, for the models of the first file."""
    cells = [cell for file in files for cell in printed.read_cells(printed.FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    cells = [cell for cell in cells if cell.kind in kinds and cell.model in models]
    return beside(with_steps(with_ratios(cells)), results)


def _of_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """The points or steps of the paper's models and lengths."""
    if measured.empty:
        return measured
    of_lengths = (measured["prompt"] == printed.PROMPT) & (measured["tokens"] == printed.TOKENS)
    return measured[of_lengths & measured["size"].isin(QWEN)]


def _read_as(measured: pd.DataFrame, sequences: int) -> pd.DataFrame:
    """The points whose number of sequences a batch of the paper can be, with that batch in its place."""
    whole = measured[measured["sequences"] % sequences == 0]
    return whole.assign(sequences=whole["sequences"] // sequences)


def _write_steps(name: str, bench: pd.DataFrame, stem: Path, reading: str) -> None:
    sized = sizes(bench.dropna(subset="size_bytes"), "weights in memory")
    frame = beside_printed([name], ["step", "size"], [*steps(bench), *sized])
    _write(frame, stem, f"GRPO step beside the paper's {reading}; our sizes are those in memory", bench)


def _told(table: str, system: str, counted: str) -> str:
    return f"Table {table.removeprefix('table')}: {system}, batch size read as {counted}"


def _write(frame: pd.DataFrame, stem: Path, title: str, bench: pd.DataFrame) -> None:
    if not any(map(paper.measured, frame.to_dict("records"))):
        return
    shown, footnotes = paper.paper_shape(frame)
    write_table(frame, stem, caption_text(f"{title}. {SPEED}", bench[["machine", "commit"]]), shown, footnotes)
