"""Which models are looked at together with their problems, before anything long."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from qerl.jobs.prepare import RunLengths
from qerl.plan.sheets import Plan, PlannedEvaluation, PlannedRun
from qerl.settings.evaluation import EvaluationSettings, TaskSettings
from qerl.settings.models import PretrainSettings

#: What a run's lengths are looked at by: other settings check nothing anew.
_LOOKED_AT: Any = {
    "max_prompt_tokens": True,
    "sampling": {"max_tokens"},
    "engine": True,
    "vllm": {"max_model_len", "url", "adapters"},
}


@dataclass(frozen=True)
class ModelCheck:
    """A model that wasn't made here with problems: those of a run, or of an evaluation's tasks."""

    model: str
    runs: tuple[RunLengths, ...]
    evaluation: EvaluationSettings

    @property
    def datasets(self) -> list[str]:
        """The data sets that are looked at."""
        return sorted({run.dataset for run in self.runs} | {task.dataset for task in self.evaluation.tasks})

    @property
    def id(self) -> str:
        """By its content, so that other lengths are another check, and runs that keep theirs aren't made anew."""
        runs = [[run.dataset, run.rollout.model_dump(mode="json", include=_LOOKED_AT)] for run in self.runs]
        looked_at = {
            "model": self.model,
            "runs": json.dumps(runs),
            "evaluation": self.evaluation.model_dump_json(),
            "datasets": self.datasets,
        }
        return f"{self.model}-{hashlib.sha256(json.dumps(looked_at).encode()).hexdigest()[:8]}"


def run_check(plan: Plan, run: PlannedRun) -> ModelCheck:
    """The check before a run."""
    values = run.settings.rollout.model_dump(include=_LOOKED_AT)
    lengths = RunLengths(dataset=run.settings.dataset, rollout=type(run.settings.rollout).model_validate(values))
    return _check(plan, run.settings.model, [lengths], [])


def evaluation_check(plan: Plan, evaluation: PlannedEvaluation) -> ModelCheck:
    """The check before an evaluation."""
    asked = [task for task in plan.config.evaluation.tasks if task.dataset in evaluation.tasks]
    return _check(plan, evaluation.checkpoint.model, [], asked)


def _check(plan: Plan, model: str, runs: list[RunLengths], tasks: list[TaskSettings]) -> ModelCheck:
    return ModelCheck(model, tuple(runs), plan.config.evaluation.model_copy(update={"tasks": tasks}))


def checks(plan: Plan) -> dict[str, ModelCheck]:
    """All checks by id; the miniature, trained on these problems by this project, needs none."""
    every = [
        *(run_check(plan, run) for run in plan.runs.values()),
        *(evaluation_check(plan, evaluation) for evaluation in plan.evaluations.values()),
    ]
    models = plan.config.models
    return {check.id: check for check in every if not isinstance(models[check.model], PretrainSettings)}
