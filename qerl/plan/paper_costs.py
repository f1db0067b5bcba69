"""The runs, evaluations and benches for each table and figure of the paper, and their cost.

They are joined as in the tables (`qerl.report.paper`): the first arm whose result fits a printed number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import or_
from typing import Any

import pandas as pd

from qerl.plan import Plan, PlannedEvaluation, PlannedRun
from qerl.plan.cost_model import ASSUMED, SLOWER, Costs, PlannedWork, problem_counts, total
from qerl.plan.run_table import disk_total, omitted, run_work, sharded
from qerl.report.paper import fits, identity
from qerl.results.names import variant, weights_name
from qerl.results.printed import BARS, CURVE_FIGURES, FOLDER, NAMES, SCHEDULES, Asked, Cell, read_cells
from qerl.settings.benches import RolloutBench, StepBench
from qerl.settings.data import HubData
from qerl.settings.evaluation import TaskSettings


@dataclass
class Need:
    """Names of the experiments and benches that a table or figure needs."""

    runs: set[str] = field(default_factory=set)
    evaluations: set[str] = field(default_factory=set)
    benches: set[str] = field(default_factory=set)

    def __or__(self, other: Need) -> Need:
        return Need(self.runs | other.runs, self.evaluations | other.evaluations, self.benches | other.benches)

    def __sub__(self, other: Need) -> Need:
        return Need(self.runs - other.runs, self.evaluations - other.evaluations, self.benches - other.benches)


class Needs:
    """The needs of the tables and figures of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._arms: dict[tuple[str, str, str], list[PlannedRun]] = {}
        for run in plan.runs.values():
            self._arms.setdefault((run.experiment, run.arm, variant(run.varied)), []).append(run)
        self._evaluation_of = {
            evaluation.run.id: evaluation for evaluation in plan.evaluations.values() if evaluation.run
        }
        self._asked = {task.dataset for task in plan.config.evaluation.tasks}

    def of(self, name: str) -> Need:
        """The needs of one table or figure."""
        if name in CURVE_FIGURES:
            asked = [series.asked for panel in CURVE_FIGURES[name] for series in panel.series]
            return Need(runs={run.id for one in asked for run in self._first_arm(one)})
        if name == SCHEDULES:
            return Need()
        files = BARS.get(name, (name,))
        cells = [cell for file in files for cell in _cells(file)]
        models = {cell.model for cell in cells if cell.table == files[0]}
        need = Need()
        for cell in cells:
            if cell.model in models:
                need |= self._of_cell(cell)
        return need

    def _of_cell(self, cell: Cell) -> Need:
        if cell.kind in ("rollout", "step"):
            return Need(benches={name for name in self._plan.config.benches if self._measures(name, cell)})
        if cell.kind != "average" and cell.kind not in self._asked:
            return Need()  # a size or a setting, for which nothing is trained, scored or timed
        bases = {e.id for e in self._plan.evaluations.values() if e.run is None and fits(cell, _base(e))}
        runs = {run.id for run in self._first_arm(cell)}
        scored = {self._evaluation_of[run].id for run in runs if run in self._evaluation_of}
        return Need(runs, scored | bases)

    def _first_arm(self, asked: Asked) -> list[PlannedRun]:
        return next((runs for runs in self._arms.values() if fits(asked, identity(runs[0].settings))), [])

    def _measures(self, bench: str, cell: Cell) -> bool:
        settings = self._plan.config.benches[bench]
        if cell.kind != settings.kind:
            return False
        if isinstance(settings, RolloutBench):
            points = [
                {"weights": weights, "rank": rank, "model": settings.model, "setting": {"bs": str(settings.sequences)}}
                for weights in settings.weights
                for rank in settings.ranks
            ]
        else:
            points = [_step(run) for run in self._plan.step_bench_runs(bench)]
        return any(fits(cell, {"method": None, "noise": None, **point}) for point in points)


def _cells(file: str) -> list[Cell]:
    return read_cells(FOLDER / f"{file}.csv")


def _base(evaluation: PlannedEvaluation) -> dict[str, Any]:
    base = evaluation.checkpoint
    weights = weights_name(base.weights, base.recipe, base.pack_delta_nets)
    return {"model": base.model, "weights": weights, "method": "none", "noise": "off", "rank": None, "setting": {}}


def _step(run: PlannedRun) -> dict[str, Any]:
    rollout = run.settings.rollout
    checkpointing = "on" if run.settings.gradient_checkpointing else "off"
    setting = {"bs": str(rollout.prompts * rollout.group_size), "gc": checkpointing}
    return {**identity(run.settings), "setting": setting}


