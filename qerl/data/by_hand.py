"""Settings of runs and data sets by hand, in which a path of records may replace a data set's settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.data.sources import check_problem_file
from qerl.settings.base import ConfigError, can_name_a_file, not_empty, parse
from qerl.settings.run import RunFile


def local_dataset(path: Path, **origin: Any) -> dict[str, Any]:
    """Values of `DatasetSettings` for a file or folder of records, with the format that its records have."""
    return {"format": check_problem_file(path), "origin": {"source": "local", "path": path, **origin}}


def parse_run(values: Mapping[str, Any], where: str) -> RunFile:
    """The settings of a run by hand, whose `dataset` may be a path. Raises `ConfigError`, which names the key."""
    dataset = values.get("dataset")
    if isinstance(dataset, (str, Path)):
        try:
            values = {**values, "dataset": local_dataset(can_name_a_file(Path(not_empty(dataset))))}
        except ValueError as error:
            raise ConfigError(f"{where}: `dataset`: {error}") from None
    return parse(RunFile, values, where)
