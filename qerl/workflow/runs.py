"""The parts of a plan: checkpoints, runs and evaluations, and an experiment's runs by arm and grid."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qerl.results.printed import figures_fed, tables_fed
from qerl.settings.base import ConfigError, parse
from qerl.settings.models import Base
from qerl.settings.run import RunSettings
from qerl.settings.workflow import Config, Experiment, RolloutBench, StepBench, merged, nested

# The parts of a plan: checkpoints, runs and evaluations, and the tables and figures from them.


@dataclass(frozen=True)
class PlannedRun:
    """One training run, which is a row of the run table."""

    id: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings


@dataclass(frozen=True)
class PlannedEvaluation:
    """An evaluation of a base in one weight format or of a run's policy; `tasks` has the names of data sets."""

    id: str
    base: Base
    run: PlannedRun | None
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All jobs' inputs of one configuration: checkpoints, runs and evaluations."""

    config: Config
    runs: dict[str, PlannedRun]
    #: Runs of experiments with `train: false`.
    timed: dict[str, PlannedRun]
    #: The bases by their names.
    checkpoints: dict[str, Base]
    evaluations: dict[str, PlannedEvaluation]

    @property
    def tables(self) -> list[str]:
        """The names of the tables for which this configuration has results."""
        return [
            "accuracy",
            "quantization",
            *_for_benches(self.config, {"step": "memory_speed", "rollout": "throughput"}),
            *["drift"] * self.config.drift,
            *tables_fed(self._covered),
        ]

    @property
    def figures(self) -> list[str]:
        """The names of the figures for which this configuration has results."""
        noisy = any(run.settings.noise.schedule != "off" for run in self.runs.values())
        curves = [
            "accuracy",
            "reward",
            "entropy",
            "completion_length",
            *["noise"] * noisy,
            *["drift"] * self.config.drift,
        ]
        return [*curves, *_for_benches(self.config, {"rollout": "throughput"}), *figures_fed(self._covered)]

    @property
    def _covered(self) -> set[tuple[str, str]]:
        """(kind, model) of the results that are compared with the paper's (`qerl.results.printed`)."""
        models = {base.model for base in self.checkpoints.values()}
        evaluated = {(task.dataset, model) for task in self.config.evaluation.tasks for model in models}
        trained = {
            (kind, run.settings.model) for run in self.runs.values() for kind in ("run", f"data={run.settings.dataset}")
        }
        measured = {
            (bench.kind, model)
            for name, bench in self.config.benches.items()
            for model in (
                [bench.model]
                if isinstance(bench, RolloutBench)
                else [run.settings.model for run in self.step_bench_runs(name)]
            )
        }
        return evaluated | trained | measured

    @property
    def folder(self) -> str:
        """The folder of all results of this configuration."""
        return f"results/{self.config.name}"

    def bench_bases(self, bench: str) -> list[Base]:
        """The bases that a rollout bench reads."""
        settings = self.config.benches[bench]
        assert isinstance(settings, RolloutBench)
        return [Base(settings.model, weights) for weights in settings.weights]

    def step_bench_runs(self, bench: str) -> list[PlannedRun]:
        """The runs that a step bench times: the first seed of each arm and point of its experiment's grid."""
        settings = self.config.benches[bench]
        assert isinstance(settings, StepBench)
        first: dict[str, PlannedRun] = {}
        for run in (*self.runs.values(), *self.timed.values()):
            if run.experiment == settings.experiment:
                point = {key: value for key, value in run.varied.items() if key != "seed"}
                first.setdefault(json.dumps([run.arm, point]), run)
        return list(first.values())


def _for_benches(config: Config, names: Mapping[str, str]) -> list[str]:
    kinds = {bench.kind for bench in config.benches.values()}
    return [name for kind, name in names.items() if kind in kinds]


# The runs of an experiment: one for each arm and point of its grid.


def expand(name: str, experiment: Experiment, defaults: Mapping[str, Any]) -> Iterator[PlannedRun]:
    """One run for each arm and point of the grid. `defaults` are keys of the runs that the experiment may override."""
    last = [key.rpartition(".")[2] for key in experiment.grid]
    labels = {key: part if last.count(part) == 1 else key for key, part in zip(experiment.grid, last, strict=True)}
    base = merged(defaults, experiment.base)
    same: dict[str, dict[str, RunSettings]] = {}
    for arm, changes in experiment.arms.items():
        of_arm = merged(base, changes)
        written = functools.partial(written_as, name, experiment, arm)
        points: list[dict[str, Any]] = []
        for values in itertools.product(*experiment.grid.values()):
            given = dict(zip(experiment.grid, values, strict=True))
            settings = parse(RunSettings, merged(of_arm, nested(given)), "", written)
            varied = {key: _as_taken(value, key, settings) for key, value in given.items()}
            if varied in points:
                twice = ", ".join(f"{key}={value}" for key, value in varied.items())
                raise ConfigError(f"experiments.{name}.grid has {twice} twice; keep one of the equal values")
            points.append(varied)
            others = same.setdefault(repr(varied), {})
            # Arms that are only timed may be equal, which shows how far times repeat.
            if experiment.train and settings in others.values():
                twin = next(other for other, of_other in others.items() if of_other == settings)
                raise ConfigError(
                    f"experiments.{name}.arms.{arm} has the same settings as the arm {twin}, so their runs would be "
                    "the same; change one, or leave it out"
                )
            others[arm] = settings
            suffix = "".join(f"-{labels[key]}{plain(value)}" for key, value in varied.items())
            yield PlannedRun(f"{name}-{arm}{suffix}", name, arm, varied, settings)


def written_as(name: str, experiment: Experiment, arm: str, key: str) -> str:
    """The key in the configuration from which a dotted key of a run's settings comes."""
    above = f"experiments.{name}"
    if any(f"{key}.".startswith(f"{varied}.") for varied in experiment.grid):
        return f"{above}.grid.{key}"
    if experiment.arms[arm] and (not key or _holds(experiment.arms[arm], key)):
        return f"{above}.arms.{arm}.{key}".removesuffix(".")
    return f"{above}.base.{key}".removesuffix(".")


def _holds(tree: Any, key: str) -> bool:
    """Whether a value exists at a dotted key, whose list indices (`[0]`) are ignored."""
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _as_taken(value: Any, key: str, settings: Any) -> Any:
    """A value of a grid. Synonyms of "off", and numbers that YAML reads as text (1e-5), become the settings' value."""
    for part in key.split("."):
        settings = getattr(settings, part)
    if isinstance(value, Mapping):
        return {inner: _as_taken(of_inner, inner, settings) for inner, of_inner in value.items()}
    as_text = isinstance(value, str) and isinstance(settings, (int, float))
    return settings if settings in ("off", None) or as_text else value


def plain(value: Any) -> str:
    """A value as text for paths and commands."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))
