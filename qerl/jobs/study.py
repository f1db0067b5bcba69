"""Jobs of a study: gather the data of its runs, and make the page of this data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qerl.jobs.base import Job, Part


class GatheredExperiment(Part):
    """An experiment of the study: what its runs answer."""

    role: Literal["main", "pilot"]
    size: str


class GatherJob(Job):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    kind: Literal["gather"] = "gather"
    study: str
    """The name of the configuration."""
    decides: bool
    experiments: dict[str, GatheredExperiment]
    sizes: dict[str, str]
    """The size of each base that runs train, by the name of its model."""
    tasks: dict[str, tuple[str, str]]
    """The data set and the split of each task of the evaluation."""
    results: Path
    """A file with the path of a stored result a line."""
    only_finished: bool
    """Leave out runs without a result. False refuses them."""


class RealArm(Part):
    """An arm of a configuration of real models, with the GPU-hours that it costs."""

    experiment: str
    model: str
    arm: str
    number: str
    """The number of its counterpart in the protocol."""
    seeds: int
    """The number of seeds in the configuration."""
    hours: dict[int, str]
    """The GPU-hours of training and evaluation by the number of seeds; numbers after ~ are estimates."""


class PageJob(Job):
    """Make tables, figures and the page of a study's data."""

    kind: Literal["page"] = "page"
    data: list[Path]
    """The folders of the Parquet files. Each has some of the runs."""
    real: list[RealArm]
    real_file: Path | None
    """The configuration that has these arms."""
    machine: str
    """The machine of the hours."""
