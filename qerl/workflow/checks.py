"""Checks of a plan before any job starts, and of models with their problems."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.checkpoints.files import check_base, check_room, read_config, usable_length
from qerl.data.hub import check_folder
from qerl.host.imports import check, check_engine, check_trackers
from qerl.settings.base import ConfigError, UserError
from qerl.settings.data import FunctionData, HubData, LocalData
from qerl.settings.models import FORMATS, LocalModel, PretrainSettings
from qerl.settings.run import CHECKED, FITTED, RunSettings
from qerl.settings.workflow import DRIFT_BLOCKS, Config, EvaluationSettings, RolloutBench, TaskSettings, require
from qerl.workflow.runs import Plan, PlannedEvaluation, PlannedRun, written_as

# The checks of models with their problems that precede any long job.


@dataclass(frozen=True)
class ModelCheck:
    """The check of a model that this project didn't train with the problems of a run or of an evaluation's tasks."""

    model: str
    runs: tuple[RunSettings, ...]
    evaluation: EvaluationSettings

    @property
    def datasets(self) -> list[str]:
        """The data sets that are checked."""
        return sorted({run.dataset for run in self.runs} | {task.dataset for task in self.evaluation.tasks})

    @property
    def id(self) -> str:
        """An id from the check's content, so that a changed setting is a new check and leaves other runs' checks
        valid.
        """
        runs = [run.model_dump(mode="json", include=CHECKED) for run in self.runs]
        content = {
            "model": self.model,
            "runs": json.dumps(runs),
            "evaluation": self.evaluation.model_dump_json(),
            "datasets": self.datasets,
        }
        return f"{self.model}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"


def run_check(plan: Plan, run: PlannedRun) -> ModelCheck:
    """The check that precedes a run."""
    settings = RunSettings.model_validate(run.settings.model_dump(include=CHECKED))
    return _check(plan, settings.model, [settings], [])


def evaluation_check(plan: Plan, evaluation: PlannedEvaluation) -> ModelCheck:
    """The check that precedes an evaluation."""
    tasks = [task for task in plan.config.evaluation.tasks if task.dataset in evaluation.tasks]
    return _check(plan, evaluation.base.model, [], tasks)


def _check(plan: Plan, model: str, runs: list[RunSettings], tasks: list[TaskSettings]) -> ModelCheck:
    return ModelCheck(model, tuple(runs), plan.config.evaluation.model_copy(update={"tasks": tasks}))


def checks(plan: Plan) -> dict[str, ModelCheck]:
    """All checks by id. The miniature needs none, since this project trains it on these problems."""
    every = [
        *(run_check(plan, run) for run in plan.runs.values()),
        *(evaluation_check(plan, evaluation) for evaluation in plan.evaluations.values()),
    ]
    models = plan.config.models
    return {check.id: check for check in every if not isinstance(models[check.model], PretrainSettings)}


# Checks of a plan before any job starts.


def check_run(run: PlannedRun, config: Config) -> None:
    """Check a run's settings, as far as possible before any job starts."""
    settings = run.settings
    written = functools.partial(written_as, run.experiment, config.experiments[run.experiment], run.arm)
    require(settings.model, config.models, written("model"), "models")
    require(settings.dataset, config.datasets, written("dataset"), "datasets")
    base = settings.base
    if base.calibration and base.calibration.dataset:
        require(base.calibration.dataset, config.datasets, written("calibration.dataset"), "datasets")
    if base.rounded in FORMATS:
        group = FORMATS[base.rounded].group_size
        for key, width in _widths(config.models[settings.model]).items():
            if width % group:
                raise ConfigError(
                    f"{written('weights')}: {key}={width} is not a multiple of {group}, the group size of "
                    f"weights={base.rounded}"
                )


def check_drift(plan_: Plan) -> None:
    """Check that each run whose drift is reported has enough steps."""
    for run in plan_.runs.values() if plan_.config.drift else ():
        if run.settings.steps < DRIFT_BLOCKS:
            key = written_as(run.experiment, plan_.config.experiments[run.experiment], run.arm, "steps")
            raise ConfigError(
                f"{key}={run.settings.steps} is too short for `drift: true`, which needs {DRIFT_BLOCKS} steps; raise it"
            )


