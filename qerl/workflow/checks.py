"""Checks of a plan before any job starts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from qerl.checkpoints.files import CONFIG, check_base, read_config
from qerl.data.hub import check_folder
from qerl.host.imports import check_engine, check_functions, check_libraries, check_origin
from qerl.jobs import Plan, PlannedRun
from qerl.settings.base import ConfigError, UserError
from qerl.settings.data import HubData, LocalData
from qerl.settings.models import FORMATS, LocalModel
from qerl.settings.run import FITTED
from qerl.settings.workflow import DRIFT_BLOCKS, Config, Experiment, RolloutBench, require

# Checks of a plan before any job starts.


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


def check_run(run: PlannedRun, config: Config) -> None:
    """Check a run's settings, as far as possible before any job starts."""
    settings = run.settings
    written = functools.partial(written_as, run.experiment, config.experiments[run.experiment], run.arm)
    require(settings.model, config.models, written("model"), "models")
    require(settings.dataset, config.datasets, written("dataset"), "datasets")
    if config.drift and config.experiments[run.experiment].train and settings.steps < DRIFT_BLOCKS:
        raise ConfigError(
            f"{written('steps')}={settings.steps} is too short for `drift: true`, which needs {DRIFT_BLOCKS} steps; "
            "raise it"
        )
    base = settings.base
    if base.calibration and base.calibration.dataset:
        require(base.calibration.dataset, config.datasets, written("calibration.dataset"), "datasets")
    model = config.models[settings.model]
    # Other models' widths are multiples of any group, or aren't known before a download.
    if base.rounded in FORMATS and isinstance(model, LocalModel) and (model.path / CONFIG).is_file():
        group, architecture = FORMATS[base.rounded].group_size, read_config(model.path)
        for key in ("hidden_size", "intermediate_size"):
            if architecture.get(key, 0) % group:
                raise ConfigError(
                    f"{written('weights')}: {key}={architecture[key]} is not a multiple of {group}, the group size of "
                    f"weights={base.rounded}"
                )


def check_inputs(plan_: Plan) -> None:
    """Check that local checkpoints, problem files and functions are complete and readable."""
    config = plan_.config
    for run in plan_.runs.values():
        check_functions(run.settings)
    for name, dataset in config.datasets.items():
        check_origin(dataset, f"datasets.{name}.origin")
        if isinstance(dataset.origin, HubData):
            check_folder(dataset.origin)
    for model in config.models.values():
        if isinstance(model, LocalModel):
            check_base(model.path)
    _check_test_splits(plan_)
    local = [dataset for dataset in config.datasets.values() if isinstance(dataset.origin, LocalData)]
    if local:
        from qerl.data.sources import check_problem_file

        for dataset in local:
            check_problem_file(dataset.origin.path, dataset.format, dataset.columns, dataset.units)  # type: ignore[union-attr]


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


def check_engines(plan_: Plan) -> None:
    """Check that engines and trackers of runs, evaluations and benches are installed, before jobs start on this
    machine.
    """
    for run in plan_.runs.values():
        check_libraries(run.settings.track, f"experiment {run.experiment}, arm {run.arm}: track")
        check_engine(run.settings.rollout, f"experiment {run.experiment}, arm {run.arm}: rollout.engine")
    if plan_.evaluations:
        check_engine(plan_.config.evaluation, "evaluation.engine")
    for name, bench in plan_.config.benches.items():
        if isinstance(bench, RolloutBench):
            check_engine(bench, f"benches.{name}.engine")
