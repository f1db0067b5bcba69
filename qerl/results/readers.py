"""Stored results as tidy data frames: one row a run, a step, an evaluation of a data set, a sample, a model, a point.

Every loader takes the paths of the result files; a file of another shape is a `ResultError` that names it.
`weights`, `training` (none, full, lora, lora+aqn), `arm` and `variant` (what the grid varies besides the seed, such as
"adapter.rank=16") identify a row; what doesn't apply is "".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd
from pydantic import ValidationError

from qerl.results.names import KEY, training_name, variant, weights_name
from qerl.results.schema.stored import (
    OK,
    Evaluation,
    Point,
    Quantization,
    RolloutBenchResult,
    Run,
    RunSummary,
    StepBenchResult,
    Stored,
    Task,
)
from qerl.settings.errors import sentence

_METRICS = ("step", "reward", "entropy", "completion_length", "truncated", "noise/sigma", "noise/norm")
_SAMPLE = ("dataset", "problem", "repeat", "correct", "tokens", "finished")
_FLEXIBLE = "flexible"


class ResultError(ValueError):
    """A result file that is missing or of another shape; the message is one sentence for the user."""


T = TypeVar("T", bound=Stored)


def load_runs(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a run of train/<run>/run.json, with its summary (seconds, bytes, tokens a second; empty if it failed)."""
    rows = [_run_row(read(Run, path)) for path in paths]
    return pd.DataFrame(rows, columns=None if rows else ["run", *KEY, "seed", "machine", "commit"])


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Each train/<run>/run.json as it is, with all settings, by the run's name."""
    return {run.run: run for run in (read(Run, path) for path in paths)}


def load_metrics(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a step of the metrics.jsonl beside each run.json, with the columns that identify the run.

    A run that failed has no rows.
    """
    frames = []
    for path in paths:
        run = _run_row(read(Run, path))
        if run["status"] != OK:
            continue
        rows = list(_lines(path.parent / "metrics.jsonl", _METRICS))
        frames.append(
            pd.DataFrame(rows).assign(**{key: run[key] for key in ("run", *KEY, "seed", "machine", "commit")})
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["run", *KEY, *_METRICS])


def load_evaluations(paths: Sequence[Path], runs: pd.DataFrame) -> pd.DataFrame:
    """One row an (evaluation, data set) of evaluate/<eval>/result.json; `runs` tells how each run was trained."""
    training = dict(zip(runs["run"], runs["training"], strict=True))
    rows: list[dict[str, Any]] = []
    for path in paths:
        result = read(Evaluation, path)
        if result.run is not None and result.run not in training:
            raise ResultError(f"{path} evaluates run {result.run!r}, whose run.json is not among the results given")
        identity = {
            "eval": result.eval,
            "run": result.run or "",
            "model": result.model,
            "experiment": result.experiment or "",
            "arm": result.arm or "",
            "variant": variant(result.varied),
            "weights": weights_name(result.weights, result.recipe),
            "training": training[result.run] if result.run else "none",
            "seed": result.varied.get("seed"),
            **result.provenance.columns,
        }
        rows += [identity | {"dataset": dataset, **task.model_dump()} for dataset, task in result.tasks.items()]
    return pd.DataFrame(rows)


def load_samples(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a sample (eval, dataset, problem, repeat, correct, flexible, tokens, finished) beside each result.json.

    `flexible` is NaN where the task has no such second match.
    The accuracy of the samples must be that of result.json, to less than one sample.
    """
    frames = []
    for path in paths:
        result = read(Evaluation, path)
        file = path.parent / "samples.jsonl"
        rows = [{key: row.get(key) for key in (*_SAMPLE, _FLEXIBLE)} for row in _lines(file, _SAMPLE)]
        frame = pd.DataFrame(rows, columns=[*_SAMPLE, _FLEXIBLE]).assign(eval=result.eval)
        frame = frame.astype({"problem": str, "correct": float, _FLEXIBLE: float})
        _agrees(file, frame, result.tasks)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def load_quantization(paths: Sequence[Path]) -> pd.DataFrame:
    """One row a quantized model of quantize/<checkpoint>/report.json; `<layer type>/relative_error` columns."""
    rows = []
    for path in paths:
        report = read(Quantization, path)
        errors = {f"{layer}/relative_error": value for layer, value in report.relative_error.items()}
        told = report.model_dump(exclude={"relative_error", "provenance"})
        told["weights"] = weights_name(report.weights, "awq" if report.method == "awq" else "rtn")
        rows.append(told | errors | report.provenance.columns)
    return pd.DataFrame(rows, columns=None if rows else ["model", "weights"])


def load_benches(paths: Sequence[Path], kind: Literal["rollout", "step"]) -> pd.DataFrame:
    """One row a point of profile/<bench>.json; `samples`: a list, in tokens a second (rollout) or seconds (step)."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        bench = read(RolloutBenchResult, path) if kind == "rollout" else read(StepBenchResult, path)
        identity = bench.model_dump(exclude={"kind", "points", "provenance"}) | bench.provenance.columns
        rows += [identity | _point_columns(point) for point in bench.points]
    return pd.DataFrame(rows)


def _point_columns(point: Point) -> dict[str, Any]:
    columns = point.model_dump(exclude={"recipe"})
    return columns | {"weights": weights_name(point.weights, point.recipe)}


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "model": run.settings.model,
        "experiment": run.experiment,
        "arm": run.arm,
        "variant": variant(run.varied),
        "weights": weights_name(run.settings.weights, run.settings.recipe),
        "training": training_name(run.settings.method, run.settings.noise.schedule),
        "seed": run.settings.seed,
        "status": run.status,
        **(_summary_columns(run.summary) if run.summary else {}),
        **run.provenance.columns,
    }


def _summary_columns(summary: RunSummary) -> dict[str, Any]:
    seconds = summary.step_seconds
    quartiles = {"step_seconds": seconds.median, "step_seconds_p25": seconds.p25, "step_seconds_p75": seconds.p75}
    return summary.model_dump(exclude={"step_seconds"}) | quartiles


def read(shape: type[T], path: Path) -> T:
    """A result file as its class; ResultError where it is missing or of another shape."""
    try:
        return shape.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{path} doesn't exist; let the workflow make it") from None
    except ValidationError as error:
        raise ResultError(f"{path} is not a {shape.__name__} result: {sentence(error, shape)}") from None


def _lines(path: Path, required: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows of a JSON lines file, each with the `required` keys."""
    if not path.exists():
        raise ResultError(f"{path} doesn't exist; let the workflow make it")
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ResultError(f"{path}, line {number} is not JSON: {error}") from None
            missing = [key for key in required if key not in row]
            if missing:
                raise ResultError(f"{path}, line {number} lacks the key `{missing[0]}`")
            yield row


def _agrees(path: Path, samples: pd.DataFrame, tasks: dict[str, Task]) -> None:
    for dataset, task in tasks.items():
        correct = samples.loc[samples["dataset"] == dataset, "correct"]
        if len(correct) != task.problems * task.repeats:
            raise ResultError(
                f"{path} holds {len(correct)} samples of {dataset}, but its result.json tells of "
                f"{task.problems} problems x {task.repeats} repeats"
            )
        if abs(correct.mean() - task.accuracy) * len(correct) > 0.5:
            raise ResultError(
                f"{path} gives {dataset} an accuracy of {correct.mean():.4f}, but its result.json {task.accuracy:.4f}"
            )
