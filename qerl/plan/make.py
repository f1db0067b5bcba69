"""From a configuration to its plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.data.hub_lock import with_locked_revisions
from qerl.plan.checks import check_drift, check_followed, check_inputs, check_run
from qerl.plan.experiments import expand
from qerl.plan.own_model import described, fitted, traits
from qerl.plan.sheets import Checkpoint, Plan, PlannedEvaluation, PlannedRun
from qerl.plan.shortcuts import shortened
from qerl.settings.base import ConfigError, parse
from qerl.settings.benches import RolloutBench
from qerl.settings.config import Config
from qerl.settings.models import LocalModel
from qerl.settings.reading import check_kind, read_yaml

#: The longest id in characters; with suffixes it becomes a file name, which has at most 255 bytes.
_LONGEST_ID = 200


def plan(config: Config) -> Plan:
    """Expand a configuration to its plan. Raises `ConfigError`, which names the part that doesn't fit."""
    config = shortened(config) if config.model or config.problems else config
    runs: dict[str, PlannedRun] = {}
    for name, experiment in config.experiments.items():
        for run in expand(name, experiment, {"track": config.track}):
            if run.id in runs:
                raise ConfigError(
                    f"two runs are named {run.id}; rename an arm or a grid key, or make arms of grid values that "
                    "differ only in special characters"
                )
            if len(run.id) > _LONGEST_ID:
                raise ConfigError(
                    f"experiments.{name}.grid: the run's name {run.id[:40]}... has over {_LONGEST_ID} "
                    "characters; make arms of the grid's long values"
                )
            check_run(run, config)
            runs[run.id] = run
    if not (config.shapes or config.benches or any(config.experiments[run.experiment].train for run in runs.values())):
        raise ConfigError("nothing to do: `experiments` has no run to train, and there are no `benches` or `shapes`")
    checkpoints = _named_apart(_checkpoints(config, runs))
    trained = {id: run for id, run in runs.items() if config.experiments[run.experiment].train}
    timed = {id: run for id, run in runs.items() if id not in trained}
    evaluations: dict[str, PlannedEvaluation] = {}
    for evaluation in _evaluations(config, trained):
        if evaluation.id in evaluations:
            raise ConfigError(f"a run has the name of the evaluation {evaluation.id}; rename its experiment or arm")
        evaluations[evaluation.id] = evaluation
    made = Plan(config, trained, timed, checkpoints, evaluations)
    check_followed(made)
    check_drift(made)
    return made


def _evaluations(config: Config, trained: Mapping[str, PlannedRun]) -> Iterator[PlannedEvaluation]:
    """Evaluations of the runs' bases and of bf16, on the tasks of all their runs, and then of the runs."""
    every = dict.fromkeys(task.dataset for task in config.evaluation.tasks)
    of_run = {id: _tasks(config, run) for id, run in trained.items()}
    of_base: dict[Checkpoint, set[str]] = {}
    for id, run in trained.items():
        for base in (Checkpoint(run.settings.model, "bf16"), run.checkpoint):
            of_base.setdefault(base, set()).update(of_run[id])
    for base, asked in of_base.items():
        if asked:
            yield PlannedEvaluation(f"base-{base.id}", base, None, tuple(task for task in every if task in asked))
    for id, run in trained.items():
        if of_run[id]:
            yield PlannedEvaluation(id, run.checkpoint, run, of_run[id])


def _tasks(config: Config, run: PlannedRun) -> tuple[str, ...]:
    named = config.experiments[run.experiment].tasks
    every = dict.fromkeys(task.dataset for task in config.evaluation.tasks)
    return tuple(every) if named is None or config.problems else tuple(named)


def _checkpoints(config: Config, runs: Mapping[str, PlannedRun]) -> Iterator[Checkpoint]:
    """Every base in bf16 (the reference of each table) and in each weight format that a run or bench uses."""
    for run in runs.values():
        yield Checkpoint(run.settings.model, "bf16")
        yield run.checkpoint
    for bench in config.benches.values():
        if isinstance(bench, RolloutBench):
            yield from (Checkpoint(bench.model, weights) for weights in ("bf16", *bench.weights))


def _named_apart(checkpoints: Iterable[Checkpoint]) -> dict[str, Checkpoint]:
    """The distinct checkpoints by id. Raises ConfigError if two have the same id."""
    named: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        if named.setdefault(checkpoint.id, checkpoint) != checkpoint:
            raise ConfigError(f"two checkpoints are named {checkpoint.id}; rename a model or a data set")
    return named


def plan_from(given: Mapping[str, Any], default: Path, files: Sequence[Path] = (), typed: Collection[str] = ()) -> Plan:
    """The plan of Snakemake's arguments: a whole configuration, or single keys that override the one in `default`.

    A whole configuration comes from `files`, if there are any, except for the keys `typed` on the command line. Errors
    name both.
    """
    values, where = given, ", ".join(map(_as_typed, files)) or "configuration"
    if not files and "name" not in given:
        values, where, typed = {**read_yaml(default), **given}, _as_typed(default), given
    if typed:
        where += f" with {', '.join(map(str, typed))} of the command line"
    check_kind(values, where, of_run=False)
    if "name" not in values:
        raise ConfigError(f"{where} has no `name`; give it a `name`: its results go to results/NAME")
    if values.get("protocol", "paper") != "paper":
        where += f" with protocol {values['protocol']}"
    try:
        plan_ = plan(with_locked_revisions(parse(Config, fitted(values), "")))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_inputs(plan_)
    return plan_


def _as_typed(file: Path) -> str:
    """A file's path, relative to the working directory if it is below it."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def fitting(plan_: Plan) -> list[str]:
    """Lines for the user about the settings that were chosen by the models."""
    if not plan_.config.fit_to_model:
        return []
    first = {run.settings.model: run for run in reversed(plan_.runs.values())}
    lines = []
    for name, run in first.items():
        model = plan_.config.models[name]
        assert isinstance(model, LocalModel)
        about, *keys = described(traits(model.path), run.settings.model_dump())
        lines += [f"{model.path}: {about}", *keys]
    return [*lines, f"{len(plan_.runs)} runs, results in {plan_.folder}"]
