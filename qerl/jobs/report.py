"""Jobs that make tables and figures of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qerl.jobs.base import Job


class TableJob(Job):
    """Make one table."""

    kind: Literal["table"] = "table"
    name: str
    results: Path
    """A file with the path of a stored result a line."""


class FigureJob(Job):
    """Make one figure."""

    kind: Literal["figure"] = "figure"
    name: str
    results: Path
    """A file with the path of a stored result a line."""


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    kind: Literal["shapes"] = "shapes"
    files: list[Path]
    """Points that are measured, here or elsewhere."""