# --- costs -----------------------------------------------------------------------------------------------------------


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


def bench_work(plan: Plan, bench: str) -> Iterator[PlannedWork]:
    """The work of each point of a bench, including the warm-up."""
    settings = plan.config.benches[bench]
    if isinstance(settings, StepBench):
        yield from (run_work(run, settings.repeats + 1) for run in plan.step_bench_runs(bench))
        return
    for weights, rank in product(settings.weights, settings.ranks):
        yield PlannedWork(
            model=settings.model,
            weights=weights,
            method="lora" if rank else "none",
            rank=rank,
            sequences=settings.sequences,
            drawn=settings.sequences * settings.completion_tokens * (settings.repeats + 1),
            engine=settings.engine,
        )


def by_table(plan: Plan, machine: str) -> pd.DataFrame:
    """One row per table or figure of the paper, with its needs and the most GPU-hours. Shared needs are in each row.

    The last rows have the needs that no table has, and the whole plan with each need once.
    """
    needs = Needs(plan)
    rows = {name: needs.of(name) for name in [*plan.tables, *plan.figures] if name in NAMES}
    every = Need(set(plan.runs), set(plan.evaluations), set(plan.config.benches))
    taken = reduce(or_, rows.values(), Need())
    rows |= {"outside the paper": every - taken, "all, shared work once": every}
    costs, peers = Costs(machine), Costs(machine, "trl")
    return pd.DataFrame(
        [{"table, figure": _title(name), **_row(plan, need, costs, peers)} for name, need in rows.items()]
    )


def _title(name: str) -> str:
    return re.sub(r"^(table|figure)(?=\d)", lambda match: match[0].title() + " ", name)


def _row(plan: Plan, need: Need, costs: Costs, peers: Costs) -> dict[str, Any]:
    runs = [run_work(plan.runs[name]) for name in sorted(need.runs)]
    scored = [work for name in sorted(need.evaluations) for work in evaluation_work(plan, plan.evaluations[name])]
    timed = [work for name in sorted(need.benches) for work in bench_work(plan, name)]
    hours = {
        "rollouts, h": total(map(costs.rollout, runs)),
        "updates, h": total(map(costs.update, runs)),
        "evaluations, h": total(map(costs.rollout, scored)),
        "measurements, h": total(costs.rollout(work) + costs.update(work) for work in timed),
    }
    theirs = total([*map(peers.rollout, [*runs, *scored]), *map(peers.update, runs)])
    whole = {"all, h": total(hours.values()), "runs, evaluations by TRL + vLLM, h": theirs}
    return {
        "experiments, measurements": _names(plan, need),
        "runs": len(runs),
        **{k: str(h) for k, h in {**hours, **whole}.items()},
    }


def _names(plan: Plan, need: Need) -> str:
    """The names of experiments and benches, in the order of the configuration."""
    experiments = [name for name in plan.config.experiments if any(plan.runs[r].experiment == name for r in need.runs)]
    benches = [name for name in plan.config.benches if name in need.benches]
    if len(need.runs) == len(plan.runs) and len(benches) == len(plan.config.benches):
        return f"{len(plan.runs)} runs, {len(plan.evaluations)} evaluations, {len(benches)} measurements"
    return ", ".join(f"`{name}`" for name in [*experiments, *benches]) or "nothing to run"


def _of_slower(machine: str) -> str:
    slower = SLOWER.get(machine)
    return f". Some are of an {slower.upper()}, which is slower" if slower else ""


def page(plan: Plan, machine: str) -> str:
    """The costs by table as Markdown, with an explanation of the numbers."""
    lines = [
        f"# GPU-hours of {plan.config.name}, by table and figure",
        f"`qerl plan CONFIG --by table` prints this page. Hours are of one {machine.upper()}, and every "
        "completion counts at its longest. Numbers without a mark follow from measured "
        f"speeds (qerl/plan/measured/speeds.csv) and so are upper limits{_of_slower(machine)}. Rollouts with an "
        "adapter stand for those without one, which are faster. Numbers after ~ are "
        "estimates, where no speed was measured. Time to start, "
        "load, compile and quantize is not counted. Work that several tables share is counted in the row of each.",
        "The last column prices the same runs and evaluations with rollouts by vLLM and updates by TRL. TRL trains "
        "neither NVFP4 nor MXFP4, so these are priced by its NF4 updates.",
        by_table(plan, machine).to_markdown(index=False, disable_numparse=True),
        f"Estimates. {ASSUMED}",
        "\n".join(f"* {line}" for line in [disk_total(plan), *sharded(plan, machine), *omitted(plan)]),
    ]
    return "\n\n".join(lines) + "\n"
