"""Stored results as tidy data frames: a row per run, step, evaluation of a data set, sample, checkpoint or point.

`weights`, `training` (none, full, lora, lora+aqn), `arm` and `variant` (the grid's values besides the seed, such as
"adapter.rank=16") identify a row. A column that doesn't apply is "".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.results.paths import KEY, PROFILE, REPORT, RESULT, RUN, SAMPLES, training_name, variant
from qerl.results.schema import (
    OK,
    EvaluationResult,
    Head,
    QuantizationReport,
    ResultError,
    RunResult,
    SampleRow,
    read,
    read_rows,
    read_steps,
)
from qerl.results.speeds import load
from qerl.results.statistics import Scores

_SAMPLE = ("dataset", "problem", "repeat", "correct", "tokens", "finished", "flexible")
_TASK = {"harness", "task", "problems", "repeats", "accuracy"}
_REPORT = {"model", "weights", "method", "size_bytes", "bits_per_weight", "bits_per_weight_model"}
#: The columns of a run that its steps have, too.
_RUN = ["run", *KEY, "seed", "machine", "commit"]


def listed(file: Path) -> list[Path]:
    """The paths that a file lists, one a line: of 1,000 runs they are longer than a command may be (128 KiB)."""
    return [Path(line) for line in file.read_text(encoding="utf-8").splitlines()]


class StoredResults:
    """The results among some files, which the names that the workflow gives them tell apart; each is read once.

    Every frame raises `ResultError` with the file's name if a file doesn't match its schema.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def named(self, name: str) -> list[Path]:
        """The files of one name."""
        return [path for path in self.paths if path.name == name]

    @cached_property
    def run_results(self) -> list[tuple[Path, RunResult]]:
        """Each run.json with all settings."""
        return [(path, read(RunResult, path)) for path in self.named(RUN)]

    @cached_property
    def evaluation_results(self) -> list[tuple[Path, EvaluationResult]]:
        """Each result.json of an evaluation."""
        return [(path, read(EvaluationResult, path)) for path in self.named(RESULT)]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run, with its summary (seconds, bytes, tokens/s), which is empty if it failed."""
        rows = []
        for _, run in self.run_results:
            row = {
                "run": run.run,
                "model": run.settings.model,
                "experiment": run.experiment,
                "arm": run.arm,
                "variant": variant(run.varied),
                "weights": run.settings.base.weights_name,
                "training": training_name(run.settings.method, run.settings.noise.schedule),
                "seed": run.settings.seed,
                "status": run.status,
            }
            if run.summary:
                seconds = run.summary.step_seconds
                row |= run.summary.model_dump(exclude={"step_seconds", "sampler"})
                row |= {
                    "step_seconds": seconds.median,
                    "step_seconds_p25": seconds.p25,
                    "step_seconds_p75": seconds.p75,
                }
            rows.append(row | run.provenance.columns)
        return pd.DataFrame(rows, columns=None if rows else [*_RUN, "status"])

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per step in the metrics.jsonl beside each run.json. A failed run has no rows."""
        frames = []
        for (path, result), run in zip(self.run_results, self.runs.to_dict("records"), strict=True):
            if result.status == OK:
                rows = [row.content() for row in read_steps(path, result)]
                frames.append(pd.DataFrame(rows).assign(**{key: run[key] for key in _RUN}))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["run", *KEY])

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation and data set."""
        training = dict(zip(self.runs["run"], self.runs["training"], strict=True))
        rows: list[dict[str, Any]] = []
        for path, result in self.evaluation_results:
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
            for dataset, task in result.tasks.items():
                rows.append({**identity, "dataset": dataset, **task.model_dump(include=_TASK)})
        return pd.DataFrame(rows)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per sample (eval, dataset, problem, repeat, correct, flexible, tokens, finished) of each evaluation.

        `flexible` is NaN if the task has no second match. Raises ResultError unless the accuracy of the samples is that
        of result.json, to less than one sample.
        """
        frames = []
        for path, result in self.evaluation_results:
            file = path.parent / SAMPLES
            rows = [{key: getattr(row, key) for key in _SAMPLE} for row in read_rows(SampleRow, file)]
            frame = pd.DataFrame(rows, columns=_SAMPLE).assign(eval=result.eval)
            frame = frame.astype({"problem": str, "correct": float, "flexible": float})
            for dataset, task in result.tasks.items():
                correct = frame.loc[frame["dataset"] == dataset, "correct"]
                if len(correct) != task.problems * task.repeats:
                    raise ResultError(
                        f"{file} holds {len(correct)} samples of {dataset}, but its result.json tells of "
                        f"{task.problems} problems x {task.repeats} repeats"
                    )
                if abs(correct.mean() - task.accuracy) * len(correct) > 0.5:
                    raise ResultError(
                        f"{file} gives {dataset} an accuracy of {correct.mean():.4f}, but its result.json "
                        f"{task.accuracy:.4f}"
                    )
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def scores(self, column: str = "correct") -> dict[tuple[str, ...], pd.DataFrame]:
        """The mean over repeats of a column of `samples`, [evaluations, problems], by (*KEY, dataset)."""
        if self.evaluations.empty:
            raise ResultError("none of the results given is an evaluation of a data set, so there are no scores")
        identities = self.evaluations[["eval", "dataset", "run", *KEY]]
        samples = self.samples.dropna(subset=column)
        merged = samples.merge(identities, on=["eval", "dataset"], how="inner", validate="many_to_one")
        scores = {}
        for key, group in merged.groupby([*KEY, "dataset"], sort=False):
            matrix = group.pivot_table(index="eval", columns="problem", values=column, aggfunc="mean")
            if matrix.isna().to_numpy().any():
                raise ResultError(f"the evaluations {', '.join(matrix.index)} saw different problems of {key[-1]}")
            runs = group.groupby("eval")["run"].first()
            if len(twice := runs[runs.ne("") & runs.duplicated()]):
                raise ResultError(f"run {twice.iloc[0]!r} is evaluated twice on {key[-1]}: {', '.join(runs.index)}")
            scores[tuple(map(str, key))] = matrix
        return scores

    @cached_property
    def quantization(self) -> pd.DataFrame:
        """One row per report.json of a checkpoint, with columns `<layer type>/relative_error`."""
        rows = []
        for report in (read(QuantizationReport, path) for path in self.named(REPORT)):
            errors = {f"{layer}/relative_error": value for layer, value in report.relative_error.items()}
            weights = {"weights": report.base.weights_name}
            rows.append(report.model_dump(include=_REPORT) | weights | errors | report.provenance.columns)
        return pd.DataFrame(rows, columns=None if rows else ["model", "weights"])

    def points(self, bench: str) -> pd.DataFrame:
        """The points of a configuration's benches of one kind; empty without any."""
        files = [path for path in self.paths if path.parent.name == PROFILE and read(Head, path).of_bench == bench]
        return load(files, bench) if files else pd.DataFrame()

    @cached_property
    def stamps(self) -> pd.DataFrame:
        """Machine and commit of every result."""
        frames = [self.runs, self.evaluations, self.points("rollout"), self.points("step"), self.quantization]
        return pd.concat([frame[["machine", "commit"]] for frame in frames if "machine" in frame])


def paired_base(arm: str, dataset: str, scores: pd.DataFrame, base: pd.Series) -> Scores:
    """The base's share of right answers per problem, in the order of an arm's `scores`."""
    if set(scores.columns) != set(base.index):
        raise ResultError(f"{arm} and its untrained base saw different problems of {dataset}")
    return base[scores.columns].to_numpy()
