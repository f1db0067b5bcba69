"""Figures of the speed grid, each as stem.svg and stem.png, with a panel per size and the same marker per engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from qerl.report.drawing import HEIGHT, figure_axes, format_colour
from qerl.report.formatting import weights_label
from qerl.report.grid_tables import count_columns
from qerl.results.schema.speed import SERVING
from qerl.results.schema.stored import OK

_NAMES = dict(zip(SERVING, ("native", "native, portable kernels", "vLLM", "transformers"), strict=True))
_LINES = dict(zip(SERVING, ("-", "-.", "--", ":"), strict=True))
_MARKERS = dict(zip(SERVING, ("o", "D", "s", "^"), strict=True))
_ENGINE_COLOURS = dict(zip(SERVING, ("#222222", "#2c7fb8", "#b5541c", "#7a7a7a"), strict=True))
_GREY = "#a8a8a8"


def decode_speed(points: pd.DataFrame, stem: Path) -> None:
    """Median tokens/s with quartiles by sequences, from `speed_readers.load_points` at one rank, and the floors.

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