def _widths(model: Any) -> dict[str, int]:
    """Input widths of the linear layers, if they are known before a download."""
    if isinstance(model, PretrainSettings):
        return {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    if isinstance(model, LocalModel) and (model.path / "config.json").is_file():
        architecture = read_config(model.path)
        return {key: architecture[key] for key in ("hidden_size", "intermediate_size") if key in architecture}
    return {}


def check_inputs(plan_: Plan) -> None:
    """Check that local checkpoints, problem files and functions are complete and readable."""
    config = plan_.config
    origins = [dataset.origin for dataset in config.datasets.values()]
    rewards = [run.settings.reward.function for run in plan_.runs.values()]
    data = [origin.function for origin in origins if isinstance(origin, FunctionData)]
    for function in dict.fromkeys(rewards):
        if function is not None:
            check(function, "reward.function")
    for function in dict.fromkeys(data):
        check(function, "origin.function")
    for origin in origins:
        if isinstance(origin, HubData):
            check_folder(origin)
    for model in config.models.values():
        if isinstance(model, LocalModel):
            check_base(model.path)
    _check_lengths(plan_)
    _check_test_splits(plan_)
    local = [dataset for dataset in config.datasets.values() if isinstance(dataset.origin, LocalData)]
    if local:
        from qerl.data.sources import check_problem_file

        for dataset in local:
            check_problem_file(dataset.origin.path, dataset.format, dataset.columns, dataset.units)  # type: ignore[union-attr]


def _check_lengths(plan_: Plan) -> None:
    """Check that completions leave room for a prompt in the context of local checkpoints."""
    folders = {name: model.path for name, model in plan_.config.models.items() if isinstance(model, LocalModel)}
    for run in plan_.runs.values():
        if folder := folders.get(run.settings.model):
            rollout, where = run.settings.rollout, f"experiment {run.experiment}, arm {run.arm}"
            context = usable_length(read_config(folder), rollout)
            check_room(context, rollout.sampling.max_tokens, f"{where}: rollout.sampling.max_tokens")
    settings = plan_.config.evaluation
    for name in dict.fromkeys(evaluation.base.model for evaluation in plan_.evaluations.values()):
        for task in settings.tasks if name in folders else ():
            context = usable_length(read_config(folders[name]), settings)
            check_room(context, settings.sampling_of(task).max_tokens, f"evaluation on {task.label}: max_tokens")


def _check_test_splits(plan_: Plan) -> None:
    """Check that evaluated data sets have a test split, as far as the configuration states it."""
    evaluated = {task for evaluation in plan_.evaluations.values() for task in evaluation.tasks}
    for name in dict.fromkeys(task.dataset for task in plan_.config.evaluation.tasks if task.split == "test"):
        if name not in evaluated:
            continue
        origin = plan_.config.datasets[name].origin
        if isinstance(origin, HubData) and "test" not in origin.splits:
            raise ConfigError(
                f"evaluation.tasks: {name} has no test split; name one of the repository's in datasets.{name}.origin."
                "splits, such as {test: train} if the repository has only a split called train"
            )
        if isinstance(origin, LocalData) and origin.path.is_file() and origin.test_fraction == 0:
            raise ConfigError(
                f"evaluation.tasks: {name} has no test split, since its origin.test_fraction is 0; raise it"
            )


def check_local_models(plan_: Plan) -> None:
    """Check that the settings of runs fit the structure of local checkpoints, before jobs start on this machine."""
    folders = {name: model.path for name, model in plan_.config.models.items() if isinstance(model, LocalModel)}
    runs = [run for run in plan_.runs.values() if run.settings.model in folders]
    if not runs:
        return
    from qerl.workflow.preflight import check_settings  # imports torch, which takes seconds

    different = {(run.settings.model, run.settings.model_dump_json(include=FITTED)): run for run in reversed(runs)}
    for run in different.values():
        try:
            check_settings(folders[run.settings.model], run.settings)
        except UserError as error:
            raise ConfigError(f"experiment {run.experiment}, arm {run.arm}: {error}") from None


def check_jobs_here(plan_: Plan) -> None:
    """Raise ValueError for what jobs in this environment would fail with later, before any of them starts."""
    check_interpreter()
    check_engines(plan_)
    check_local_models(plan_)


def check_interpreter() -> None:
    """Raise ValueError if the `python` that rules run can't import this package and what it needs."""
    python = shutil.which("python")
    if python is not None:
        if Path(python).parent == Path(sys.executable).parent:
            return
        if not subprocess.run([python, "-P", "-c", "import qerl.cli.commands"], capture_output=True).returncode:
            return
    refused = "no python is on the PATH" if python is None else f"the PATH's first, {python}, can't import qerl"
    activate = Path(sys.executable).with_name("activate")
    how = f" (source {activate})" if activate.is_file() else ""
    raise ValueError(f"rules run `python`, and {refused}: activate the environment of Snakemake first{how}")


def check_engines(plan_: Plan) -> None:
    """Check that engines and trackers of runs, evaluations and benches are installed, before jobs start on this
    machine.
    """
    for run in plan_.runs.values():
        check_trackers(run.settings.track, f"experiment {run.experiment}, arm {run.arm}: track")
        check_engine(run.settings.rollout, f"experiment {run.experiment}, arm {run.arm}: rollout.engine")
    if plan_.evaluations:
        check_engine(plan_.config.evaluation, "evaluation.engine")
    for name, bench in plan_.config.benches.items():
        if isinstance(bench, RolloutBench):
            check_engine(bench, f"benches.{name}.engine")
