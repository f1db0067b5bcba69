"""GPU-hours of a plan: tokens over measured speeds, by run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.jobs import EvaluateJob, Plan, PlannedRun, TrainJob
from qerl.results.paths import RESULT, RUN
from qerl.results.schema import OK, RunResult, read
from qerl.settings.base import ConfigError
from qerl.workflow.rules import Jobs

# The measured speeds.
#
# Hours are upper limits, because every completion counts at its longest. Starting, loading, compiling and quantization,
# which take minutes per job, are not counted.

#: Within the package, so that a plan needs no clone.
MEASURED = Path(__file__).parent / "measured"
#: Measured tokens/s of one device, by machine, model (its name in the configuration), weights, engine and batch. A row
#: has one of the two rates; an update's rate applies to runs with the same `gradient_checkpointing`.
#: `python -m tests.speeds` writes the file from the committed measurements.
SPEEDS = MEASURED / "speeds.csv"
#: Gigabytes (1e9 bytes) of a checkpoint.
SIZES = MEASURED / "sizes.csv"
UNMEASURED = "unmeasured"
#: A device with the same processor and slower memory, by the one whose hours its speeds bound from above, too.
SLOWER = {"h200": "h100"}
#: The least share of a rollout's batch that the batch of a speed has by which it is priced.
SMALLEST_BATCH = 1 / 8
#: The part of the speed of one run's batch that a cohort's batch of as many sequences lacks, because its rows have the
#: adapters of several runs: the most that was measured with up to `STACKED_RANKS` ranks in all, and with more
#: (docs/cohorts.md).
COHORT_COST, COHORT_COST_BY_RUNS = 0.22, 0.40
STACKED_RANKS = 256


@dataclass(frozen=True)
class Work:
    """What tells the speeds of runs apart."""

    model: str
    weights: str
    method: str
    """`full` or `lora`."""
    rank: int
    sequences: int
    """Completions that are drawn together on one GPU."""
    gradient_checkpointing: str = "false"
    """`true`, `false` or `auto`."""
    engine: str = "native"
    """The engine of the rollouts, `native` or `vllm`."""


class Costs:
    """The speeds of one machine and of a slower one. The machine's own count where both are as near."""

    def __init__(self, machine: str) -> None:
        if not SPEEDS.is_file():
            raise ConfigError(f"{SPEEDS} doesn't exist: only the repository has measured speeds; run in a clone of it")
        speeds = pd.read_csv(SPEEDS, dtype={"gradient_checkpointing": str})
        if machine not in {*speeds.machine}:
            known = ", ".join(sorted({*speeds.machine}))
            raise ConfigError(f"there are no speeds of the machine {machine!r}; use one of {known}")
        speeds = pd.concat([speeds[speeds.machine == name] for name in (machine, SLOWER.get(machine))])
        self._rollouts, self._updates = (
            speeds.assign(rate=speeds[f"{phase}_tokens_per_second"]).dropna(subset="rate")
            for phase in ("rollout", "update")
        )
        self.rollout, self.update = cache(self._rollout), cache(self._update)  # runs of many seeds do equal work

    def _rollout(self, work: Work) -> Any:
        """The measured speed of the rollouts, or None.

        A much smaller batch would say nothing of the hours. An adapter slows rollouts, so that speeds with one bound
        the hours of work without, too.
        """
        speeds = self._rollouts[self._rollouts.sequences >= work.sequences * SMALLEST_BATCH]
        return _nearest(work, speeds[(speeds.method == "lora") | (work.method != "lora")])

    def _update(self, work: Work) -> Any:
        """The measured speed of the updates, or None; that with gradient checkpointing bounds that without it."""
        work = replace(work, engine="native")  # which trains, whoever draws the completions
        speeds = self._updates[self._updates.method == work.method]
        found = (
            _nearest(work, speeds[speeds.gradient_checkpointing == checkpointing])
            for checkpointing in (work.gradient_checkpointing, "true")
        )
        return next(filter(None, found), None)


def _nearest(work: Work, speeds: pd.DataFrame) -> Any:
    """The measured speed of this model, weights and engine with the largest fitting batch and nearest rank, or None.

    No batch larger than the job's is used: a larger batch has a higher rate, and hours must stay upper limits. The
    batch counts first, because rates differ by factors between batches, and by percents between ranks. Of speeds that
    differ in lengths alone, the speed of the longest counts, because long contexts are slow.
    """
    same = (speeds.model == work.model) & (speeds.weights == work.weights) & (speeds.engine == work.engine)
    fitting = speeds[same & (speeds.sequences <= work.sequences)]
    distance = (fitting["rank"] - work.rank).abs()
    order = fitting.assign(distance=distance).sort_values(
        ["sequences", "distance", "tokens"], ascending=[False, True, False], kind="stable"
    )
    return next(order.itertuples(), None)


