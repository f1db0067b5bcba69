"""GPU-hours of a plan: tokens over measured speeds, or estimates if no speed was measured, by run and by job."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from qerl.jobs import EvaluateJob, Plan, PlannedRun, TrainJob
from qerl.results.paths import RESULT, RUN
from qerl.results.schema import OK, RunResult
from qerl.results.store import read
from qerl.settings.base import ConfigError

# GPU-hours of a plan: tokens over measured speeds, or estimates if no speed was measured.
#
# Hours from measured speeds are upper limits, because every completion counts at its longest. Starting, loading,
# compiling and quantization, which take minutes per job, are not counted. Estimates have no such bound:
#
# * Rollouts run at the engine's rate of the model of the nearest size, with the largest batch that isn't larger and the
#   nearest rank. Time per token grows with the parameters, but doesn't shrink for smaller models.
# * Updates take `FLOPS` operations per parameter and token, at the lowest share of the peak that updates of the nearest
#   size have.

#: Within the package, so that a plan needs no clone.
MEASURED = Path(__file__).parent / "measured"
#: Measured tokens/s of one device, by machine, model (its name in the configuration), weights, engine and batch. A row
#: has one of the two rates; an update's rate applies to runs with the same `gradient_checkpointing`.
#: `python -m tests.speeds` writes the file from the committed measurements.
SPEEDS = MEASURED / "speeds.csv"
#: Gigabytes (1e9 bytes) of a checkpoint.
SIZES = MEASURED / "sizes.csv"
UNMEASURED = "unmeasured"

#: Dense bf16 FLOP/s of one device, by its data sheet.
PEAK_FLOPS = {"h200": 989e12, "h100": 989e12}
#: A device with the same processor and slower memory, by the one whose hours its speeds bound from above, too.
SLOWER = {"h200": "h100"}
#: The share of this peak that estimates assume for an update, where none was measured.
UTILIZATION = 0.4
#: FLOPs per parameter and token of an update: forward and backward; gradient checkpointing adds one forward pass.
FLOPS, FLOPS_CHECKPOINTING = 6, 8
#: The least share of a rollout's batch that the batch of a speed has by which it is priced.
SMALLEST_BATCH = 1 / 8
#: Formats without measured rollouts, and the format whose rates replace them, because both use the same kernels.
STAND_IN = {"mxfp4": "nvfp4"}
Recompute = Literal["true", "false", "auto"]


@dataclass(frozen=True)
class Hours:
    """GPU-hours from measured speeds and from estimates; NaN if there is no basis for an estimate."""

    measured: float = 0.0
    estimated: float = 0.0

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.measured + other.measured, self.estimated + other.estimated)

    def __str__(self) -> str:
        """Text such as "9.8 + ~120", where ~ marks an estimate."""
        measured = [_rounded(self.measured)] if self.measured else []
        if math.isnan(self.estimated):
            return " + ".join([*measured, UNMEASURED])
        return " + ".join([*measured, *([f"~{_rounded(self.estimated)}"] if self.estimated else [])]) or "0"


def _rounded(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}"


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """The most work that a job may do."""

    model: str
    weights: str
    method: str
    """`full` or `lora`."""
    rank: int
    sequences: int
    """Completions that are drawn together on one GPU."""
    drawn: float
    """Tokens of all completions."""
    trained: float = 0
    """Tokens that updates read, each pass counted."""
    gradient_checkpointing: Recompute = "false"
    engine: str = "native"
    """The engine of the rollouts, `native` or `vllm`."""


class Costs:
    """The speeds of one machine, and those of a slower one. The machine's own count where both are as near."""

    def __init__(self, machine: str) -> None:
        if not SPEEDS.is_file():
            raise ConfigError(f"{SPEEDS} doesn't exist: only the repository has measured speeds; run in a clone of it")
        speeds = pd.read_csv(SPEEDS, dtype={"gradient_checkpointing": str})
        known = sorted({*speeds.machine, *PEAK_FLOPS})
        if machine not in known:
            raise ConfigError(f"there are no speeds of the machine {machine!r}; use one of {', '.join(known)}")
        speeds = pd.concat([speeds[speeds.machine == name] for name in (machine, SLOWER.get(machine))])
        self._rollouts, self._updates = (
            speeds.assign(rate=speeds[f"{phase}_tokens_per_second"]).dropna(subset="rate")
            for phase in ("rollout", "update")
        )
        self._peak = PEAK_FLOPS.get(machine, math.nan)
        sizes = pd.read_csv(SIZES)
        self._parameters = sizes[sizes.weights == "bf16"].set_index("model").gigabytes * 1e9 / 2
        # Runs of many seeds do equal work.
        self.rollout, self.update = cache(self._rollout), cache(self._update)
        self.measured_rollout = cache(self._measured_rollout)

    def _rollout(self, work: PlannedWork) -> Hours:
        """Hours of the completions."""
        speed = self.measured_rollout(work)
        if speed is not None:
            return Hours(measured=_hours(work.drawn, speed.rate))
        return Hours(estimated=_hours(work.drawn, self._rollout_rate(work)))

    def _update(self, work: PlannedWork) -> Hours:
        """Hours of the updates; gradient checkpointing's bound those without it, where the latter aren't measured."""
        work = replace(work, engine="native")  # which trains, whoever draws the completions
        speeds = self._updates[self._updates.method == work.method]
        for checkpointing in (work.gradient_checkpointing, "true"):
            speed = _nearest(work, speeds[speeds.gradient_checkpointing == checkpointing])
            if speed is not None:
                return Hours(measured=_hours(work.trained, speed.rate))
        return Hours(estimated=_hours(work.trained, self._update_rate(work)))

    def _measured_rollout(self, work: PlannedWork) -> Any:
        """The measured speed that gives the hours of rollouts, or None.

        An adapter slows rollouts, so that speeds with one bound the hours of work without, too.
        """
        speeds = self._like_batch(work)
        return _nearest(work, speeds[(speeds.method == "lora") | (work.method != "lora")])

    def _like_batch(self, work: PlannedWork) -> pd.DataFrame:
        """Rollouts whose batch isn't larger than the work's, and not so much smaller that hours would say nothing."""
        return self._rollouts[self._rollouts.sequences.between(work.sequences * SMALLEST_BATCH, work.sequences)]

    def _rollout_rate(self, work: PlannedWork) -> float:
        speeds = self._like_batch(work)
        speeds = speeds[speeds.engine == work.engine]
        weights = work.weights if work.weights in {*speeds.weights} else STAND_IN.get(work.weights)
        alike = self._of_nearest_size(work, speeds[speeds.weights == weights])
        if alike.empty:
            return math.nan
        chosen = _first(alike, lesser_rank=alike["rank"] < work.rank, distance=(alike["rank"] - work.rank).abs())
        return float(chosen.rate * min(1.0, self._parameters[chosen.model] / self._parameters[work.model]))

    def _update_rate(self, work: PlannedWork) -> float:
        """At the lowest share of the peak of updates like this one: of the nearest size, with their largest batch."""
        speeds = self._updates[(self._updates.method == work.method) & (self._updates.sequences <= work.sequences)]
        alike = self._of_nearest_size(work, speeds[speeds.gradient_checkpointing != "auto"])
        largest = alike.sort_values("sequences", kind="stable").groupby(["weights", "gradient_checkpointing"]).tail(1)
        shares = (
            row["rate"] * _operations(row["gradient_checkpointing"]) * self._parameters[row["model"]] / self._peak
            for row in largest.to_dict("records")
        )
        operations = _operations(work.gradient_checkpointing) * self._parameters.get(work.model, math.nan)
        return min(shares, default=UTILIZATION) * self._peak / operations

    def _of_nearest_size(self, work: PlannedWork, speeds: pd.DataFrame) -> pd.DataFrame:
        """Those speeds whose model has a size next to the work's; none if its size isn't known."""
        sizes = self._parameters.reindex(sorted({*speeds.model} & {*self._parameters.index}))
        if work.model not in self._parameters or sizes.empty:
            return speeds.iloc[:0]
        return speeds[speeds.model == np.log(sizes / self._parameters[work.model]).abs().idxmin()]


