"""Files of the speed grid's report: its tables and its figures, with the figure of the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from qerl.jobs import ShapesJob
from qerl.report.figures import HEIGHT, figure_axes, format_colour
from qerl.report.format import (
    NOT_MEASURED,
    cell_text,
    or_reason,
    present,
    three_digits,
    times,
    weights_label,
    with_gpus,
)
from qerl.report.paper_page import paper_page, write_missing, write_rollout_tables, write_step_tables
from qerl.report.speed_tables import (
    adapters,
    contexts,
    count_columns,
    crossover,
    decode_table,
    floor_table,
    memory_table,
    ratio_table,
    step_table,
    write_mixes,
    write_prompts,
)
from qerl.report.tables import caption_text, write_table
from qerl.results.schema import OK
from qerl.results.speed_readers import LENGTHS, load
from qerl.results.speeds import SERVING, Bench, Kind
from qerl.results.store import read

# Figures of the speed grid, each as stem.svg and stem.png, with a panel per size and the same marker per engine.

_NAMES = dict(zip(SERVING, ("native", "native, portable kernels", "vLLM", "transformers"), strict=True))
_LINES = dict(zip(SERVING, ("-", "-.", "--", ":"), strict=True))
_MARKERS = dict(zip(SERVING, ("o", "D", "s", "^"), strict=True))
_ENGINE_COLOURS = dict(zip(SERVING, ("#222222", "#2c7fb8", "#b5541c", "#7a7a7a"), strict=True))
_GREY = "#a8a8a8"


def decode_speed(points: pd.DataFrame, stem: Path) -> None:
    """Median tokens/s with quartiles by sequences, from `speed_readers.load` at one rank, and the floors.

    Failed points are left out; the tables state their reasons.
    """
    groups = list(points.groupby("size", sort=False))
    with figure_axes(len(groups), stem, height=HEIGHT + 0.7) as axes:
        for axis, (size, group) in zip(axes, groups, strict=True):
            _speed_panel(axis, group)
            axis.set_title(f"{size}, {_rank(group['rank'].iloc[0])}", loc="left")


def crossover_by_sequences(table: pd.DataFrame, stem: Path) -> None:
    """Speed of NVFP4 over BF16 by sequences with 95 % intervals, from `grid_tables.crossover` at one rank."""
    groups = list(table.groupby("size", sort=False))
    with figure_axes(len(groups), stem, height=HEIGHT + 0.4) as axes:
        for axis, (size, group) in zip(axes, groups, strict=True):
            _crossover_panel(axis, group, [_of_engine(engine) for engine in group["engine"]])
            axis.set_title(f"{size}, {_rank(group['rank'].iloc[0])}", loc="left")


def crossover_by_context(table: pd.DataFrame, stem: Path) -> None:
    """Speed of NVFP4 over BF16 by sequences with 95 % intervals, from `grid_tables.crossover` at one rank.

    Each (size, engine) has a panel, and each prompt length a line.
    """
    lengths = sorted(set(table["prompt"]))
    colours = dict(zip(lengths, sns.color_palette("flare", len(lengths)).as_hex(), strict=True))
    groups = list(table.groupby(["size", "engine"], sort=False))
    with figure_axes(len(groups), stem, height=HEIGHT + 0.4) as axes:
        for axis, (key, group) in zip(axes, groups, strict=True):
            size, engine = map(str, key)
            lines = [
                _of_engine(engine) | {"color": colours[prompt], "label": f"{prompt:,} tokens"}
                for prompt in group["prompt"]
            ]
            _crossover_panel(axis, group, lines)
            axis.set_title(f"{size}, {_NAMES[engine]}, {_rank(group['rank'].iloc[0])}", loc="left")


def _of_engine(engine: str) -> dict[str, str]:
    return {
        "color": _ENGINE_COLOURS[engine],
        "linestyle": _LINES[engine],
        "marker": _MARKERS[engine],
        "label": _NAMES[engine],
    }


def _speed_panel(axis: Axes, points: pd.DataFrame) -> None:
    _floors(axis, points.dropna(subset="floor_ms"))
    for key, line in points[points["status"] == OK].groupby(["engine", "weights"], sort=False):
        engine, weights = map(str, key)
        speed, low, high = (line[f"tokens_per_second{end}"] for end in ("", "_p25", "_p75"))
        axis.errorbar(
            line["sequences"], speed, [speed - low, high - speed], color=format_colour(weights),
            linestyle=_LINES[engine], marker=_MARKERS[engine], markersize=3, elinewidth=0.7,
            label=f"{_NAMES[engine]} {weights_label(weights)}",
        )  # fmt: skip
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("tokens/s")
    _sequences_axis(axis, points["sequences"])
    _legend(axis)


def _floors(axis: Axes, points: pd.DataFrame) -> None:
    """Draw the floor of BF16, and of the 4-bit formats the slowest, since their floors nearly coincide."""
    bits = points["weights"].map(lambda weights: "16 bits" if weights == "bf16" else "4 bits")
    for (_, name), group in points.groupby(["machine", bits], sort=False):
        floor = group.groupby("sequences")["floor_ms"].max()
        speed = 1e3 * floor.index / floor
        axis.plot(speed.index, speed, color=_GREY, linewidth=0.7, zorder=1, label="floor")
        axis.annotate(str(name), (speed.index[0], speed.iloc[0]), (-3, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=5, color="#777777")  # fmt: skip


def _crossover_panel(axis: Axes, table: pd.DataFrame, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw a line for each row of the table, with the keywords of `lines`."""
    counts = count_columns(table)
    axis.axhline(1, color="#555555", linewidth=0.8)
    for row, keywords in zip(table.to_dict("records"), lines, strict=True):
        shown = [count for count in counts if not isinstance(row[count], str)]
        ratio, low, high = (np.array([row[f"{count}{end}"] for count in shown], float) for end in ("", "_low", "_high"))
        axis.errorbar(
            [int(count) for count in shown], ratio, np.nan_to_num([ratio - low, high - ratio]).clip(0),
            markersize=3, elinewidth=0.7, **keywords,
        )  # fmt: skip
    axis.set_ylabel("NVFP4 over BF16")
    _sequences_axis(axis, map(int, counts))
    _legend(axis)


