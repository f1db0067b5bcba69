"""The layout of cells of `qerl.report.paper.beside`: the paper's rows and columns, with ours and the difference below.

A printed number that the paper contradicts elsewhere, or that needs a remark, has a footnote.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

import pandas as pd

from qerl.report.formatting import three_digits, training_label, weights_label
from qerl.report.pages import NOT_RUN
from qerl.results.names import training_name
from qerl.results.schema.stored import OK

#: By table: the properties that its columns distinguish besides the metric; all others distinguish rows.
_IN_COLUMNS = {
    "table3": ["bs"],
    "table5": ["gc"],
    "table6": ["gc"],
    "table7": ["gc"],
    "table8": ["gc"],
    "table9": ["weights"],
}
#: Tables without columns for the differences from the untrained base.
_WITHOUT_DELTAS = ("table2",)
_METRICS = {
    "gsm8k": "GSM8K (%)",
    "gsm8k/delta": "Δ to BF16 base (points)",
    "gsm8k/strict": "strict (%)",
    "gsm8k/flexible": "flexible (%)",
    "gsm8k/own-prompt": "own prompt (%)",
    "math500": "MATH500 (%)",
    "aime24": "AIME24 (%)",
    "aime25": "AIME25 (%)",
    "amc23": "AMC23 (%)",
    "average": "average (%)",
    "size": "size (GB)",
    "rollout_rate": "tokens/s",
    "rollout_speedup": "rollout ratio to BF16",
    "rollout_speedup_nf4": "rollout ratio to NF4",
    "step_speedup": "step speed-up",
    "step_seconds": "s/step",
}
_TOLD = {"bs": "batch {}", "gc": "GC {}", "weights": "{} LoRA"}
_UNITS = {
    "%": lambda value: f"{value:.1f}",
    "points": lambda value: f"{value:+.1f}".replace("-", "−"),
    "ratio": lambda value: f"{value:.2f}×",
    "GB": lambda value: f"{value:.1f}",
    "tokens/s": lambda value: three_digits(value),
    "s": lambda value: three_digits(value),
    "": lambda value: f"{value:g}",
}


def measured(cell: dict[Any, Any]) -> bool:
    """Whether a cell has a result of ours, or a failed one. A size doesn't count, because many rows share it."""
    return cell["metric"] != "size" and not cell["status"].startswith(NOT_RUN)