def _operations(gradient_checkpointing: str) -> int:
    return FLOPS if gradient_checkpointing == "false" else FLOPS_CHECKPOINTING


def _nearest(work: PlannedWork, speeds: pd.DataFrame) -> Any:
    """The measured speed of this model, weights and engine with the largest fitting batch and nearest rank, or None.

    No batch larger than the job's is used: a larger batch has a higher rate, and hours must stay upper limits. The
    batch counts first, because rates of batches differ by factors, and those of ranks by percents. Of speeds that
    differ in lengths alone, that of the longest counts, because long contexts are slow.
    """
    same = (speeds.model == work.model) & (speeds.weights == work.weights) & (speeds.engine == work.engine)
    fitting = speeds[same & (speeds.sequences <= work.sequences)]
    return None if fitting.empty else _first(fitting, distance=(fitting["rank"] - work.rank).abs())


def _first(speeds: pd.DataFrame, **least: pd.Series) -> Any:
    """The row of the largest batch, then of the least values, then of the longest sequences."""
    keys = ["sequences", *least, "tokens"]
    ascending = [False, *(True for _ in least), False]
    return next(speeds.assign(**least).sort_values(keys, ascending=ascending, kind="stable").itertuples())


def _hours(tokens: float, rate: float) -> float:
    return tokens / rate / 3600 if tokens else 0.0


