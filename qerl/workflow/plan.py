"""From a configuration to its plan: runs, evaluations, bases and the speed grid; and the plan of a Snakemake call."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.checkpoints.shapes import PUBLISHED, SIZES, has_packed_experts_alone, shape_of
from qerl.data.hub import check_pinned, with_locked_revisions
from qerl.host.provenance import check_clock
from qerl.jobs import Plan, PlannedEvaluation, PlannedRun
from qerl.report_jobs import PointJob
from qerl.results.paths import measured_file
from qerl.results.schema import read
from qerl.results.speeds import SCHEMAS
from qerl.settings.base import ConfigError, check_kind, parse, read_yaml
from qerl.settings.models import Base
from qerl.settings.run import RunSettings
from qerl.settings.workflow import Config, Experiment, RolloutBench, merged, nested
from qerl.settings.workloads import PointPart, ShapesSettings
from qerl.workflow.checks import (
    check_engines,
    check_inputs,
    check_local_models,
    check_run,
    written_as,
)

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
        for values in itertools.product(*experiment.grid.values()):
            given = dict(zip(experiment.grid, values, strict=True))
            settings = parse(RunSettings, merged(of_arm, nested(given)), "", written)
            varied = {key: _as_taken(value, key, settings) for key, value in given.items()}
            others = same.setdefault(repr(varied), {})
            # Arms that are only timed may be equal, which shows how far times repeat.
            twin = next((other for other, of_other in others.items() if other != arm and of_other == settings), None)
            if experiment.train and twin:
                raise ConfigError(
                    f"experiments.{name}.arms.{arm} has the same settings as the arm {twin}, so their runs would be "
                    "the same; change one, or leave it out"
                )
            others[arm] = settings
            suffix = "".join(f"-{labels[key]}{plain(value)}" for key, value in varied.items())
            yield PlannedRun(f"{name}-{arm}{suffix}", name, arm, varied, settings)


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


# From a configuration to its plan.

#: The longest id in characters; with suffixes it becomes a file name, which has at most 255 bytes.
_LONGEST_ID = 200


def plan(config: Config) -> Plan:
    """Expand a configuration to its plan. Raises `ConfigError`, which names the part that doesn't fit."""
    runs: dict[str, PlannedRun] = {}
    for name, experiment in config.experiments.items():
        for run in expand(name, experiment, {"track": config.track}):
            if run.id in runs:
                raise ConfigError(
                    f"two runs are named {run.id}; keep one of equal grid values, rename an arm or a grid key, or make "
                    "arms of grid values that differ only in special characters"
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
    checkpoints: dict[str, Base] = {}
    for base in _checkpoints(config, runs):
        if checkpoints.setdefault(base.name, base) != base:
            raise ConfigError(f"two checkpoints are named {base.name}; rename a model or a data set")
    trained = {id: run for id, run in runs.items() if config.experiments[run.experiment].train}
    timed = {id: run for id, run in runs.items() if id not in trained}
    evaluations: dict[str, PlannedEvaluation] = {}
    for evaluation in _evaluations(config, trained):
        if evaluation.id in evaluations:
            raise ConfigError(f"a run has the name of the evaluation {evaluation.id}; rename its experiment or arm")
        evaluations[evaluation.id] = evaluation
    points = point_parts(config.shapes) if config.shapes else {}
    return Plan(config, trained, timed, checkpoints, evaluations, points)


def _evaluations(config: Config, trained: Mapping[str, PlannedRun]) -> Iterator[PlannedEvaluation]:
    """Evaluations of the runs' bases and of bf16, on the tasks of all their runs, and then of the runs."""
    every = dict.fromkeys(task.dataset for task in config.evaluation.tasks)
    named = {id: config.experiments[run.experiment].tasks for id, run in trained.items()}
    of_run = {id: tuple(every if tasks is None else tasks) for id, tasks in named.items()}
    of_base: dict[Base, set[str]] = {}
    for id, run in trained.items():
        for base in (Base(run.settings.model, "bf16"), run.settings.base):
            of_base.setdefault(base, set()).update(of_run[id])
    for base, tasks in of_base.items():
        if tasks:
            yield PlannedEvaluation(f"base-{base.name}", base, None, tuple(task for task in every if task in tasks))
    for id, run in trained.items():
        if of_run[id]:
            yield PlannedEvaluation(id, run.settings.base, run, of_run[id])


def _checkpoints(config: Config, runs: Mapping[str, PlannedRun]) -> Iterator[Base]:
    """Every base in bf16 (the reference of each table) and in each weight format that a run or bench uses."""
    for run in runs.values():
        yield Base(run.settings.model, "bf16")
        yield run.settings.base
    for bench in config.benches.values():
        if isinstance(bench, RolloutBench):
            yield from (Base(bench.model, weights) for weights in ("bf16", *bench.weights))


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
        plan_ = plan(with_locked_revisions(parse(Config, values, "")))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_inputs(plan_)
    return plan_


def _as_typed(file: Path) -> str:
    """A file's path, relative to the working directory if it is below it."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


# The speed grid (`shapes`): its jobs and their states. Each job measures some points in its own process.

#: The word in `state` for points that aren't measured yet.
MISSING = "missing"
#: By system, the weight formats that it doesn't support, or not with random weights. vLLM serves models whose experts
#: alone are packed.
_UNSUPPORTED = {"vllm": ("mxfp4",), "trl": ("mxfp4", "nvfp4")}


def point_parts(settings: ShapesSettings) -> dict[str, list[PointPart]]:
    """The parts of every job by its id, in the order of measurement. Raises ConfigError for impossible points.

    Entries that share a set-up are one job, at the place of the first.
    """
    shared: dict[str, dict[str, PointPart]] = {}
    for job, name, part in itertools.chain.from_iterable(grid.parts() for grid in settings.grids):
        _check_point(part.system, part.work.base)
        others = shared.setdefault(job, {})
        if name in others:
            raise ConfigError(f"shapes: {name} occurs twice; merge the two entries and their sequences")
        others[name] = part
    return {id: [*parts.values()] for id, parts in shared.items()}


def _check_point(system: str, base: Base) -> None:
    size, weights = base.model, base.weights
    if size not in SIZES:
        raise ConfigError(f"shapes: size {size!r} is unknown; use one of {', '.join(SIZES)}")
    if size in PUBLISHED and (system == "trl" or (system, weights) == ("vllm", "nf4")):
        raise ConfigError(f"shapes: {system} has no random {weights} weights of {size}; remove it from that entry")
    if weights in _UNSUPPORTED.get(system, ()) and not (system == "vllm" and has_packed_experts_alone(size)):
        raise ConfigError(f"shapes: {system} doesn't support {weights}; remove it from that entry")
    if base.packed_nets and (weights == "bf16" or shape_of(size).nets is None):
        what = "are not packed in bf16" if weights == "bf16" else f"are not in {size}"
        raise ConfigError(f"shapes: pack_delta_nets asks for delta nets that {what}; remove pack_delta_nets there")


def point_jobs(parts: dict[str, list[PointPart]], folder: Path) -> dict[str, PointJob]:
    """The jobs by their ids. Each writes its files to `folder`/ID, and keeps those of an earlier attempt."""
    return {id: PointJob(parts=of_job, out=folder / id) for id, of_job in parts.items()}


def state(job: PointJob, settings: ShapesSettings) -> str:
    """The state of a job as text, by the points of this machine or by committed ones."""
    missing, points = sum(_missing(job, settings).values()), sum(len(part.points) for part in job.parts)
    if missing == points:
        return MISSING
    files = [(file, measured_file(settings.samples, file)) for file in job.files]
    where = dict.fromkeys("measured" if file == one else "committed" for file, one in files if one)
    return " and ".join(where) + (f", {missing} of {points} points {MISSING}" if missing else "")


def remaining(job: PointJob, settings: ShapesSettings) -> PointJob | None:
    """The job without the files that have all its points, or None if no file is left."""
    missing = _missing(job, settings)
    left = [part for part in job.parts if missing[part.file]]
    return job.model_copy(update={"parts": left}) if left else None


def _missing(job: PointJob, settings: ShapesSettings) -> dict[str, int]:
    """How many points no file has, by the name of their file."""
    missing = {}
    for part in job.parts:
        file = measured_file(settings.samples, job.out / part.file)
        missing[part.file] = len(read(SCHEMAS[part.work.bench], file).lacking(part) if file else part.points)
    return missing


# The plan of a call of Snakemake.


# Snakemake merges --configfile into a configfile: directive key by key, so experiments of the default would leak into
# the user's; the workflow reads its default itself, only when none was given.
def workflow_plan(given: Mapping[str, Any], files: Sequence[Path], root: Path) -> Plan:
    """The plan of what Snakemake was given: `--configfile` replaces the default, `--config` sets top-level keys.

    `given` has both, merged; `root` is the clone. The default is config/config.yaml of the working directory, as in
    .test, if there is one, else the miniature's.
    Raises ValueError, which names the key or the file.
    """
    own = Path("config/config.yaml")
    default = own if own.is_file() else root / "config/mini.yaml"
    for file in files:
        read_yaml(file)  # Snakemake takes the last one of two equal keys
    plan = plan_from(given, default, files)
    check_clock([Path(plan.folder)])
    return plan


def check_start(plan: Plan, workflow: Any) -> None:
    """Raise ValueError for what jobs would fail with later, as Snakemake (its `workflow`) is about to start them."""
    check_pinned(plan.config, " ".join(map(str, workflow.configfiles)))
    deployment = {str(method) for method in workflow.deployment_settings.deployment_method}
    if "apptainer" in deployment and not os.environ.get("QERL_IMAGE"):
        raise ConfigError("--sdm apptainer needs an image: set QERL_IMAGE to its file or address, see Containerfile")
    if not deployment:  # with one, jobs have environments of their own
        check_engines(plan)
        check_local_models(plan)
    for run in plan.runs.values() if workflow.local_exec else ():
        if run.settings.nodes > 1:
            raise ConfigError(
                f"experiment {run.experiment}, arm {run.arm}: nodes={run.settings.nodes} needs a cluster; use a "
                "profile such as profiles/slurm, or set nodes=1"
            )