def paper_shape(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the paper's table, each as up to three lines (paper, ours, difference), and the footnotes."""
    cells = _folded(frame.to_dict("records"))
    in_columns = _IN_COLUMNS.get(cells[0]["table"], [])
    keys = {_row_key(cell, in_columns) for cell in cells}
    constant = [name for name in ("model", "LoRA rank", "batch") if len({dict(key)[name] for key in keys} - {""}) < 2]
    letters = _letters(cells)
    order = sorted(cells, key=lambda cell: list(_METRICS).index(cell["metric"]))
    headings = list(dict.fromkeys(_heading(cell, in_columns) for cell in order))
    rows: dict[tuple[tuple[str, str], ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault(_row_key(cell, in_columns), {})[_heading(cell, in_columns)] = cell
    lines = [line for key, row in rows.items() for line in _lines(dict(key), row, headings, letters)]
    shown = pd.DataFrame(lines)
    return shown.drop(columns=[*constant, *(["seeds"] if not any(shown["seeds"]) else [])]), _footnotes(letters)


def flat(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row per cell: key, runs that it holds for, printed value, ours and the difference; and the footnotes."""
    cells = frame.to_dict("records")
    letters = _letters(cells)
    lines = [
        {
            "key": cell["metric"],
            "applies to": _scope(cell),
            "paper": _printed(cell, letters),
            "ours": ours_text(cell),
            "difference": _change(cell),
        }
        for cell in cells
    ]
    return pd.DataFrame(lines), _footnotes(letters)


def _folded(cells: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The cells without differences if the paper's table has none; their contradictions move to the value's cell."""
    if cells[0]["table"] not in _WITHOUT_DELTAS:
        return cells
    kept = [dict(cell) for cell in cells if not cell["metric"].endswith("/delta")]
    places = {(_row_key(cell, []), cell["metric"]): cell for cell in kept}
    for cell in cells:
        if cell["metric"].endswith("/delta") and cell["inconsistent"]:
            printed = _UNITS["points"](float(cell["printed"]))
            place = _row_key(cell, []), cell["metric"].removesuffix("/delta")
            places[place]["inconsistent"] = f"the difference printed beside it is {printed}; {cell['inconsistent']}"
    return kept


def _row_key(cell: dict[Any, Any], in_columns: list[str]) -> tuple[tuple[str, str], ...]:
    settings = _pairs(cell["setting"])
    training = training_label(training_name(cell["method"], cell["noise"] or "off"))
    key = {
        "model": cell["model"],
        **({} if "weights" in in_columns else {"weights": weights_label(cell["weights"]), "training": training}),
        "LoRA rank": "" if pd.isna(cell["rank"]) else f"{cell['rank']:.0f}",
        "batch": settings["bs"] if "bs" in settings and "bs" not in in_columns else "",
    }
    return tuple(key.items())


def _heading(cell: dict[Any, Any], in_columns: list[str]) -> str:
    parts = {**_pairs(cell["setting"]), "weights": weights_label(cell["weights"])}
    return ", ".join(
        [_METRICS[cell["metric"]], *(_TOLD[name].format(parts[name]) for name in in_columns if name in parts)]
    )


def _pairs(setting: str) -> dict[str, str]:
    return dict(part.split("=") for part in setting.split("; ") if part)


def _lines(
    key: dict[str, str], row: dict[str, dict[str, Any]], headings: list[str], letters: dict[str, str]
) -> list[dict[str, str]]:
    seeds = {f"{cell['seeds']:.0f}" for cell in row.values() if not pd.isna(cell["seeds"])}
    texts = {
        "paper": [_printed(row[name], letters) if name in row else "" for name in headings],
        "ours": [ours_text(row[name]) if name in row else "" for name in headings],
        "difference": [_change(row[name]) if name in row else "" for name in headings],
    }
    blank = dict.fromkeys(key, "")
    return [
        {
            **(key if kind == "paper" else blank),
            "": kind,
            **dict(zip(headings, cells, strict=True)),
            "seeds": ", ".join(sorted(seeds)) if kind == "ours" else "",
        }
        for kind, cells in texts.items()
        if kind != "difference" or any(cells)
    ]


def _printed(cell: dict[Any, Any], letters: dict[str, str]) -> str:
    text = cell["printed"]
    if text and cell["unit"] == "ratio":
        text += "×"
    if cell["unit"] == "points":
        text = _UNITS["points"](float(text))
    marks = ", ".join(letters[remark] for remark in _remarks(cell))
    return f"{text} ({marks})" if marks else text


def ours_text(cell: Mapping[Any, Any]) -> str:
    """Our number in a cell's unit with its interval, or why there is none."""
    if cell["status"] != OK:
        return str(cell["status"])
    if isinstance(cell["ours"], str):
        return cell["ours"]
    # Where the paper ran out of memory, its cell has no unit, but ours may need one.
    text = _UNITS["ratio" if cell["metric"].endswith("_speedup") else cell["unit"]]
    ends = f" [{text(cell['ours_low'])}, {text(cell['ours_high'])}]" if not pd.isna(cell["ours_low"]) else ""
    return text(cell["ours"]) + ends


def _change(cell: dict[Any, Any]) -> str:
    if pd.isna(cell["difference"]):
        return ""
    text = (
        f"{cell['difference']:+.{2 if cell['unit'] == 'ratio' else 1}f}" if cell["unit"] else f"{cell['difference']:+g}"
    )
    return text.removeprefix("+") if float(text) == 0 else text.replace("-", "−")


def _scope(cell: dict[Any, Any]) -> str:
    weights = [weights_label(cell["weights"])] if cell["weights"] else []
    training = [training_label(training_name(cell["method"], cell["noise"] or "off"))] if cell["method"] else []
    noise = ["AQN"] if cell["noise"] not in ("", "off") and not training else []
    return ", ".join([" ".join([*weights, *training, *noise]), *_pairs(cell["setting"]).values()]).strip(", ")


def _remarks(cell: dict[Any, Any]) -> list[str]:
    contradiction = f"the paper contradicts itself: {cell['inconsistent']}" if cell["inconsistent"] else ""
    return [remark for remark in (contradiction, cell["note"]) if remark]


def _letters(cells: list[dict[Any, Any]]) -> dict[str, str]:
    """A letter for each remark."""
    remarks = dict.fromkeys(remark for cell in cells for remark in _remarks(cell))
    return dict(zip(remarks, ascii_lowercase, strict=False))


def _footnotes(letters: dict[str, str]) -> list[str]:
    return [f"({letter}) {remark}." for remark, letter in letters.items()]
