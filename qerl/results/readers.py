"""Stored results as tidy data frames, and the schema of each result file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.results import paths
from qerl.results import paths as names
from qerl.results.paths import KEY, training_name, variant
from qerl.results.schema import (
    OK,
    DoseReport,
    EvaluationResult,
    GateMeasurements,
    MergedExport,
    NumericsResult,
    OutcomeRow,
    OwnEvaluationResult,
    PretrainReport,
    QuantizationReport,
    RolloutRow,
    RunResult,
    SampleRow,
    SpeedResult,
    StepMetrics,
    Stored,
    StoredPolicyResult,
    TaskScore,
    VerdictResult,
)
from qerl.results.speeds import SCHEMAS, Kind, TraceRow
from qerl.results.store import ResultError, read, read_rows
from qerl.results.study_data import check_study_file

# The schema of each result file, by its name, its folder, and the kind that it states.

Schema = type[Stored]
Content = dict[str, Any]

#: Schemas of files whose name identifies them.
_BY_NAME: dict[str, Schema] = {
    paths.RUN: RunResult,
    paths.REPORT: QuantizationReport,
    paths.PRETRAIN: PretrainReport,
    paths.MERGED: MergedExport,
    paths.MEASURED: GateMeasurements,
    paths.VERDICT: VerdictResult,
    paths.NUMERICS: NumericsResult,
    paths.SPEED: SpeedResult,
}
_ROWS: dict[str, Schema] = {paths.METRICS: StepMetrics, paths.SAMPLES: SampleRow, paths.OUTCOMES: OutcomeRow}
#: Schemas of the other files, which their content identifies.
_BY_CONTENT: list[tuple[Schema, Callable[[Content], bool]]] = [
    (StoredPolicyResult, lambda content: "tasks" in content and "stored" in content),
    (OwnEvaluationResult, lambda content: "tasks" in content and "adapter" in content),
    (EvaluationResult, lambda content: "tasks" in content),
    (VerdictResult, lambda content: "gates" in content),
    (DoseReport, lambda content: "arms" in content),
]


def schema_of(file: Path) -> Schema | None:
    """The schema of a file; None for files that aren't results, such as tables, figures and logs."""
    if file.suffix == ".gz" and file.parent.name == paths.ROLLOUTS:
        return RolloutRow
    if file.suffix == ".jsonl":
        return TraceRow if file.parent.name == paths.TRACES else _ROWS.get(file.name)
    if file.suffix != ".json":
        return None
    if file.name in _BY_NAME:
        return _BY_NAME[file.name]
    content = json.loads(file.read_text(encoding="utf-8"))
    if "bench" in content:
        return SCHEMAS.get(Kind.model_validate(content).of_bench)
    return next((schema for schema, is_it in _BY_CONTENT if is_it(content)), None)


def check(file: Path) -> None:
    """Read a result file by its schema. Raises ResultError if it has none or doesn't match it."""
    if file.suffix == ".parquet":
        return check_study_file(file)
    schema = schema_of(file)
    if schema is None:
        raise ResultError(f"{file} is not a result: no schema of qerl.results describes it")
    if file.suffix in (".jsonl", ".gz"):
        for _ in read_rows(schema, file):
            pass
    else:
        read(schema, file)


# Stored results as tidy data frames: one row per run, step, evaluation of a data set, sample, model or point.
#
# Every loader takes the paths of result files, and raises `ResultError` with the file's name if a file doesn't match
# its schema. `weights`, `training` (none, full, lora, lora+aqn), `arm` and `variant` (the grid's values besides the
# seed, such as "adapter.rank=16") identify a row. A column that doesn't apply is "".

#: The columns of metrics.jsonl that tables and figures use.
_METRICS = ("step", "reward", "entropy", "completion_length", "truncated", "noise/sigma", "noise/norm")
_SAMPLE = ("dataset", "problem", "repeat", "correct", "tokens", "finished", "flexible")
_TASK = {"harness", "task", "problems", "repeats", "accuracy"}
#: The recipe of a checkpoint by the method in its report; all other methods are rounding to nearest.
_REPORT = {"model", "weights", "method", "size_bytes", "bits_per_weight", "bits_per_weight_model"}


