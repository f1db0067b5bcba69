"""Parts of a study's page in Markdown: tables, sections and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from qerl.report.format import cell_text, three_digits

Row = dict[Any, Any]
Columns = Mapping[str, Callable[[Row], str]]


def table(frame: pd.DataFrame, columns: Columns) -> str:
    """A Markdown table with the text of each column from a row."""
    rows = [{name: make(row) for name, make in columns.items()} for row in frame.to_dict("records")]
    return str(pd.DataFrame(rows, columns=list(columns)).to_markdown(index=False, disable_numparse=True))


def section(*parts: str) -> str:
    """The parts of a section that aren't empty."""
    return "\n\n".join(filter(None, parts))


def column(name: str) -> Callable[[Row], str]:
    """The text of a column as it is."""
    return lambda row: str(row[name])


def plain(value: float) -> str:
    """A number with three digits."""
    size = abs(value)
    text = f"{size:.1e}" if 0 < size < 1e-4 else three_digits(size)
    return ("−" if value < 0 else "") + text


def signed(value: float) -> str:
    """A number with its sign."""
    return ("+" if value > 0 else "") + plain(value)


def number(name: str, text: Callable[[float], str] = plain) -> Callable[[Row], str]:
    """The text of a column of numbers, with its interval if it has one; a dash where it is missing."""
    return lambda row: cell_text(row, name, text) or "–"


def p_value(value: float) -> str:
    """A p value."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
