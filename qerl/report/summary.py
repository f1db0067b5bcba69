"""The summary of a finished workflow on the command line: the main table, and the paths of all results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qerl.report.formatting import present
from qerl.report.pages import by_dataset
from qerl.results.files import ResultError
from qerl.results.paths import FIGURES, TABLES

#: Characters per line if the output is not a terminal, such as a log.
WIDTH = 120


def print_summary(root: Path, console: Console | None = None) -> None:
    """Print tables/accuracy.csv of a folder of results, then the paths of its tables, its figures and its report."""
    console = console or Console(width=None if Console().is_terminal else WIDTH)
    file = root / TABLES / "accuracy.csv"
    if not file.exists():
        raise ResultError(f"{file} doesn't exist; run the workflow to its end first")
    table = pd.read_csv(file)
    for dataset, rows in by_dataset(table).items():
        console.print(rich_table(f"{root.name}: accuracy on {dataset}", rows))
    for kind, paths in _written(root).items():
        console.print(Text(f"{kind}:", style="bold"))
        for path in paths:
            console.print(Text(f"  {path}"), soft_wrap=True)


def rich_table(title: str, frame: pd.DataFrame) -> Table:
    """A table for a terminal, formatted by `qerl.report.formatting`."""
    shown = present(frame)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        table.add_column(Text(str(column)), overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _written(root: Path) -> dict[str, list[Path]]:
    """Paths by kind: tables as Markdown (CSV and LaTeX beside them), figures as PNG (SVG beside them), the report."""
    by_kind = {
        "tables (.csv, .tex and .html beside them)": sorted((root / TABLES).rglob("*.md")),
        "figures (.svg beside them)": sorted((root / FIGURES).rglob("*.png")),
        "report": [root / "report.html"] if (root / "report.html").exists() else [],
    }
    return {kind: paths for kind, paths in by_kind.items() if paths}
