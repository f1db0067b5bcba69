"""A whole configuration: models, data sets, experiments, evaluation and benches.

This package doesn't import torch, because every call of Snakemake parses the configuration.
Unknown keys and impossible combinations are errors that name the key and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from qerl.settings.base import ConfigError, FilePath, Name, Settings
from qerl.settings.benches import BenchSettings, GateSettings, RolloutBench, ShapesSettings
from qerl.settings.data import DatasetSettings
from qerl.settings.errors import nearest
from qerl.settings.evaluation import EvaluationSettings, check_scored
from qerl.settings.models import ModelSettings, PretrainSettings
from qerl.settings.run import TrackerName
from qerl.settings.study import StudySettings


class Experiment(Settings):
    """Base settings, named arms that override them, and a grid over any keys (dotted: `adapter.rank`)."""

    base: dict[str, Any]
    arms: dict[Name, dict[str, Any]] = {"run": {}}
    """Settings of each arm over the base. An arm of null is left out, so that a protocol can remove one."""
    grid: dict[str, list[Any]] = {"seed": [0, 1, 2]}
    """Values of each key. Every combination is a run of every arm."""
    train: bool = True
    """False leaves training out: the runs are only timed, by benches of kind `step`."""
    tasks: list[str] | None = None
    """Data sets of `evaluation.tasks` on which bases and trained policies are scored. None takes all. With an empty
    list, only the training curves are reported."""
    on_failure: Literal["stop", "row"] = "stop"
    """What happens to a run that is out of memory, over `time_limit` or diverges, or whose followed run did. With
    `stop` its job fails. With `row` the failure is its result, which tables show as a row, and the workflow continues.
    To try again on another machine, delete the run's folder `train/<run>` in the results."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours that the steps of a run may take in all attempts together, checked before each step. A start with a higher
    limit continues where the lower one stopped."""
    omitted: dict[str, str] = {}
    """Arms of the paper that this experiment leaves out, each with the reason. `qerl plan` shows them."""

    @field_validator("base")
    @classmethod
    def _keys_are_nested(cls, base: dict[str, Any]) -> dict[str, Any]:
        return nested(base)

    @field_validator("arms", mode="before")
    @classmethod
    def _null_is_left_out(cls, arms: Any) -> Any:
        return {name: arm for name, arm in arms.items() if arm is not None} if isinstance(arms, Mapping) else arms

    @field_validator("arms")
    @classmethod
    def _arms_are_left(cls, arms: dict[Name, dict[str, Any]]) -> dict[Name, dict[str, Any]]:
        if not arms:
            raise ValueError("no arm is left, and so no run; give at least one, or leave `arms` out for a single run")
        return {name: nested(arm) for name, arm in arms.items()}

    @field_validator("grid")
    @classmethod
    def _grid_has_points(cls, grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"grid.{key} is empty, which leaves no run; give at least one value")
        return grid


#: The blocks of steps from whose means a run's drift is estimated, and so the least steps of a run.
DRIFT_BLOCKS = 20

Protocol = Literal["paper", "upstream-scripts"]


class Config(Settings):
    """A whole configuration file."""

    name: str
    """Name of the folder of results, results/NAME. It has letters, digits, - and _."""
    protocol: Protocol = "paper"
    """The source to follow where paper and scripts disagree. `paper` uses the file unchanged. Another protocol
    overrides keys by its entry of `protocols` and has its own folder of results.
    """
    protocols: dict[Protocol, dict[str, Any]] = {}
    """The keys in which each other protocol differs, placed as in the whole file."""
    lock: FilePath | None = None
    """File of the commits and hashes of everything from the hub. `qerl lock CONFIG` writes it."""
    models: dict[Name, ModelSettings]
    datasets: dict[Name, DatasetSettings]
    experiments: dict[Name, Experiment]
    evaluation: EvaluationSettings
    benches: dict[Name, BenchSettings] = {}
    gates: GateSettings | None = None
    shapes: ShapesSettings | None = None
    """Benches of speed and memory. With this key, models, data sets, experiments and evaluation may be left
    out."""
    drift: bool = False
    """Also report the drift of each run: whether the KL divergence of sampler and trainer grows over its steps. Runs
    then need at least 20 steps."""
    study: StudySettings | None = None
    """The comparison of paired arms, with a page of its own."""
    track: list[TrackerName] = []
    """Trackers of all runs whose experiment doesn't name its own."""
    fit_to_model: bool = False
    """Choose missing settings of runs and evaluation by the size and context of each experiment's local checkpoint, and
    by whether there is a GPU. They replace the defaults below (`qerl/plan/own_model.py`)."""
    model: FilePath | None = None
    """Checkpoint folder for every run. It is given on the command line."""
    problems: FilePath | None = None
    """File of problems for every run. It is given on the command line."""

    @model_validator(mode="before")
    @classmethod
    def _shapes_need_nothing_else(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.get("shapes"):
            return values
        return {"models": {}, "datasets": {}, "experiments": {}, "evaluation": {"tasks": []}, **values}

    @model_validator(mode="before")
    @classmethod
    def _follow_the_protocol(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("protocol", "paper") == "paper":
            return values
        protocol, parts = values["protocol"], values.get("protocols") or {}
        if not isinstance(protocol, str) or not isinstance(parts, Mapping) or "name" not in values:
            return values  # not a mapping, for which the fields raise the error
        if not isinstance(parts.get(protocol), Mapping):
            raise ValueError(f"protocol={protocol} is not in `protocols` ({', '.join(map(str, parts)) or 'empty'})")
        rest = _with_nested_keys({key: value for key, value in values.items() if key != "protocols"})
        return {**merged(rest, _with_nested_keys(parts[protocol])), "name": f"{values['name']}-{protocol}"}

    @field_validator("protocols")
    @classmethod
    def _keys_are_nested(cls, protocols: dict[Protocol, dict[str, Any]]) -> dict[Protocol, dict[str, Any]]:
        return {name: _with_nested_keys(values) for name, values in protocols.items()}

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not name.replace("-", "").replace("_", "").isalnum() or len(name.encode()) > 255:
            raise ValueError(
                f"{name!r} names a folder of results: use letters, digits, - and _ only, at most 255 bytes"
            )
        return name

    @model_validator(mode="after")
    def _names_exist(self) -> Config:
        for number, task in enumerate(self.evaluation.tasks):
            require(task.dataset, self.datasets, f"evaluation.tasks[{number}].dataset", "datasets")
            check_scored(task, self.datasets[task.dataset].format, f"evaluation.tasks[{number}]")
        asked = {task.dataset: None for task in self.evaluation.tasks}
        for name, experiment in self.experiments.items():
            for dataset in experiment.tasks or ():
                require(dataset, asked, f"experiments.{name}.tasks", "evaluation.tasks")
        for name, model in self.models.items():
            if isinstance(model, PretrainSettings):
                for dataset in model.datasets:
                    require(dataset, self.datasets, f"models.{name}.datasets", "datasets")
                    if self.datasets[dataset].answer == "tags":
                        raise ValueError(
                            f"models.{name}.datasets: pre-training imitates the solutions of {dataset!r} as they are, "
                            "without tags; give it a data set with answer: native"
                        )
        for name, bench in self.benches.items():
            if isinstance(bench, RolloutBench):
                require(bench.model, self.models, f"benches.{name}.model", "models")
            else:
                require(bench.experiment, self.experiments, f"benches.{name}.experiment", "experiments")
        if self.gates:
            require(self.gates.experiment, self.experiments, "gates.experiment", "experiments")
            require(self.gates.bench, self.benches, "gates.bench", "benches")
        compared = {studied.experiment for studied in self.study.experiments} if self.study else set()
        for number, studied in enumerate(self.study.experiments if self.study else ()):
            place = f"study.experiments[{number}]"
            require(studied.experiment, self.experiments, f"{place}.experiment", "experiments")
            if studied.pilot is not None:
                require(studied.pilot, self.experiments, f"{place}.pilot", "experiments")
            for name in filter(None, (studied.experiment, studied.pilot)):
                if self.experiments[name].tasks == []:
                    raise ConfigError(
                        f"{place} names {name}, which has no scores to compare; give experiments.{name}.tasks a data "
                        "set"
                    )
            if studied.pilot in compared:
                raise ConfigError(
                    f"{place}.pilot={studied.pilot} is itself compared, so its runs can't choose the learning rates; "
                    "name an experiment that isn't in study.experiments, or leave pilot out"
                )
        return self


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `override` over it. Nested mappings are merged in the same way."""
    result = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


#: The deepest allowed nesting of settings; deeper values contain themselves through an alias.
_DEEPEST = 20


def nested(dotted: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge {"adapter.rank": 8, "adapter": {"alpha": 16}} to {"adapter": {"rank": 8, "alpha": 16}}, recursively."""
    if depth > _DEEPEST:
        raise ConfigError(f"keys of a run are nested over {_DEEPEST} deep; see whether an alias (*) contains itself")
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is not a key of a run; write it as text")
        branch = nested(value, depth + 1) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = merged(tree, branch)
    return tree


def _with_nested_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with dotted keys of runs nested: merging compares keys, and the later of two spellings would win."""
    experiments = values.get("experiments")
    if not isinstance(experiments, Mapping):
        return dict(values)
    return {**values, "experiments": {name: _of_runs(experiment) for name, experiment in experiments.items()}}


def _of_runs(experiment: Any) -> Any:
    if not isinstance(experiment, Mapping):
        return experiment
    result = dict(experiment)
    if isinstance(base := result.get("base"), Mapping):
        result["base"] = nested(base)
    if isinstance(arms := result.get("arms"), Mapping):
        result["arms"] = {arm: nested(keys) if isinstance(keys, Mapping) else keys for arm, keys in arms.items()}
    return result


def require(name: str, known: Mapping[str, Any], key: str, section: str) -> None:
    """Raise `ConfigError` unless the value `name` of `key` is a key of `section`."""
    if name not in known:
        among = ", ".join(known) or "empty"
        raise ConfigError(f"{key} names {name!r}, which is not in `{section}` ({among}){nearest(name, known)}")
