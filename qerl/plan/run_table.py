"""The run table: each run with its cost by measured speeds and its state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from qerl.host.imports import OPTIONAL, imports
from qerl.plan import Plan, PlannedEvaluation, PlannedRun
from qerl.plan.cost_model import MEMORY, SIZES, UNMEASURED, Costs, Hours, PlannedWork, problem_counts
from qerl.plan.files import Files
from qerl.results.files import read
from qerl.results.names import weights_name
from qerl.results.paths import RESULT, RUN
from qerl.results.schema.stored import OK
from qerl.results.schema.training import RunResult
from qerl.settings.data import HubData
from qerl.settings.evaluation import TaskSettings


def sheet(plan: Plan, machine: str) -> pd.DataFrame:
    """The run table, with one row per run. Measured hours are upper limits for one GPU (`qerl.plan.cost_model`).

    If no speed was measured for model, weights and training on `machine`, hours are "unmeasured", and a separate column
    has the estimate.
    """
    costs = Costs(machine)
    return pd.DataFrame([_row(plan, run, costs) for run in plan.runs.values()])


def run_work(run: PlannedRun) -> PlannedWork:
    """The most work of a run's training."""
    settings = run.settings
    rollout = settings.rollout
    completions = rollout.prompts * rollout.group_size
    tokens = settings.steps * completions * rollout.sampling.max_tokens
    return PlannedWork(
        model=settings.model,
        weights=settings.weights,
        method=settings.method,
        rank=settings.adapter.rank,
        sequences=max(1, completions // settings.processes),
        drawn=tokens,
        trained=tokens * settings.loss.updates_per_rollout,
        gradient_checkpointing=str(settings.gradient_checkpointing).lower(),  # type: ignore[arg-type]
        engine=rollout.engine,
    )


def evaluation_work(plan: Plan, evaluation: PlannedEvaluation) -> Iterator[PlannedWork]:
    """The most work that each task of an evaluation may need."""
    settings, run = plan.config.evaluation, evaluation.run
    for task in settings.tasks:
        if task.dataset in evaluation.tasks:
            drawn = _problems(plan, task) * settings.repeats_of(task) * settings.sampling_of(task).max_tokens
            yield PlannedWork(
                model=evaluation.checkpoint.model,
                weights=evaluation.checkpoint.weights,
                method=run.settings.method if run else "none",
                rank=run.settings.adapter.rank if run else 0,
                sequences=settings.vllm.max_sequences,
                drawn=drawn,
                engine=settings.engine,
            )


def _problems(plan: Plan, task: TaskSettings) -> float:
    """The number of test problems; NaN if only the prepared data states it."""
    origin = plan.config.datasets[task.dataset].origin
    return problem_counts().get(origin.repo, math.nan) if isinstance(origin, HubData) else math.nan


def _row(plan: Plan, run: PlannedRun, costs: Costs) -> dict[str, Any]:
    settings, work = run.settings, run_work(run)
    noise = "" if settings.noise.schedule == "off" else "+aqn"
    measured = costs.measured_rollout(work)
    return {
        "run": run.id,
        "model": settings.model,
        "weights": weights_name(settings.weights, settings.recipe, settings.pack_delta_nets),
        "training": settings.method + noise,
        "rank": settings.adapter.rank if settings.method == "lora" else 0,
        "dataset": settings.dataset,
        "steps": settings.steps,
        "completions": settings.rollout.prompts * settings.rollout.group_size,
        "gpus": settings.gpus,
        **_columns("rollout", costs.rollout(work)),
        **_columns("update", costs.update(work)),
        "speed_of": ""
        if measured is None
        else f"{measured.engine}, {measured.sequences} sequences, rank {measured.rank}",
        "done": _done(plan, run),
    }


def _columns(phase: str, hours: Hours) -> dict[str, Any]:
    return {
        f"{phase}_hours": hours.measured or UNMEASURED,
        f"{phase}_estimate": math.nan if hours.measured else hours.estimated,
    }


def _done(plan: Plan, run: PlannedRun) -> str:
    files = Files(plan)
    trained = files.run(run.id) / RUN
    if not trained.is_file():
        return ""
    status = read(RunResult, trained).status
    if status != OK:
        return status
    return "trained, evaluated" if (files.evaluation(run.id) / RESULT).is_file() else "trained"


def disk(plan: Plan) -> list[dict[str, Any]]:
    """Gigabytes of each checkpoint, and of the whole models that full fine-tuning writes."""
    sizes = pd.read_csv(SIZES).set_index(["model", "weights"]).gigabytes

    def size(model: str, weights: str) -> float | str:
        return float(sizes.get((model, weights), float("nan"))) if (model, weights) in sizes else UNMEASURED

    rows = [{"checkpoint": c.id, "gigabytes": size(c.model, c.weights)} for c in plan.checkpoints.values()]
    full = [run for run in plan.runs.values() if run.settings.method == "full"]
    return rows + [{"checkpoint": run.id, "gigabytes": size(run.settings.model, "bf16")} for run in full]


def totals(plan: Plan, runs: pd.DataFrame, machine: str) -> list[str]:
    """Lines with the totals of the table, and the arms that the configuration leaves out."""
    return [
        f"{len(runs)} runs, {sum('trained' in done for done in runs.done)} of them trained; "
        f"{len(plan.evaluations)} evaluations; {len(plan.config.benches)} measurements",
        f"rollouts: {_sum(runs, 'rollout')} on {machine}",
        f"updates: {_sum(runs, 'update')} on {machine}",
        disk_total(plan),
        *sharded(plan, machine),
        *omitted(plan),
    ]


def sharded(plan: Plan, machine: str) -> list[str]:
    """Lines with the arms of full fine-tuning on several GPUs, and the number of GPUs that they need by formula."""
    runs = [run for run in plan.runs.values() if run.settings.method == "full" and run.settings.processes > 1]
    lines = {(run.experiment, run.arm): _needed(plan, run, machine) for run in runs}
    return [f"{experiment}, {arm}: {line}" for (experiment, arm), line in lines.items()]


def _needed(plan: Plan, run: PlannedRun, machine: str) -> str:
    with imports(OPTIONAL):
        # It imports torch, for few configurations.
        from qerl.plan.sharded_memory import least_gpus, shape_of, sharded_memory
    shape, capacity = shape_of(plan.config.models[run.settings.model]), MEMORY.get(machine)
    gpus = run.settings.processes
    if shape is None or capacity is None:
        return f"{gpus} GPUs; their memory isn't estimated for this model and machine"
    verdict = sharded_memory(shape, run.settings, gpus, capacity).verdict(capacity)
    least = least_gpus(shape, run.settings, capacity)
    more = "" if verdict == "fits" else f"; it fits on {least}" if least else "; it fits on no number of GPUs"
    return f"a step {verdict.replace('tight', 'is tight')} by formula on {gpus} GPUs of {capacity / 1e9:.0f} GB{more}"


def disk_total(plan: Plan) -> str:
    """The total size of the checkpoints."""
    sizes = pd.to_numeric(pd.Series([row["gigabytes"] for row in disk(plan)]), errors="coerce")
    return f"checkpoints: {sizes.sum():.0f} GB, {sizes.isna().sum()} of {len(sizes)} {UNMEASURED}; adapters not counted"


def omitted(plan: Plan) -> list[str]:
    """Lines with the arms that the configuration leaves out, and why."""
    return [
        f"{name} leaves out {arm}: {reason}"
        for name, experiment in plan.config.experiments.items()
        for arm, reason in experiment.omitted.items()
    ]


def _sum(runs: pd.DataFrame, phase: str) -> str:
    known = pd.to_numeric(runs[f"{phase}_hours"], errors="coerce")
    hours = Hours(known.sum(), runs[f"{phase}_estimate"][known.isna()].sum(skipna=False))
    if known.isna().all():
        return UNMEASURED if math.isnan(hours.estimated) else f"{UNMEASURED}, by estimate at most {hours} GPU-hours"
    others = (
        f"{known.notna().sum()} of {len(known)} runs, the others by estimate (~)" if known.isna().any() else "all runs"
    )
    return f"at most {hours} GPU-hours (every completion at its longest) for {others}"