# The run table: each run with its cost by measured speeds and its state.


def sheet(plan: Plan, machine: str) -> pd.DataFrame:
    """The run table, with one row per run. Hours are upper limits for one GPU.

    They are "unmeasured" if no speed was measured for model, weights and training on `machine`.
    """
    costs, cohorts = Costs(machine), Jobs(plan).plan.cohorts
    beside = {name: [plan.runs[run] for run in runs] for runs in cohorts.values() for name in runs}
    return pd.DataFrame([_row(plan, run, beside.get(name, [run]), costs) for name, run in plan.runs.items()])


def run_work(run: PlannedRun, cohort: Sequence[PlannedRun]) -> Work:
    """The work of a run's training, whose completions are drawn together with those of its cohort."""
    settings, rollout = run.settings, run.settings.rollout
    drawn = sum(one.settings.rollout.prompts * one.settings.rollout.group_size for one in cohort)
    sequences = max(1, drawn // settings.processes)
    checkpointing = str(settings.gradient_checkpointing).lower()
    rank = settings.adapter.rank
    return Work(settings.model, settings.weights, settings.method, rank, sequences, checkpointing, rollout.engine)


def _row(plan: Plan, run: PlannedRun, cohort: Sequence[PlannedRun], costs: Costs) -> dict[str, Any]:
    settings, work = run.settings, run_work(run, cohort)
    completions = settings.rollout.prompts * settings.rollout.group_size
    tokens = settings.steps * completions * settings.rollout.sampling.max_tokens
    noise = "" if settings.noise.schedule == "off" else "+aqn"
    rollout, update = costs.rollout(work), costs.update(work)
    return {
        "run": run.id,
        "model": settings.model,
        "weights": settings.base.weights_name,
        "training": settings.method + noise,
        "rank": settings.adapter.rank if settings.method == "lora" else 0,
        "dataset": settings.dataset,
        "steps": settings.steps,
        "completions": completions,
        "gpus": settings.gpus,
        "rollout_hours": _hours(tokens, rollout, _share_of_speed(cohort)),
        "update_hours": _hours(tokens * settings.loss.updates_per_rollout, update),
        "speed_of": f"{rollout.engine}, {rollout.sequences} sequences, rank {rollout.rank}" if rollout else "",
        "done": _done(plan, run),
    }


def _share_of_speed(cohort: Sequence[PlannedRun]) -> float:
    """The share that a cohort's rollouts keep of the speed of one run with as many sequences."""
    if len(cohort) == 1:
        return 1.0
    ranks = len(cohort) * max(run.settings.adapter.rank for run in cohort)
    return 1 - (COHORT_COST if ranks <= STACKED_RANKS else COHORT_COST_BY_RUNS)


def _hours(tokens: int, speed: Any, share: float = 1.0) -> float | str:
    return tokens / (share * speed.rate) / 3600 if speed else UNMEASURED


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
    """Lines with the totals of the table."""
    sizes = pd.to_numeric(pd.Series([row["gigabytes"] for row in disk(plan)]), errors="coerce")
    together = f"{sum(map(len, plan.cohorts.values()))} runs train side by side in {len(plan.cohorts)} jobs"
    return [
        f"{len(runs)} runs, {sum('trained' in done for done in runs.done)} of them trained; "
        f"{len(plan.evaluations)} evaluations; {len(plan.config.benches)} measurements",
        f"rollouts: {_sum(runs.rollout_hours)} on {machine}",
        f"updates: {_sum(runs.update_hours)} on {machine}",
        *([f"{together}; each has its part of the hours of their common rollouts"] if plan.cohorts else []),
        f"checkpoints: {sizes.sum():.0f} GB, {sizes.isna().sum()} of {len(sizes)} {UNMEASURED}; adapters not counted",
    ]


def _sum(hours: pd.Series) -> str:
    known = pd.to_numeric(hours, errors="coerce").dropna()
    of = "all runs" if len(known) == len(hours) else f"{len(known)} of {len(hours)} runs"
    return (
        f"at most {known.sum():.1f} GPU-hours (every completion at its longest) for {of}" if len(known) else UNMEASURED
    )
