"""Tables of the speed grid: pure functions of `qerl.results.speed_readers`' frames, with a column per number of
sequences.

A failed point shows its status, a point that wasn't measured a dash. Only points of the same machine are compared.
`machine` has the machines of a row's points.
`percent_of_floor` is the floor of `qerl.results.roofline` over the measured time of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from qerl.report.formatting import weights_label
from qerl.report.ratios import NOT_MEASURED, Row, faster, ratio, stated
from qerl.results.schema.speed import SECONDS
from qerl.results.schema.stored import OK
from qerl.results.speed_readers import GIVEN_UP, LENGTHS, POLICY

#: Columns that identify a ratio of two weight formats.
_CROSSED = ["size", "engine", "rank", *LENGTHS]


def decode_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Median tokens/s of one size, with a row per (engine, weights, rank)."""
    return _value_table(_of_size(points, size), "tokens_per_second")


def floor_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Percent of the floor for one size, with a row per (engine, weights, rank)."""
    return _value_table(_of_size(points, size), "percent_of_floor")


def ratio_table(points: pd.DataFrame, size: str) -> pd.DataFrame:
    """Speed ratios of the native engine to vLLM at one size and the same rank, with 95 % intervals.

    Each (weights, rank) has two rows: against the faster of vLLM's BF16 and NVFP4 for each number of sequences, and
    against vLLM on the same weights. Where ours has packed delta nets, vLLM's with them is among the former. A row
    without any base is left out.
    """
    chosen = _of_size(points, size)
    cells = {(*(point[key] for key in POLICY), point["sequences"]): point for point in chosen.to_dict("records")}
    counts = _counts(chosen)
    rows = []
    for weights, rank in dict.fromkeys((weights, rank) for engine, weights, rank, _ in cells if engine == "native"):
        ours = [cells.get(("native", weights, rank, count)) for count in counts]
        rivals = dict.fromkeys(("bf16", "nvfp4", *([weights] if weights.startswith("nvfp4") else ())))
        fastest = [faster([cells.get(("vllm", base, rank, count)) for base in rivals]) for count in counts]
        same = [cells.get(("vllm", weights, rank, count)) for count in counts]
        of = f"faster of {', '.join(map(weights_label, rivals))}"
        for against, bases in ((of, fastest), (weights_label(weights), same)):
            key = {"weights": weights, "rank": rank, "against vLLM": against}
            rows.append(key | _ratio_columns(counts, ours, bases))
    return _measured_rows(rows, counts)


def crossover(points: pd.DataFrame) -> pd.DataFrame:
    """Speed ratios of NVFP4 to BF16 with 95 % intervals, and the number of sequences at which they cross 1.

    There is a row per (size, engine, rank, prompt, tokens), unless none of its ratios was measured.
    """
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(_CROSSED, sort=False):
        cells = {(point["weights"], point["sequences"]): point for point in group.to_dict("records")}
        above, below = ([cells.get((weights, count)) for count in counts] for weights in ("nvfp4", "bf16"))
        ratios = _ratio_columns(counts, above, below)
        rows.append(dict(zip(_CROSSED, key, strict=True)) | {"crosses": _crosses(counts, ratios)} | ratios)
    return _measured_rows(rows, counts)


def adapters(points: pd.DataFrame) -> pd.DataFrame:
    """Speed with an adapter over that without, with 95 % intervals, and a row per (size, engine, weights, rank).

    All points have the same lengths. Rows without a measured ratio are left out.
    """
    counts = _counts(points)
    rows = []
    for key, group in points.groupby(["size", "engine", "weights"], sort=False):
        cells = {(point["rank"], point["sequences"]): point for point in group.to_dict("records")}
        without = [cells.get((0, count)) for count in counts]
        for rank in sorted({rank for rank, _ in cells} - {0}):
            adapted = [cells.get((rank, count)) for count in counts]
            named = dict(zip(("size", "engine", "weights"), key, strict=True)) | {"rank": rank}
            rows.append(named | _ratio_columns(counts, adapted, without))
    return _measured_rows(rows, counts)


def contexts(points: pd.DataFrame) -> pd.DataFrame:
    """The points that were measured with several prompt lengths and otherwise equal settings."""
    alike = [name for name in _CROSSED if name != "prompt"]
    return points[points.groupby(alike)["prompt"].transform("nunique") > 1]


def memory_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Memory of a GRPO step by part in GB; parts that a system doesn't report are in `rest`.

    The last columns are what this project's step did without for memory, and the settings by which it did.
    """
    parts = [name for name in map(str, steps) if name.endswith("/gb")]
    parts.sort(key=lambda name: name == "rest/gb")
    return steps[["size", "system", "work", "recompute", "cap", "machine", "status", *parts, *GIVEN_UP]]


def step_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of each GRPO step and of its parts."""
    seconds = [f"{part}_seconds" for part in SECONDS]
    keys = ["size", "system", "sampler", "rank", "work", "recompute", "cap", "machine"]
    return steps[[*keys, "status", *seconds, "repeats"]]


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
    for key, group in points.groupby(POLICY, sort=False):
        cells = {point["sequences"]: point for point in group.to_dict("records")}
        values = {str(count): _value(cells.get(count), column) for count in counts}
        rows.append(dict(zip(POLICY, key, strict=True)) | {"machine": stated("machine", cells.values())} | values)
    return pd.DataFrame(rows)


def _value(point: Row | None, column: str) -> float | str:
    if point is None:
        return NOT_MEASURED
    if point["status"] != OK:
        return str(point["status"])
    return "no floor" if np.isnan(point[column]) else float(point[column])


def _ratio_columns(counts: Iterable[int], above: Sequence[Row | None], below: Sequence[Row | None]) -> Row:
    columns: Row = {"machine": stated("machine", [*above, *below])}
    for count, *pair in zip(counts, above, below, strict=True):
        columns |= {f"{count}{end}": value for end, value in zip(("", "_low", "_high"), ratio(*pair), strict=True)}
    return columns


def _crosses(counts: Iterable[int], ratios: Row) -> str:
    """The numbers of sequences at which a ratio crosses 1, interpolated, or on which side it stays."""
    measured = [(count, ratios[str(count)]) for count in counts if not isinstance(ratios[str(count)], str)]
    if not measured:
        return NOT_MEASURED
    crossings = []
    for (left, before), (right, after) in pairwise(measured):
        if (before > 1) != (after > 1):
            crossings.append(f"{left * (right / left) ** ((before - 1) / (before - after)):.0f}")
    (first, at_first), (last, _) = measured[0], measured[-1]
    return ", ".join(dict.fromkeys(crossings)) or (f"> {last}" if at_first > 1 else f"≤ {first}")


def _measured_rows(rows: Iterable[Row], counts: Iterable[int]) -> pd.DataFrame:
    """The rows with at least one measured cell."""
    return pd.DataFrame([row for row in rows if any(row[str(count)] != NOT_MEASURED for count in counts)])
