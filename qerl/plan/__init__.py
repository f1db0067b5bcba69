"""Plans: the checkpoints, runs, evaluations and benches of a configuration, with their cost."""

from __future__ import annotations

from qerl.plan.checks import check_engines, check_inputs, check_interpreter, check_jobs_here, check_local_models
from qerl.plan.make import fitting, plan, plan_from
from qerl.plan.sheets import Checkpoint, Plan, PlannedEvaluation, PlannedRun
from qerl.settings.config import nested

__all__ = [
    "Checkpoint",
    "Plan",
    "PlannedEvaluation",
    "PlannedRun",
    "check_engines",
    "check_inputs",
    "check_interpreter",
    "check_jobs_here",
    "check_local_models",
    "fitting",
    "nested",
    "plan",
    "plan_from",
]
