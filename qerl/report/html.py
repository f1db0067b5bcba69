"""HTML of tables: headings with scopes, aligned numbers, and intervals set apart from them; cells may be links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

#: The templates and the style beside this module, of which the version of the code (`qerl.provenance.code_version`)
#: knows by their names alone; other templates include the first.
_FILES = ("table.j2", "tables.j2", "report.j2", "style.css")
#: A number with an optional sign and unit.
_NUMBER = re.compile(r"([+−-]?[\d,]+(\.\d+)?(e[+-]?\d+)?( ?(%|×|kB|MB|GB|B))?)")
_WITH_INTERVAL = re.compile(r"(.+?) (\[.*\])")
#: The characters beyond which a cell is long.
_LONG = 30
#: The least number of rows for which a column of equal cells is shown once.
_REPEATED = 3


@dataclass(frozen=True)
class Link:
    """A text that leads to an address; without an address it is plain."""

    text: str
    address: str = ""


@dataclass(frozen=True)
class HtmlCell:
    """A cell: its texts, and the interval beside them."""

    texts: tuple[Link, ...] = ()
    interval: str = ""

    @property
    def is_long(self) -> bool:
        """Whether a narrow column would make the cell many lines high."""
        return sum(len(part.text) for part in self.texts) > _LONG


@dataclass(frozen=True)
class Column:
    """A column; the cells of one that `names` are the headings of their rows."""

    heading: str
    numeric: bool = False
    names: bool = False


@dataclass(frozen=True)
class HtmlTable:
    """A table. `groups` are (heading, number of columns) above the columns; `bodies` are blocks of rows.

    `constant` has what is equal in all rows, by heading.
    """

    caption: str
    columns: Sequence[Column]
    bodies: Sequence[Sequence[Sequence[HtmlCell]]]
    groups: Sequence[tuple[str, int]] = ()
    constant: dict[str, str] = field(default_factory=dict)

    @property
    def interval_widths(self) -> list[int]:
        """The most characters of an interval in each column; numbers align if all intervals are as wide."""
        rows = [row for body in self.bodies for row in body]
        return [max((len(row[place].interval) for row in rows), default=0) for place in range(len(self.columns))]


def cell(text: str, address: str = "") -> HtmlCell:
    """A cell of a text such as `85.3 [81.6, 88.7]`, which may lead to an address."""
    split = _WITH_INTERVAL.fullmatch(text)
    value, interval = split.groups() if split else (text, "")
    return HtmlCell((Link(value, address),) if value else (), interval)


def table_of(caption: str, shown: pd.DataFrame) -> HtmlTable:
    """The table of a frame of text. Equal columns are shown once, and the columns before the first number name rows."""
    constant = _constant(shown)
    varied = shown.drop(columns=[name for name in shown if name in constant or not any(shown[name])])
    numeric = [_is_numeric(list(varied[name])) for name in varied]
    first = numeric.index(True) if True in numeric else 1
    columns = [
        Column(str(name), number, place < first)
        for place, (name, number) in enumerate(zip(varied, numeric, strict=True))
    ]
    rows = [[cell(text) for text in row] for row in varied.itertuples(index=False)]
    return HtmlTable(caption, columns, [rows], constant=constant)


def _constant(shown: pd.DataFrame) -> dict[str, str]:
    if len(shown) < _REPEATED:
        return {}
    equal = {str(name): shown[name].iloc[0] for name in shown if shown[name].nunique() == 1 and shown[name].iloc[0]}
    hoisted = {name: text for name, text in equal.items() if name and "[" not in text}
    return hoisted if shown.shape[1] - len(hoisted) > 1 else {}


def _is_numeric(texts: Sequence[str]) -> bool:
    values = [(_WITH_INTERVAL.fullmatch(text) or [text, text])[1] for text in texts if text and text != "–"]
    return (
        any(_NUMBER.fullmatch(value) for value in values)
        and sum(_NUMBER.fullmatch(value) is None for value in values) <= len(values) / 2
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def rendered(template: str, **values: Any) -> str:
    """The text of a template, with the style of all pages as `style`."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(style=style, **values)
