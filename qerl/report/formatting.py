"""Numbers and names as text for readers; all units, digits and headings are defined here.

A column is named `<measure>` or `<group>/<measure>`. Columns `<measure>_low` and `_high` (interval) or `_p25` and
`_p75` (quartiles) are merged into its cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pandas as pd

_ENDS = (("_low", "_high"), ("_p25", "_p75"))
_LATEX = str.maketrans(
    {character: "\\" + character for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"Δ": r"$\Delta$", "×": r"$\times$", "−": "$-$", "–": "--"}
)
_TRAINING = {"none": "–", "full": "Full", "lora": "LoRA"}


def percent(value: float) -> str:
    """A fraction in percent, such as 61.2."""
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """A difference of fractions in points, such as +1.5."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def three_digits(value: float) -> str:
    """Three significant digits, never in powers of ten: 1,234 or 12.3 or 0.0123."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def _power_of_ten(value: float) -> str:
    return f"{value:.1e}".replace("-", "−")


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value else "–"


def times(value: float) -> str:
    """A ratio as text, such as 1.27×."""
    return f"{value:.2f}×"


def or_reason(text: Callable[[float], str]) -> Callable[[float | str], str]:
    """A formatter of values that leaves a reason why there is none as it is."""
    return lambda value: value if isinstance(value, str) else text(value)


def weights_label(weights: str) -> str:
    """The label of weights: BF16, NF4, MXFP4, NVFP4 or NVFP4-AWQ."""
    return weights.upper()


def training_label(training: str) -> str:
    """The label of training in the paper's tables: –, Full, LoRA or LoRA + AQN."""
    method, plus, _ = training.partition("+")
    return _TRAINING[method] + (" + AQN" if plus else "")


def gpu_label(machine: str) -> str:
    """A machine's GPUs in short, such as H200 of `1x NVIDIA H200`."""
    return re.sub(r"\b1x |NVIDIA ", "", machine)


def with_gpus(table: pd.DataFrame, records: pd.DataFrame) -> pd.DataFrame:
    """The table with a column GPU instead of `machine`, or with neither if the records in it are of one machine."""
    if records["machine"].nunique() < 2:
        return table.drop(columns="machine")
    return table.assign(machine=table["machine"].map(gpu_label)).rename(columns={"machine": "GPU"})


def latex(text: str) -> str:
    """The text with LaTeX's reserved characters escaped."""
    return text.translate(_LATEX)


#: Heading and formatter of each measure; other columns are shown unchanged.
MEASURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "weights": ("weights", weights_label),
    "training": ("training", training_label),
    "method": ("method", str),
    "accuracy": ("accuracy (%)", percent),
    "delta_bf16": ("Δ to BF16 base (points)", points),
    "delta_format": ("Δ to same format's base (points)", points),
    "seeds": ("seeds", _count),
    "problems": ("problems", _count),
    "rank": ("LoRA rank", lambda rank: f"{rank:.0f}" if rank else "no LoRA"),
    "prompts": ("prompts", _count),
    "group_size": ("group size", _count),
    "gradient_checkpointing": ("gradient checkpointing", lambda on: {True: "on", False: "off"}.get(on, on)),
    "sequences": ("sequences", _count),
    "crosses": ("ratio is 1 at", str),
    "completion_tokens": ("tokens", _count),
    "repeats": ("repeats", _count),
    "tokens_per_second": ("tokens/s", three_digits),
    "ratio_bf16": ("ratio to BF16", times),
    "weight_bytes": ("weights in memory", _bytes),
    "size_bytes": ("size", _bytes),
    "peak_memory_bytes": ("peak memory", _bytes),
    "bits_per_weight": ("bits/weight", lambda bits: f"{bits:.2f}"),
    "bits_per_weight_model": ("bits/weight, whole model", lambda bits: f"{bits:.2f}"),
    "relative_error": ("relative error (%)", lambda error: f"{100 * error:.2f}"),
    "seconds": ("time (s)", three_digits),
    "ready_seconds": ("start-up (s)", three_digits),
    "first_seconds": ("first rollout (s)", three_digits),
    "step_seconds": ("s/step", three_digits),
    "rollout_seconds": ("s/rollout", three_digits),
    "update_seconds": ("s/update", three_digits),
    "sync_seconds": ("s/sync", three_digits),
    "entropy_first": ("entropy, first steps (nats/token)", three_digits),
    "entropy_last": ("entropy, last steps", three_digits),
    "kl_first": ("KL, first steps (nats/token)", _power_of_ten),
    "kl_last": ("KL, last steps", _power_of_ten),
    "kl_change": ("change", _power_of_ten),
    "kl_slope": ("slope per 1,000 steps", _power_of_ten),
    "gb": ("(GB)", three_digits),
    "speedup": ("speed-up", times),
    "speedup_base": ("compared with", str),
}


def present(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text, with headings and units, intervals in their cell, and no empty columns."""
    shown: dict[str, list[str]] = {}
    for column in frame.columns:
        if any(column.endswith(end) and column.removesuffix(end) in frame for ends in _ENDS for end in ends):
            continue
        group, _, measure = column.rpartition("/")
        heading, text = MEASURES.get(measure, (measure, str))
        cells = [cell_text(row, column, text) for row in frame.to_dict("records")]
        if any(cells):
            shown[f"{group} {heading}".strip()] = cells
    return pd.DataFrame(shown)


def cell_text(row: dict[Any, Any], column: str, text: Callable[[Any], str]) -> str:
    """A value of a row as text, with its interval or quartiles if the row has them. A missing value is empty."""
    if pd.isna(row[column]) or row[column] == "":
        return ""
    for low, high in _ENDS:
        if column + low in row and not pd.isna(row[column + low]):
            return f"{text(row[column])} [{text(row[column + low])}, {text(row[column + high])}]"
    return text(row[column])
