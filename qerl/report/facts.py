"""How results were made, as tables of text: settings, evaluation, runs and their cost, failures, machines, commits."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from qerl.report.drawing import smoothing_window
from qerl.report.formatting import MEASURES, three_digits
from qerl.results.catalogue import schema_of
from qerl.results.files import read
from qerl.results.names import variant
from qerl.results.schema.evaluation import EvaluationResult, TaskScore
from qerl.results.schema.gates import Verdict
from qerl.results.schema.stored import OK, Provenance
from qerl.results.schema.training import RunResult
from qerl.settings.rollout import SamplingSettings

#: The setting in which the runs of an arm differ.
_SEED = "seed"


def stamps(files: Sequence[Path]) -> pd.DataFrame:
    """The machines, commits and libraries with which result files were made, one row per combination."""
    rows = []
    for file in files:
        schema = schema_of(file)
        if schema is None or "provenance" not in schema.model_fields:
            continue
        provenance: Provenance = read(schema, file).provenance  # type: ignore[attr-defined]
        libraries = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
        rows.append({**provenance.columns, "libraries": libraries, "time": provenance.time})
    made = pd.DataFrame(rows, columns=["machine", "commit", "libraries", "time"])
    groups = made.groupby(["machine", "commit", "libraries"], sort=False)["time"]
    return pd.DataFrame(
        [
            {"machine": machine, "commit": commit, "results": str(len(times)), "made": _span(times), "libraries": names}
            for (machine, commit, names), times in groups
        ]
    )


def _span(times: pd.Series) -> str:
    first, last = times.min()[:16].replace("T", " "), times.max()[:16].replace("T", " ")
    return first if first == last else f"{first} to {last}"


def missing(
    runs: Mapping[str, RunResult], points: pd.DataFrame, gates: Sequence[Verdict], omitted: Mapping[str, str]
) -> pd.DataFrame:
    """What failed or was left out, with its reason; `points` are those of all benches."""
    failed = [("run", name, _joined(run.status, run.reason)) for name, run in runs.items() if run.status != OK]
    wrong = points[points["status"] != OK].to_dict("records") if len(points) else []
    named = [
        (f"bench {point['bench']}", f"{point['model']}, {point['weights']}, rank {point['rank']}", point["status"])
        for point in wrong
    ]
    unmet = [("gate", gate.gate, _joined(gate.outcome, gate.detail)) for gate in gates if gate.outcome != "pass"]
    rows = [*failed, *named, *unmet, *(("arm", name, reason) for name, reason in omitted.items())]
    return pd.DataFrame(rows, columns=["kind", "name", "reason"])


def _joined(status: str, reason: str) -> str:
    return f"{status}: {reason}" if reason else status


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(runs: Mapping[str, RunResult]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings apart from defaults that all runs share, and those in which arms differ, one row per arm.

    Both are empty without runs.
    """
    values = {name: dict(_flat(run.settings)) for name, run in runs.items()}
    given = dict.fromkeys(key for run in runs.values() for key in _given(run.settings) if key != _SEED)
    differing = [key for key in given if len({flat.get(key) for flat in values.values()}) > 1]
    first = next(iter(values.values()), {})
    shared = pd.DataFrame(
        [{"setting": key, "value": first[key]} for key in given if key not in differing], columns=["setting", "value"]
    )
    arms: dict[tuple[str, ...], dict[str, str]] = {}
    for name, run in runs.items():
        arm = {"experiment": run.experiment, "arm": run.arm, "grid": variant(run.varied)}
        arms.setdefault(tuple(arm.values()), arm | {key: values[name].get(key, "") for key in differing})
    return shared, pd.DataFrame(list(arms.values()))


def _flat(settings: BaseModel, before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _text(value)


def _given(settings: BaseModel, before: str = "") -> Iterator[str]:
    """The keys whose value isn't their default."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{before}{name}.")
        elif value != field.default:
            yield f"{before}{name}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return json.dumps(value) if isinstance(value, dict) else "none" if value is None else str(value)


# --- evaluation and runs ----------------------------------------------------------------------------------------------


def scoring(results: Sequence[EvaluationResult]) -> pd.DataFrame:
    """How each data set was scored, and what was seen of its completions; one row per data set."""
    tasks: dict[str, list[TaskScore]] = {}
    for result in results:
        for dataset, task in result.tasks.items():
            tasks.setdefault(dataset, []).append(task)
    return pd.DataFrame([_scored(dataset, scores) for dataset, scores in tasks.items()])


def _scored(dataset: str, scores: Sequence[TaskScore]) -> dict[str, str]:
    task = scores[0]
    return {
        "data set": dataset,
        "harness": f"{task.harness} {task.harness_version}".strip() + (f", task {task.task}" if task.task else ""),
        "problems": f"{task.problems:,}",
        "repeats": str(task.repeats),
        "sampling": _drawn(task.sampling) if task.sampling else "",
        "answer readable (%)": _mean(score.extracted for score in scores),
        "both graders agree (%)": _mean(score.agreement for score in scores),
        "cut at the limit (%)": _mean(score.truncated for score in scores),
    }


def _drawn(sampling: SamplingSettings) -> str:
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most {sampling.max_tokens} tokens"


def _mean(values: Iterator[int | float | None] | Collection[int | float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f}" if known else ""


def run_costs(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """One row per run: its state, the reward at its start and end, and its cost. `run` has the run's name."""
    width = smoothing_window(metrics) if len(metrics) else 1
    rewards = {name: group.sort_values("step")["reward"] for name, group in metrics.groupby("run")}
    return pd.DataFrame([_run_row(run, rewards.get(run["run"]), width) for run in runs.to_dict("records")])


def _run_row(run: Mapping[Any, Any], rewards: pd.Series | None, width: int) -> dict[str, str]:
    done = run["status"] == OK
    cost = {
        "minutes": run["seconds"] / 60,
        "rollout tokens/s": run["rollout_tokens_per_second"],
    }
    measures = {name: run[name] for name in ("step_seconds", "weight_bytes", "peak_memory_bytes")}
    return {
        "run": run["run"],
        "state": "finished" if done else run["status"],
        "reward at the start": "" if rewards is None else f"{rewards.head(width).mean():.2f}",
        "at the end": "" if rewards is None else f"{rewards.tail(width).mean():.2f}",
        **{name: three_digits(value) if done else "" for name, value in cost.items()},
        **{MEASURES[name][0]: MEASURES[name][1](value) if pd.notna(value) else "" for name, value in measures.items()},
    }