def _sequences_axis(axis: Axes, counts: Iterable[int]) -> None:
    ticks = sorted(set(counts))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlim(ticks[0] / 1.7, ticks[-1] * 1.3)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_xlabel("sequences")


def _legend(axis: Axes) -> None:
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(handles.values(), handles.keys(), ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2),
                frameon=False, fontsize=6)  # fmt: skip


def _rank(rank: int) -> str:
    return f"LoRA rank {rank}" if rank else "no LoRA"


# Files of the speed grid: decode speed by engine, weights, rank and sequences, and GRPO steps by system.

_SAMPLES = "Medians of the repeats"
_INTERVAL = "95 % intervals: percentile bootstrap of the medians over the repeats"
_DASH = f"{NOT_MEASURED}: not measured"
_CROSSES = (
    "ratio is 1 at: number of sequences, interpolated over its logarithm; > n: NVFP4 is faster at all numbers, "
    "≤ n: at none"
)
_FLOOR = (
    "the floor is the least time of a step: the larger of its bytes over the rate of copies and its FLOPs over the "
    "rate of BF16 products, both measured in the same job; NF4 has double quantization, and experts are read as often "
    "as random choices take them"
)


def write_shapes(job: ShapesJob) -> None:
    """Write all tables (.csv, .md, .tex) and figures (.svg, .png) of points, GRPO steps and rollouts to `job.out`.

    For lengths such as 128x256 there are decode-<size>-<lengths>, floor-..., ratio-..., crossover-<lengths> and
    adapters-... Their figures are decode-rank<rank>-<lengths> and crossover-rank<rank>-<lengths>.
    For prompts of several lengths there is contexts-<tokens>, with figures contexts-rank<rank>-<tokens>. The others are
    steps, memory, mixes, mix-phases, mix-drafts and prompts-<size>. Tables without a row are left out. At the
    paper's lengths its tables are there (`qerl.report.paper_page`), with paper-missing and the page paper-tables.md.
    Raises ResultError without any file.
    """
    files, out = job.files, job.out
    of_bench: dict[Bench, list[Path]] = {}
    for file in files:
        of_bench.setdefault(read(Kind, file).bench, []).append(file)
    frames = {bench: load(some, bench) for bench, some in (of_bench or {"decode": []}).items()}
    points, steps = (frames.get(bench, pd.DataFrame()) for bench in ("decode", "grpo_step"))
    if "rollout_mix" in frames:
        write_mixes(frames["rollout_mix"], out)
    if "prompts" in frames:
        write_prompts(frames["prompts"], out)
    if len(points):
        for lengths, group in points.groupby(LENGTHS, sort=False):
            _write_decode(group, out, "{}x{}".format(*lengths))
        for tokens, group in contexts(points).groupby("tokens"):
            _write_contexts(group, out, f"{tokens}")
    if len(steps):
        _write_steps(steps, out)
    write_missing([*write_rollout_tables(points, out), *write_step_tables(steps, out)], out)
    if page := paper_page(points, steps, files, out):
        (out / "paper-tables.md").write_text(page, encoding="utf-8")


