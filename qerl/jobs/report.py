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


class ReportJob(Job):
    """Make the report, one page of all results."""

    kind: Literal["report"] = "report"
    name: str
    """The name of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""
    main: Path | None
    """The accuracy table (.csv), with which the report begins; none without evaluations."""
    tables: list[Path]
    """Pages of tables, or folders of them."""
    figures: list[Path]
    """Paths of figures without their endings, or folders of them. The first two stand beside the main table."""
    samples: str
    """The address of the page of samples, from that of the report; empty without one."""
    omitted: dict[str, str]
    """The arms that the configuration leaves out, and why."""


class SamplesJob(Job):
    """Make the page of samples."""

    kind: Literal["samples"] = "samples"
    name: str
    """The name of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    kind: Literal["shapes"] = "shapes"
    files: list[Path]
    """Points that are measured, here or elsewhere."""
