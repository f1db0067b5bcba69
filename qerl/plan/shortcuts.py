"""The keys `model` and `problems`: one checkpoint and one set of problems for every run of a configuration."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qerl.plan.experiments import plain
from qerl.settings.base import parse
from qerl.settings.benches import RolloutBench
from qerl.settings.config import Config
from qerl.settings.data import DatasetSettings
from qerl.settings.evaluation import TaskSettings, harness_of
from qerl.settings.models import LocalModel


def shortened(config: Config) -> Config:
    """Apply the command line's `model=` and `problems=`: every run uses that checkpoint and those problems.

    Results go to a separate folder, whose name ends in a hash of the two paths, since other paths may have equal names.
    """
    from qerl.data.sources import check_problem_file

    changes: dict[str, Any] = {}
    model = _plain_name(config.model, "model", ())
    problems = _plain_name(config.problems, "problems", config.datasets)
    if config.model is not None:
        changes["models"] = {model: LocalModel(source="local", path=config.model)}
        changes["benches"] = {
            key: bench.model_copy(update={"model": model}) if isinstance(bench, RolloutBench) else bench
            for key, bench in config.benches.items()
        }
    if config.problems is not None:
        record_format = check_problem_file(config.problems)
        origin = {"source": "local", "path": config.problems}
        same = next((known for known in config.datasets.values() if known.format == record_format), None)
        values = {"format": record_format, "origin": origin, **(same.asked if same else {})}
        dataset = parse(DatasetSettings, values, "problems")
        changes["datasets"] = {**config.datasets, problems: dataset}
        task = TaskSettings(dataset=problems, harness=harness_of(record_format))
        changes["evaluation"] = config.evaluation.model_copy(update={"tasks": [task]})
    base_change = {key: value for key, value in (("model", model), ("dataset", problems)) if value}
    changes["experiments"] = {
        key: experiment.model_copy(update={"base": {**experiment.base, **base_change}})
        for key, experiment in config.experiments.items()
    }
    identity = _path_hash(config.model, config.problems)
    changes["name"] = "-".join([config.name, *base_change.values(), identity]).replace(".", "_")
    return config.model_copy(update=changes)


def _plain_name(path: Path | None, otherwise: str, taken: Collection[str]) -> str:
    """A file's or folder's name as text for paths and commands; empty without a path.

    `otherwise` replaces a name without a plain character; a name in `taken` gets the path's hash.
    """
    if path is None:
        return ""
    name = path.resolve().stem if path.is_file() else path.resolve().name
    short = plain(name)[:60].strip("-.+") or otherwise
    return f"{short}-{_path_hash(path)}" if short in taken else short


def _path_hash(*paths: Path | None) -> str:
    """Eight hexadecimal digits that identify paths, relative to the working directory, which also has the results."""
    lie = [os.path.relpath(path.resolve()) if path else "" for path in paths]
    return hashlib.sha256("\0".join(lie).encode()).hexdigest()[:8]