class _Counted(NamedTuple):
    """A table with a column per number of sequences: its name, its rows, its caption and the text of a number."""

    name: str
    rows: Callable[..., pd.DataFrame]
    caption: str
    text: Callable[[float], str]


_OF_SIZE = (
    _Counted("decode", decode_table, f"Decoded tokens/s of {{}}. {_SAMPLES}. {_DASH}", three_digits),
    _Counted(
        "floor", floor_table, f"Floor over measured time of a decode step (%), {{}}; {_FLOOR}. {_SAMPLES}. {_DASH}",
        lambda percent: f"{percent:.0f}",
    ),
    _Counted(
        "ratio", ratio_table,
        f"Decode speed of the native engine over vLLM's at the same rank, {{}}. {_INTERVAL}. {_DASH}", times,
    ),
)  # fmt: skip
_CROSSOVER = _Counted(
    "crossover", crossover, f"Decode speed of NVFP4 over BF16 {{}}. {_INTERVAL}. {_CROSSES}. {_DASH}", times
)
_ADAPTERS = _Counted(
    "adapters", adapters, f"Decode speed with an adapter over the speed without one, {{}}. {_INTERVAL}. {_DASH}", times
)


def _write_decode(points: pd.DataFrame, out: Path, lengths: str) -> None:
    measured = f"by number of sequences; prompts of {points['prompt'].iloc[0]} tokens, "
    measured += f"{points['tokens'].iloc[0]} tokens decoded"
    for size, group in points.groupby("size", sort=False):
        for table in _OF_SIZE:
            rows = table.rows(group, size)
            _write_counts(table, rows, group, out / f"{table.name}-{size}-{lengths}", f"{size} {measured}")
    for table in (_CROSSOVER, _ADAPTERS):
        _write_counts(table, table.rows(points), points, out / f"{table.name}-{lengths}", measured)
    for rank, group in points.groupby("rank"):
        decode_speed(group, out / f"decode-rank{rank}-{lengths}")
        if not crossover(group).empty:
            crossover_by_sequences(crossover(group), out / f"crossover-rank{rank}-{lengths}")


def _write_contexts(points: pd.DataFrame, out: Path, tokens: str) -> None:
    measured = f"by prompt length and number of sequences; {tokens} tokens decoded"
    _write_counts(_CROSSOVER, crossover(points), points, out / f"contexts-{tokens}", measured)
    for rank, group in points.groupby("rank"):
        if not crossover(group).empty:
            crossover_by_context(crossover(group), out / f"contexts-rank{rank}-{tokens}")


def _write_steps(steps: pd.DataFrame, out: Path) -> None:
    medians = f"Seconds of a GRPO step; work: prompts × completions of each, prompt + completion tokens. {_SAMPLES}"
    write_table(with_gpus(step_table(steps), steps), out / "steps", caption_text(medians, steps[["machine", "commit"]]))
    parts = (
        "Memory of a GRPO step at its highest peak by part, in GB (10^9 bytes). The parts except the KV cache add up "
        "to the column without KV cache; rest includes parts that a system doesn't report. A cache with less memory "
        "than it could use is released before the update, so that the highest peak may be the rollout's. A cap stands "
        "in for a smaller GPU, and doesn't count CUDA's context. Cache share: of one with which no sequence waits; "
        "recomputed: most blocks of a micro-batch"
    )
    write_table(
        with_gpus(memory_table(steps), steps), out / "memory", caption_text(parts, steps[["machine", "commit"]])
    )


def _write_counts(table: _Counted, rows: pd.DataFrame, points: pd.DataFrame, stem: Path, measured: str) -> None:
    """Write a table of points, whose cells are values or the reason why there is none; nothing without a row."""
    if rows.empty:
        return
    rows = with_gpus(rows, points)
    counts = count_columns(rows)
    keys = [column for column in rows if str(column).partition("_")[0] not in counts]
    shown = present(rows[keys])
    for count in counts:
        shown[count] = [cell_text(row, count, or_reason(table.text)) for row in rows.to_dict("records")]
    write_table(rows, stem, caption_text(table.caption.format(measured), points[["machine", "commit"]]), shown)
