"""The table of the portable kernels: their decode speed beside the other kernels' and vLLM's, and the goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from qerl.report.formatting import cell_text, or_reason, present, three_digits, times, with_gpus
from qerl.report.ratios import NOT_MEASURED, Row, faster, ratio, stated
from qerl.report.tables import caption_text, write_table
from qerl.results.names import with_kernels
from qerl.results.schema.stored import OK

_PORTABLE = with_kernels("native", "portable")
#: Engine and weights by column; None are the point's own weights. vLLM's NVFP4 has Marlin's products on such GPUs.
_SPEEDS = {
    "portable": (_PORTABLE, None),
    "auto": ("native", None),
    "vLLM NVFP4": ("vllm", "nvfp4"),
    "vLLM BF16": ("vllm", "bf16"),
}
#: Goals by sequences: the least ratio to vLLM's NVFP4, or to the faster of vLLM's formats.
_GOALS = {"over vLLM NVFP4": {1: 1.8, 8: 1.6, 32: 1.3}, "over the faster": {64: 0.9, 128: 0.9, 256: 0.9}}
#: Size, weights and rank of the goals.
_GOALS_OF = ("7B", "nvfp4", 16)
_TITLE = (
    "Decoded tokens/s of {size} with the portable kernels, beside `kernels: auto` on this GPU, and vLLM at the same "
    "rank; {lengths}. Medians of the repeats. Ratios have 95 % intervals: percentile bootstrap of the "
    f"medians over the repeats. {NOT_MEASURED}: not measured"
)


def write_portable(points: pd.DataFrame, size: str, lengths: str, stem: Path) -> None:
    """Write the table of a size, if a point of the portable kernels is among those of `speed_readers.load_points`."""
    table = portable_table(points)
    if table.empty:
        return
    table = with_gpus(table, points)
    shown = present(table[[name for name in table if name in ("weights", "rank", "sequences", "GPU")]])
    for column in (*_SPEEDS, *_GOALS, "goal", "met"):
        text = or_reason(three_digits if column in _SPEEDS else times)
        shown[column] = [cell_text(row, column, text) for row in table.to_dict("records")]
    title = _TITLE.format(size=size, lengths=lengths)
    write_table(table, stem, caption_text(title, points[["machine", "commit"]]), shown)


def portable_table(points: pd.DataFrame) -> pd.DataFrame:
    """A row per (weights, rank, sequences) of one size that the portable kernels were measured with.

    It has the median tokens/s of each engine, the ratios with their intervals, the goal, and whether it is `met`.
    """
    key = ["engine", "weights", "rank", "sequences"]
    cells = {tuple(point[name] for name in key): point for point in points.to_dict("records")}
    rows = [of[1:] for of in cells if of[0] == _PORTABLE]
    return pd.DataFrame([_row(cells, *of) for of in rows])


def _row(cells: dict[tuple[Any, ...], Row], weights: str, rank: int, count: int) -> Row:
    measured = {name: cells.get((engine, of or weights, rank, count)) for name, (engine, of) in _SPEEDS.items()}
    ours, marlin, dense = (measured[name] for name in ("portable", "vLLM NVFP4", "vLLM BF16"))
    row: Row = {"weights": weights, "rank": rank, "sequences": count, "machine": stated("machine", measured.values())}
    row |= {name: _value(point) for name, point in measured.items()}
    for name, base in {"over vLLM NVFP4": marlin, "over the faster": faster([dense, marlin])}.items():
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), ratio(ours, base), strict=True))
    of_goal = ours is not None and (ours["size"], weights, rank) == _GOALS_OF
    return row | (_goal(row, count) if of_goal else {"goal": "", "met": ""})


def _value(point: Row | None) -> float | str:
    if point is None:
        return NOT_MEASURED
    return float(point["tokens_per_second"]) if point["status"] == OK else str(point["status"])


def _goal(row: Row, count: int) -> Row:
    """The goal at a number of sequences, if there is one, and whether the ratio that it names reaches it."""
    for name, limits in _GOALS.items():
        if count in limits:
            reached = row[name]
            met = NOT_MEASURED if isinstance(reached, str) else "yes" if reached >= limits[count] else "no"
            return {"goal": limits[count], "met": met}
    return {"goal": "", "met": ""}
