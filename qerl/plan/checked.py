"""The checks of models with their problems that precede any long job."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from qerl.jobs.prepare import RunLengths
from qerl.plan.sheets import Plan, PlannedEvaluation, PlannedRun
from qerl.settings.evaluation import EvaluationSettings, TaskSettings
from qerl.settings.models import PretrainSettings

#: The settings on which the check of a run's lengths depends; a change of others doesn't repeat it.
_LOOKED_AT: Any = {
    "max_prompt_tokens": True,
    "sampling": {"max_tokens"},
    "engine": True,
    "vllm": {"max_model_len", "url", "adapters"},
}


@dataclass(frozen=True)
class ModelCheck:
    """The check of a model that this project didn't train with the problems of a run or of an evaluation's tasks."""

    model: str
    runs: tuple[RunLengths, ...]
    evaluation: EvaluationSettings

    @property
    def datasets(self) -> list[str]:
        """The data sets that are checked."""
        return sorted({run.dataset for run in self.runs} | {task.dataset for task in self.evaluation.tasks})

    @property
    def id(self) -> str:
        """An id from the check's content, so that changed lengths are a new check and leave other runs' checks
        valid.
        """
        runs = [[run.dataset, run.rollout.model_dump(mode="json", include=_LOOKED_AT)] for run in self.runs]
        looked_at = {
            "model": self.model,
            "runs": json.dumps(runs),
            "evaluation": self.evaluation.model_dump_json(),
            "datasets": self.datasets,
        }
        return f"{self.model}-{hashlib.sha256(json.dumps(looked_at).encode()).hexdigest()[:8]}"


def run_check(plan: Plan, run: PlannedRun) -> ModelCheck:
    """The check that precedes a run."""
    values = run.settings.rollout.model_dump(include=_LOOKED_AT)
    lengths = RunLengths(dataset=run.settings.dataset, rollout=type(run.settings.rollout).model_validate(values))
    return _check(plan, run.settings.model, [lengths], [])


def evaluation_check(plan: Plan, evaluation: PlannedEvaluation) -> ModelCheck:
    """The check that precedes an evaluation."""
    asked = [task for task in plan.config.evaluation.tasks if task.dataset in evaluation.tasks]
    return _check(plan, evaluation.checkpoint.model, [], asked)


def _check(plan: Plan, model: str, runs: list[RunLengths], tasks: list[TaskSettings]) -> ModelCheck:
    return ModelCheck(model, tuple(runs), plan.config.evaluation.model_copy(update={"tasks": tasks}))


def checks(plan: Plan) -> dict[str, ModelCheck]:
    """All checks by id. The miniature needs none, since this project trains it on these problems."""
    every = [
        *(run_check(plan, run) for run in plan.runs.values()),
        *(evaluation_check(plan, evaluation) for evaluation in plan.evaluations.values()),
    ]
    models = plan.config.models
    return {check.id: check for check in every if not isinstance(models[check.model], PretrainSettings)}
