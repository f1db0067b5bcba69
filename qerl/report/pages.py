"""Tables as HTML pages, which the report contains, with only the columns that a reader needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from qerl.report.html import rendered, table_of
from qerl.results.names import KEY

#: The note of an arm without a score on a data set.
NOT_RUN = "not run"


def by_dataset(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The accuracy table (`tables.accuracy`) by data set, with only the identifying columns that differ."""
    names = dict.fromkeys(column.rpartition("/")[0] for column in map(str, table.columns) if "/" in column)
    return {name: _of_dataset(_scored_on(name, table), name) for name in names}


def _scored_on(dataset: str, table: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of experiments without any score on the data set, which their `tasks` lack."""
    experiments = table["experiment"].fillna("")
    lacks = table[f"{dataset}/note"].eq(NOT_RUN).groupby(experiments).transform("all")
    return table[~lacks | experiments.eq("")]  # bases have no experiment


def identifying(table: pd.DataFrame) -> list[str]:
    """Weights, training, and the other identifying columns of the accuracy table that its rows differ in."""
    named = table[KEY].replace("", None)  # an empty key doesn't apply, such as the experiment of a base
    kept = [key for key in KEY if key in ("weights", "training") or named[key].nunique() > 1]
    if "arm" in kept and not table[kept].drop(columns="arm").duplicated().any():
        kept.remove("arm")
    return kept


def _of_dataset(table: pd.DataFrame, dataset: str) -> pd.DataFrame:
    measures = [column for column in map(str, table.columns) if column.startswith(f"{dataset}/")]
    return table[identifying(table) + measures].rename(columns=lambda column: column.removeprefix(f"{dataset}/"))


def page(tables: Mapping[str, pd.DataFrame], caption: str, footnotes: Sequence[str] = ()) -> str:
    """A page with tables of text by heading, and the caption below.

    An empty heading becomes the caption's first sentence. The report shows the page's `fragment`.
    """
    title = caption.partition(". ")[0]
    shown = [table_of(heading or title, table) for heading, table in tables.items()]
    return rendered("tables.j2", title=title, tables=shown, caption=caption, footnotes=footnotes)


def fragment(page: str) -> str:
    """The tables of a page, with their caption."""
    return page.partition("<main>")[2].partition("</main>")[0]
