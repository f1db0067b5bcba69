"""Tables as HTML pages, which the report embeds, with only the columns that a reader needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd

from qerl.results.names import KEY

_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:1.5em}h2{font-size:1.1em}table{border-collapse:collapse}"
    "th,td{padding:.25em .7em;text-align:left;vertical-align:top}thead th{border-bottom:2px solid #888}"
    "tbody tr{border-bottom:1px solid #ddd}td{font-variant-numeric:tabular-nums}p,li{max-width:60em}"
)


def by_dataset(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The accuracy table (`tables.accuracy`) by data set, with only the identifying columns that differ."""
    names = dict.fromkeys(column.rpartition("/")[0] for column in map(str, table.columns) if "/" in column)
    return {name: _of_dataset(table, name) for name in names}


def _of_dataset(table: pd.DataFrame, dataset: str) -> pd.DataFrame:
    named = table[KEY].replace("", None)  # an empty key doesn't apply, such as the experiment of a base
    kept = [key for key in KEY if key in ("weights", "training") or named[key].nunique() > 1]
    if "arm" in kept and not table[kept].drop(columns="arm").duplicated().any():
        kept.remove("arm")
    measures = [column for column in map(str, table.columns) if column.startswith(f"{dataset}/")]
    return table[kept + measures].rename(columns=lambda column: column.removeprefix(f"{dataset}/"))


def page(tables: Mapping[str, pd.DataFrame], caption: str, footnotes: Sequence[str] = ()) -> str:
    """A page with tables of text, each under its heading unless that is empty, and the caption below.

    The report's first page shows everything between `<main>` and `</main>`.
    """
    notes = "".join(f"<li>{escape(note, quote=False)}</li>" for note in footnotes)
    body = "\n".join(
        [
            *(_section(heading, table) for heading, table in tables.items()),
            f"<p>{escape(caption, quote=False)}</p>",
            f"<ul>{notes}</ul>" if notes else "",
        ]
    )
    return f'<!doctype html>\n<meta charset="utf-8">\n<style>{_STYLE}</style>\n<main>\n{body}\n</main>\n'


def _section(heading: str, table: pd.DataFrame) -> str:
    shown = table.to_html(index=False, border=0, justify="left", na_rep="")
    title = f"<h2>{escape(heading, quote=False)}</h2>\n" if heading else ""
    return f'{title}<div style="overflow-x:auto">\n{shown}\n</div>'