# The run table: each run with its cost by measured speeds and its state.


def sheet(plan: Plan, machine: str) -> pd.DataFrame:
    """The run table, with one row per run. Measured hours are upper limits for one GPU.

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


def _row(plan: Plan, run: PlannedRun, costs: Costs) -> dict[str, Any]:
    settings, work = run.settings, run_work(run)
    noise = "" if settings.noise.schedule == "off" else "+aqn"
    measured = costs.measured_rollout(work)
    return {
        "run": run.id,
        "model": settings.model,
        "weights": settings.base.weights_name,
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
    trained = TrainJob.path(plan, run.id, RUN)
    if not trained.is_file():
        return ""
    status = read(RunResult, trained).status
    if status != OK:
        return status
    return "trained, evaluated" if EvaluateJob.path(plan, run.id, RESULT).is_file() else "trained"


def disk(plan: Plan) -> list[dict[str, Any]]:
    """Gigabytes of each checkpoint, and of the whole models that full fine-tuning writes."""
    sizes = pd.read_csv(SIZES).set_index(["model", "weights"]).gigabytes.to_dict()
    parts = [(name, (base.model, base.weights)) for name, base in plan.checkpoints.items()]
    parts += [(run.id, (run.settings.model, "bf16")) for run in plan.runs.values() if run.settings.method == "full"]
    return [{"checkpoint": name, "gigabytes": sizes.get(base, UNMEASURED)} for name, base in parts]


def totals(plan: Plan, runs: pd.DataFrame, machine: str) -> list[str]:
    """Lines with the totals of the table, and the arms that the configuration leaves out."""
    sizes = pd.to_numeric(pd.Series([row["gigabytes"] for row in disk(plan)]), errors="coerce")
    return [
        f"{len(runs)} runs, {sum('trained' in done for done in runs.done)} of them trained; "
        f"{len(plan.evaluations)} evaluations; {len(plan.config.benches)} measurements",
        f"rollouts: {_sum(runs, 'rollout')} on {machine}",
        f"updates: {_sum(runs, 'update')} on {machine}",
        f"checkpoints: {sizes.sum():.0f} GB, {sizes.isna().sum()} of {len(sizes)} {UNMEASURED}; adapters not counted",
        *(
            f"{name} leaves out {arm}: {reason}"
            for name, experiment in plan.config.experiments.items()
            for arm, reason in experiment.omitted.items()
        ),
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
