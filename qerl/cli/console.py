"""What the commands print on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from qerl.host.console import VisibleConsole, visible

if TYPE_CHECKING:
    from rich.table import Table


def console() -> Console:
    """The terminal at its width; a file or pipe at the width of tables."""
    from qerl.report.format import WIDTH

    return VisibleConsole(width=None if Console().is_terminal else WIDTH)


def print_error(sentence: object) -> None:
    """Print a sentence for the user on standard error."""
    typer.echo(f"qerl: {visible(str(sentence))}", err=True)


def print_table(title: str, rows: list[dict[Any, Any]]) -> None:
    """Print rows, whose keys are the columns, under a title."""
    import pandas as pd

    from qerl.report.format import rich_table

    show(rich_table(title, pd.DataFrame(rows)))


def show(table: Table) -> None:
    """Print a table, or its cells line by line where the terminal is too narrow for it."""
    from qerl.report.format import fitting

    screen = console()
    screen.print(fitting(table, screen))
