"""The jobs of a study."""

from __future__ import annotations

from collections.abc import Iterable

from qerl.jobs import DosedArm, DoseJob, GatherJob
from qerl.results.paths import PRETRAIN
from qerl.settings.models import Base, PretrainSettings
from qerl.settings.workflow import StudySettings
from qerl.workflow.outputs import FINISHED, Files
from qerl.workflow.runs import Plan, PlannedRun


def gather_job(plan: Plan, files: Files, scope: str) -> GatherJob:
    """Gather the data of all planned runs, or of the finished ones."""
    study = _study(plan)
    experiments = {studied.experiment: studied.size for studied in study.experiments}
    return GatherJob(
        study=plan.config.name,
        decides=study.decides,
        experiments=experiments,
        sizes={r.settings.model: experiments[r.experiment] for r in _runs(plan, experiments)},
        protocol=study.protocol,
        pretrained={
            name: files.dense(name) / PRETRAIN
            for name in sorted({run.settings.model for run in _runs(plan, experiments)})
            if isinstance(plan.config.models[name], PretrainSettings)
        },
        tasks={
            task.label: (task.dataset, task.split, plan.config.evaluation.sampling_of(task).temperature)
            for task in plan.config.evaluation.tasks
        },
        results=files.listed,
        only_finished=scope == FINISHED,
        out=files.study_folder(scope),
    )


#: Problems and completions of each on which doses are measured.
DOSE_PROBLEMS, DOSE_COMPLETIONS = 128, 4


def dose_job(plan: Plan, files: Files, model: str) -> DoseJob:
    """Measure the dose of each arm that has another base than BF16, or noise, as its run of the least seed begins."""
    named = {studied.experiment for studied in _study(plan).experiments}
    exact = Base(model, "bf16")
    arms: dict[str, DosedArm] = {}
    for run in sorted(_runs(plan, named), key=lambda run: run.settings.seed):
        noise = run.settings.noise
        sigma = 0.0 if noise.schedule == "off" else noise.sigma_start
        if run.settings.model == model and (sigma or run.settings.base.name != exact.name):
            arms.setdefault(run.arm, DosedArm(checkpoint=files.checkpoint(run.settings.base), sigma=sigma))
    task = plan.config.evaluation.tasks[0]
    changes = {"tasks": [task], "repeats": DOSE_COMPLETIONS, "dtype": "float32"}
    return DoseJob(
        model=model,
        checkpoint=files.checkpoint(exact),
        arms=arms,
        data=files.data(task.dataset),
        settings=plan.config.evaluation.model_copy(update=changes),
        problems=DOSE_PROBLEMS,
        out=files.doses(model),
    )


def _runs(plan: Plan, experiments: Iterable[str]) -> list[PlannedRun]:
    named = set(experiments)
    return [run for run in plan.runs.values() if run.experiment in named]


def _study(plan: Plan) -> StudySettings:
    assert plan.config.study is not None
    return plan.config.study
