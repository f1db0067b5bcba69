"""The sheet of runs for people: what each costs, by speeds that were measured, and what of it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from qerl.config import RunSettings
from qerl.plan import Plan, Run
from qerl.report.results import weights_name

REFERENCE = Path(__file__).parents[1] / "results" / "reference"
#: Measured tokens a second of one device, by machine, model (the name in the configuration), weights and batch.
SPEEDS = REFERENCE / "speeds.csv"
#: Gigabytes (1e9 bytes) of a checkpoint.
SIZES = REFERENCE / "sizes.csv"
UNMEASURED = "unmeasured"


def sheet(plan: Plan, machine: str) -> pd.DataFrame:
    """A row a run. Hours are of one GPU and upper limits: they take every completion for as long as is allowed.

    Where no speed was measured for model and weights on `machine`, hours are "unmeasured".
    """
    speeds = pd.read_csv(SPEEDS)
    speeds = speeds[speeds.machine == machine]
    return pd.DataFrame([_row(plan, run, speeds) for run in plan.runs.values()])


def _row(plan: Plan, run: Run, speeds: pd.DataFrame) -> dict[str, Any]:
    settings = run.settings
    noise = "" if settings.noise.schedule == "off" else "+aqn"
    return {
        "run": run.id,
        "model": settings.model,
        "weights": weights_name(settings.weights, settings.recipe),
        "training": settings.method + noise,
        "rank": settings.adapter.rank if settings.method == "lora" else 0,
        "dataset": settings.dataset,
        "steps": settings.steps,
        "completions": settings.rollout.prompts * settings.rollout.group_size,
        "gpus": settings.processes,
        **_hours(settings, speeds),
        "done": _done(plan, run),
    }


def _hours(settings: RunSettings, speeds: pd.DataFrame) -> dict[str, Any]:
    """Upper limits of the GPU-hours of a run's rollouts and updates, and which measurement they come from."""
    measured = _nearest(settings, speeds)
    if measured is None:
        return {"rollout_hours": UNMEASURED, "update_hours": UNMEASURED, "speed_of": ""}
    rollout = settings.rollout
    tokens = settings.steps * rollout.prompts * rollout.group_size * rollout.sampling.max_tokens
    read = tokens * settings.loss.updates_per_rollout
    return {
        "rollout_hours": _over(tokens, measured.rollout_tokens_per_second),
        "update_hours": _over(read, measured.update_tokens_per_second),
        "speed_of": f"{measured.engine}, {measured.sequences} sequences, rank {measured['rank']}",
    }


def _over(tokens: int, rate: float) -> float | str:
    return UNMEASURED if pd.isna(rate) else round(tokens / rate / 3600, 1)


def _nearest(settings: RunSettings, speeds: pd.DataFrame) -> pd.Series | None:
    """The measurement of this model and format whose rank is nearest, then whose batch is the largest within the
    run's: a larger batch has a higher rate, so the hours stay upper limits."""
    each = max(1, settings.rollout.prompts * settings.rollout.group_size // settings.processes)
    same = (speeds.model == settings.model) & (speeds.weights == settings.weights) & (speeds.method == settings.method)
    found = speeds[same & (speeds.sequences <= each)]
    if found.empty:
        return None
    distance = (found["rank"] - settings.adapter.rank).abs()
    return found[distance == distance.min()].sort_values("sequences").iloc[-1]


def _done(plan: Plan, run: Run) -> str:
    results = {"trained": f"train/{run.id}/run.json", "evaluated": f"evaluate/{run.id}/result.json"}
    return ", ".join(what for what, file in results.items() if (Path(plan.folder) / file).is_file())


def disk(plan: Plan) -> list[dict[str, Any]]:
    """Gigabytes of each checkpoint, and of the whole models that full fine-tuning leaves behind."""
    sizes = pd.read_csv(SIZES).set_index(["model", "weights"]).gigabytes

    def size(model: str, weights: str) -> float | str:
        return float(sizes.get((model, weights), float("nan"))) if (model, weights) in sizes else UNMEASURED

    rows = [{"checkpoint": c.id, "gigabytes": size(c.model, c.weights)} for c in plan.checkpoints.values()]
    full = [run for run in plan.runs.values() if run.settings.method == "full"]
    return rows + [{"checkpoint": run.id, "gigabytes": size(run.settings.model, "bf16")} for run in full]


def totals(plan: Plan, runs: pd.DataFrame, machine: str) -> list[str]:
    """What the sheet adds up to, and what the configuration leaves out, in sentences."""
    sizes = pd.to_numeric(pd.Series([row["gigabytes"] for row in disk(plan)]), errors="coerce")
    lines = [
        f"{len(runs)} runs, {sum('trained' in done for done in runs.done)} of them trained; "
        f"{len(plan.evaluations)} evaluations; {len(plan.config.benches)} measurements",
        f"rollouts: {_sum(runs.rollout_hours)} on {machine}",
        f"updates: {_sum(runs.update_hours)} on {machine}",
        f"checkpoints: {sizes.sum():.0f} GB, {sizes.isna().sum()} of {len(sizes)} {UNMEASURED}; adapters not counted",
    ]
    omitted = [
        f"left out of {name}: {arm}: {reason}"
        for name, experiment in plan.config.experiments.items()
        for arm, reason in experiment.omitted.items()
    ]
    return lines + omitted


def _sum(hours: pd.Series) -> str:
    known = pd.to_numeric(hours, errors="coerce")
    if known.isna().all():
        return UNMEASURED
    counted = (
        f"{known.notna().sum()} of {len(known)} runs, the others {UNMEASURED}" if known.isna().any() else "all runs"
    )
    return f"at most {known.sum():.0f} GPU-hours (every completion at its longest) for {counted}"
