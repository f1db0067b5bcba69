"""The plan as a file beside the results, from which `qerl watch` knows what is still to be done."""

from __future__ import annotations

from pathlib import Path

from qerl.plan.jobs import Jobs
from qerl.plan.sheets import Plan
from qerl.results.files import write
from qerl.results.paths import EVALUATE, PLAN, PROFILE, QUANTIZE, REPORT, RESULT, RUN, TRAIN
from qerl.results.schema.plan import ListedJob, StoredPlan


def store(plan: Plan) -> Path:
    """Write plan.json and return its path."""
    planned = Jobs(plan)
    file = planned.files.results / PLAN
    write(
        file, StoredPlan(name=plan.config.name, jobs=[*_bases(plan), *_runs(planned, plan), *_measured(planned, plan)])
    )
    return file


def _bases(plan: Plan) -> list[ListedJob]:
    return [
        ListedJob(rule=QUANTIZE, id=id, result=f"{QUANTIZE}/{id}/{REPORT}", gpus=1, group=[]) for id in plan.checkpoints
    ]


def _runs(planned: Jobs, plan: Plan) -> list[ListedJob]:
    return [
        ListedJob(
            rule=TRAIN,
            id=id,
            result=f"{TRAIN}/{id}/{RUN}",
            gpus=run.settings.gpus,
            group=[run.experiment, run.arm],
            steps=run.settings.steps,
            work=str((planned.files.work / id).resolve()),
        )
        for id, run in plan.runs.items()
    ]


def _measured(planned: Jobs, plan: Plan) -> list[ListedJob]:
    evaluations = [
        ListedJob(rule=EVALUATE, id=id, result=f"{EVALUATE}/{id}/{RESULT}", gpus=planned.evaluate(id).gpus, group=[])
        for id in plan.evaluations
    ]
    benches = [
        ListedJob(rule=PROFILE, id=id, result=f"{PROFILE}/{id}.json", gpus=planned.profile(id).gpus, group=[])
        for id in plan.config.benches
    ]
    return evaluations + benches
