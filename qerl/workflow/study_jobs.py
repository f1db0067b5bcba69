"""The jobs of a study, and the arms of real models that would decide its question, with their cost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qerl.jobs import DosedArm, DoseJob, DosePageJob, GatheredExperiment, GatherJob, PageJob, RealArm
from qerl.results.paths import PRETRAIN
from qerl.settings.base import read_yaml
from qerl.settings.models import Base, PretrainSettings
from qerl.settings.run import RunSettings
from qerl.settings.workflow import StudySettings
from qerl.study.outcomes import MISMATCH, NUMBERS, PRIMARY
from qerl.workflow.costs import Costs, evaluation_work, run_work, total
from qerl.workflow.outputs import FINISHED, Files
from qerl.workflow.plan import plan_from
from qerl.workflow.runs import Plan, PlannedRun

#: The machine for which hours are computed.
MACHINE = "h200"
#: Numbers of seeds for which the page has hours besides those of the configuration: the protocol's least and most.
SEEDS = (12, 21)


def gather_job(plan: Plan, files: Files, scope: str) -> GatherJob:
    """Gather the data of all planned runs, or of the finished ones."""
    study = _study(plan)
    experiments = {s.experiment: GatheredExperiment(role="main", size=s.size) for s in study.experiments}
    experiments |= {s.pilot: GatheredExperiment(role="pilot", size=s.size) for s in study.experiments if s.pilot}
    return GatherJob(
        study=plan.config.name,
        decides=study.decides,
        experiments=experiments,
        sizes={r.settings.model: experiments[r.experiment].size for r in _runs(plan, experiments)},
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


def page_job(plan: Plan, data: list[Path], doses: list[Path], out: Path) -> PageJob | DosePageJob:
    """Make the page of the data in some folders, and of the doses of bases."""
    if _study(plan).question == "dose":
        return DosePageJob(data=data, doses=doses, out=out)
    real = _study(plan).real
    arms = real_arms(plan, plan_from(read_yaml(real), real)) if real else []
    return PageJob(data=data, real=arms, real_file=real, machine=MACHINE.upper(), out=out)


def real_arms(plan: Plan, real: Plan) -> list[RealArm]:
    """The arms of a configuration of real models that have a counterpart among the compared arms of a study.

    Experiments without an arm of each of the numbers 1, 2 and 5 are left out, because they answer other questions.
    """
    compared = {arm for pair in (*PRIMARY.values(), *MISMATCH.values()) for arm in pair}
    main = {studied.experiment for studied in _study(plan).experiments}
    known = {_traits(run.settings): NUMBERS[run.arm] for run in _runs(plan, main) if run.arm in compared}
    by_experiment: dict[str, list[RealArm]] = {}
    arms: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in real.runs.values():
        arms.setdefault((run.experiment, run.arm), []).append(run)
    costs = Costs(MACHINE)
    for (experiment, arm), runs in arms.items():
        if number := known.get(_traits(runs[0].settings)):
            seeds = len({run.settings.seed for run in runs})
            hours = {count: _hours(real, runs[0], costs, count) for count in (1, seeds, *SEEDS)}
            of_arm = RealArm(
                experiment=experiment,
                model=runs[0].settings.model,
                arm=arm,
                number=number,
                seeds=seeds,
                hours=hours,
            )
            by_experiment.setdefault(experiment, []).append(of_arm)
    return [arm for of_one in by_experiment.values() if {"1", "2", "5"} <= {a.number for a in of_one} for arm in of_one]


def _hours(plan: Plan, run: PlannedRun, costs: Costs, seeds: int) -> str:
    """The GPU-hours of a number of runs and of their evaluations."""
    trained = run_work(run)
    scored = (work for e in plan.evaluations.values() if e.run is run for work in evaluation_work(plan, e))
    one = total([costs.rollout(trained), costs.update(trained), *map(costs.rollout, scored)])
    return str(total([one] * seeds))


def _traits(settings: RunSettings) -> tuple[object, ...]:
    """What makes an arm, whatever its model, rate and rank."""
    noise = settings.noise
    noisy = (noise.mode, noise.per, tuple(noise.norms), noise.placebo) if noise.schedule != "off" else None
    follows = settings.thermostat is not None
    weights = settings.base.weights_name
    return settings.method, weights, noisy, settings.loss.correction, follows


def _runs(plan: Plan, experiments: Iterable[str]) -> list[PlannedRun]:
    named = set(experiments)
    return [run for run in plan.runs.values() if run.experiment in named]


def _study(plan: Plan) -> StudySettings:
    assert plan.config.study is not None
    return plan.config.study
