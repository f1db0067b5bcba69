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
from qerl.results.paths import FIGURES, REPORT_PAGE, SAMPLES_PAGE, TABLES

#: Characters per line if the output is not a terminal, such as a log.
WIDTH = 120


def print_summary(root: Path, console: Console | None = None) -> None:
    """Print the accuracy table of a folder of results, if it has one, and the paths of all that people read."""
    console = console or Console(width=None if Console().is_terminal else WIDTH)
    if not (root / REPORT_PAGE).exists():
        raise ResultError(f"{root / REPORT_PAGE} doesn't exist; run the workflow to its end first")
    if (file := root / TABLES / "accuracy.csv").exists():
        for dataset, rows in by_dataset(pd.read_csv(file)).items():
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
    """Paths by kind: tables as Markdown (CSV and LaTeX beside them), figures as PNG (SVG beside them), and pages."""
    by_kind = {
        "tables (.csv, .tex and .html beside them)": sorted((root / TABLES).rglob("*.md")),
        "figures (.svg beside them)": sorted((root / FIGURES).rglob("*.png")),
        "report, for a browser": [root / REPORT_PAGE],
        "samples, for a browser": [page for page in [root / SAMPLES_PAGE] if page.exists()],
    }
    return {kind: paths for kind, paths in by_kind.items() if paths}
