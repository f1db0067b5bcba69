"""Tables of prompts: milliseconds of a call that draws a token after each prompt."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from qerl.report.formatting import gpu_label, three_digits, weights_label
from qerl.report.ratios import NOT_MEASURED, Row
from qerl.report.tables import caption_text, write_table
from qerl.results.schema.stored import OK

_CALL = ["prompts", "tokens"]


def write_prompts(prompts: pd.DataFrame, out: Path) -> None:
    """Write the table prompts-<size> of each size."""
    for size, group in prompts.groupby("size", sort=False):
        title = (
            f"Milliseconds of a call of our engine that draws a token after each prompt, {size}, by the number of "
            f"prompts and the tokens of each. Medians of the repeats. {NOT_MEASURED}: not measured"
        )
        table = prompt_table(group)
        shown = table.map(lambda value: three_digits(value) if isinstance(value, float) else str(value))
        write_table(table, out / f"prompts-{size}", caption_text(title, group[["machine", "commit"]]), shown)


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
        dict(zip(_CALL, call, strict=True)) | {name: _value(points.get(call)) for name, points in policies.items()}
        for call in calls
    )


def _value(point: Row | None) -> float | str:
    if point is None:
        return NOT_MEASURED
    return float(point["milliseconds"]) if point["status"] == OK else str(point["status"])