def load_runs(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per train/<run>/run.json, with its summary (seconds, bytes, tokens/s), which is empty if it failed."""
    rows = [_run_row(read(RunResult, path)) for path in paths]
    return pd.DataFrame(rows, columns=None if rows else ["run", *KEY, "seed", "machine", "commit"])


def read_runs(paths: Sequence[Path]) -> dict[str, RunResult]:
    """Each train/<run>/run.json with all settings, by the run's name."""
    return {run.run: run for run in (read(RunResult, path) for path in paths)}


def load_metrics(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per step in the metrics.jsonl beside each run.json, with the columns that identify the run.

    A failed run has no rows.
    """
    frames = []
    for path in paths:
        run = _run_row(read(RunResult, path))
        if run["status"] != OK:
            continue
        rows = [row.content() for row in read_rows(StepMetrics, path.parent / names.METRICS)]
        frames.append(
            pd.DataFrame(rows).assign(**{key: run[key] for key in ("run", *KEY, "seed", "machine", "commit")})
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["run", *KEY, *_METRICS])


def load_evaluations(paths: Sequence[Path], runs: pd.DataFrame) -> pd.DataFrame:
    """One row per (evaluation, data set) of evaluate/<eval>/result.json; `runs` describes each run's training."""
    training = dict(zip(runs["run"], runs["training"], strict=True))
    rows: list[dict[str, Any]] = []
    for path in paths:
        result = read(EvaluationResult, path)
        if result.run is not None and result.run not in training:
            raise ResultError(f"{path} evaluates run {result.run!r}, whose run.json is not among the results given")
        identity = {
            "eval": result.eval,
            "run": result.run or "",
            "model": result.model,
            "experiment": result.experiment or "",
            "arm": result.arm or "",
            "variant": variant(result.varied),
            "weights": result.base.weights_name,
            "training": training[result.run] if result.run else "none",
            "seed": result.varied.get("seed"),
            **result.provenance.columns,
        }
        rows += [
            identity | {"dataset": dataset, **task.model_dump(include=_TASK)} for dataset, task in result.tasks.items()
        ]
    return pd.DataFrame(rows)


def load_samples(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per sample (eval, dataset, problem, repeat, correct, flexible, tokens, finished) of each evaluation.

    `flexible` is NaN if the task has no second match.
    The accuracy of the samples must be that of result.json, to less than one sample.
    """
    frames = []
    for path in paths:
        result = read(EvaluationResult, path)
        file = path.parent / names.SAMPLES
        rows = [{key: getattr(row, key) for key in _SAMPLE} for row in read_rows(SampleRow, file)]
        frame = pd.DataFrame(rows, columns=_SAMPLE).assign(eval=result.eval)
        frame = frame.astype({"problem": str, "correct": float, "flexible": float})
        _agrees(file, frame, result.tasks)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def load_quantization(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per quantize/<checkpoint>/report.json, with columns `<layer type>/relative_error`."""
    rows = []
    for path in paths:
        report = read(QuantizationReport, path)
        errors = {f"{layer}/relative_error": value for layer, value in report.relative_error.items()}
        row = report.model_dump(include=_REPORT)
        row["weights"] = report.base.weights_name
        rows.append(row | errors | report.provenance.columns)
    return pd.DataFrame(rows, columns=None if rows else ["model", "weights"])


def _run_row(run: RunResult) -> dict[str, Any]:
    summary = run.summary.model_dump(exclude={"step_seconds", "sampler"}) if run.summary else {}
    if run.summary:
        seconds = run.summary.step_seconds
        ends = {"": seconds.median, "_p25": seconds.p25, "_p75": seconds.p75}
        summary |= {f"step_seconds{end}": value for end, value in ends.items()}
    return {
        "run": run.run,
        "model": run.settings.model,
        "experiment": run.experiment,
        "arm": run.arm,
        "variant": variant(run.varied),
        "weights": run.settings.base.weights_name,
        "training": training_name(run.settings.method, run.settings.noise.schedule),
        "seed": run.settings.seed,
        "status": run.status,
        **summary,
        **run.provenance.columns,
    }


def _agrees(path: Path, samples: pd.DataFrame, tasks: dict[str, TaskScore]) -> None:
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
