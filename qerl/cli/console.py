"""What the commands print on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    pass


def console() -> Console:
    """The terminal at its width; a file or pipe at the width of tables."""
    from qerl.report.summary import WIDTH

    return Console(width=None if Console().is_terminal else WIDTH)


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows, whose keys are the columns, under a title."""
    import pandas as pd

    from qerl.report.summary import rich_table

    console().print(rich_table(title, pd.DataFrame(rows)))
