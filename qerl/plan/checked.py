"""The checks of models with their problems that precede any long job."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from qerl.jobs.prepare import CHECKED
from qerl.plan.sheets import Plan, PlannedEvaluation, PlannedRun
from qerl.settings.evaluation import EvaluationSettings, TaskSettings
from qerl.settings.models import PretrainSettings
from qerl.settings.run import RunSettings


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
        looked_at = {
            "model": self.model,
            "runs": json.dumps(runs),
            "evaluation": self.evaluation.model_dump_json(),
            "datasets": self.datasets,
        }
        return f"{self.model}-{hashlib.sha256(json.dumps(looked_at).encode()).hexdigest()[:8]}"


def run_check(plan: Plan, run: PlannedRun) -> ModelCheck:
    """The check that precedes a run."""
    settings = RunSettings.model_validate(run.settings.model_dump(include=CHECKED))
    return _check(plan, settings.model, [settings], [])


def evaluation_check(plan: Plan, evaluation: PlannedEvaluation) -> ModelCheck:
    """The check that precedes an evaluation."""
    asked = [task for task in plan.config.evaluation.tasks if task.dataset in evaluation.tasks]
    return _check(plan, evaluation.checkpoint.model, [], asked)


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
