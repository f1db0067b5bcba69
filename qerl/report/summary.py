"""The summary of a finished workflow on the command line: the main table, and the paths of all results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from qerl.host.console import VisibleConsole
from qerl.report.format import by_dataset, present
from qerl.results.paths import FIGURES, REPORT_PAGE, SAMPLES_PAGE, STUDY, STUDY_PAGE, TABLES
from qerl.results.store import ResultError

#: Characters per line if the output is not a terminal, such as a log.
WIDTH = 120
#: More characters than any table has in a line.
_WIDEST = 10_000


def print_summary(root: Path, console: Console | None = None) -> None:
    """Print the accuracy table of a folder of results, if it has one, and the paths of all that people read."""
    console = console or VisibleConsole(width=None if Console().is_terminal else WIDTH)
    if not (root / REPORT_PAGE).exists():
        raise ResultError(f"{root / REPORT_PAGE} doesn't exist; run the workflow to its end first")
    if (file := root / TABLES / "accuracy.csv").exists():
        for dataset, rows in by_dataset(pd.read_csv(file)).items():
            console.print(fitting(rich_table(f"{root.name}: accuracy on {dataset}", rows), console))
    for kind, paths in _written(root).items():
        console.print(Text(f"{kind}:", style="bold"))
        for path in paths:
            console.print(Text(f"  {path}"), soft_wrap=True)


def rich_table(title: str, frame: pd.DataFrame) -> Table:
    """A table for a terminal, formatted by `qerl.report.format`."""
    shown = present(frame)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        table.add_column(Text(str(column)), overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(Text(cell) for cell in row))
    return table


def fitting(table: Table, screen: Console) -> Table | Text:
    """The table, with less space where that lets it fit, or a line for each cell if its longest words don't fit."""
    lines, words = _widths(table, str.splitlines), _widths(table, str.split)
    for padding in (1, 0):
        table.padding = (0, padding)
        wide = screen.options.update(width=_WIDEST)
        room = screen.width - (screen.measure(table, options=wide).maximum - sum(lines))
        if room >= sum(words):
            _share(table, lines, words, room)
            return table
    names, *rows = zip(*map(_cells, table.columns), strict=True)
    blocks = ["".join(f"{name}: {cell}\n" for name, cell in zip(names, row, strict=True)) for row in rows]
    return Text("\n".join([f"{table.title or ''}\n", *blocks]))


def _cells(column: Column) -> list[str]:
    return [str(column.header), *map(str, column.cells)]


def _widths(table: Table, parts: Callable[[str], list[str]]) -> list[int]:
    """The longest line, or the longest word, of each column."""
    return [max((cell_len(part) for cell in _cells(c) for part in parts(cell)), default=0) for c in table.columns]


def _share(table: Table, lines: list[int], words: list[int], room: int) -> None:
    """Give each column its longest line, less what the others need: no word is broken."""
    widths = [*lines]
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda place: widths[place] - words[place])
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


def _written(root: Path) -> dict[str, list[Path]]:
    """Paths by kind: tables as Markdown (CSV and LaTeX beside them), figures as PNG (SVG beside them), and pages."""
    by_kind = {
        "tables (.csv, .tex and .html beside them)": sorted((root / TABLES).rglob("*.md")),
        "figures (.svg beside them)": sorted((root / FIGURES).rglob("*.png")),
        "study, in Markdown": sorted((root / STUDY).glob(f"*/{STUDY_PAGE}")),
        "report, for a browser": [root / REPORT_PAGE],
        "samples, for a browser": [page for page in [root / SAMPLES_PAGE] if page.exists()],
    }
    return {kind: paths for kind, paths in by_kind.items() if paths}
