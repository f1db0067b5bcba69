"""A study's data from the stored results of its runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.jobs import GatherJob
from qerl.results.paths import METRICS as METRICS_FILE
from qerl.results.paths import OUTCOMES as OUTCOMES_FILE
from qerl.results.paths import RESULT, RUN
from qerl.results.schema import OK, EvaluationResult, OutcomeRow, PretrainReport, Provenance, RunResult, StepMetrics
from qerl.results.store import ResultError, read, read_rows
from qerl.results.study_data import BASE, MAIN, METRICS, OUTCOMES, RUNS, STEPS, Study, StudyHeader, write_study

Row = dict[str, Any]


def gather_study(job: GatherJob) -> None:
    """Write the study's runs, steps and outcomes to `job.out`."""
    write_study(job.out, gathered(job))


def gathered(job: GatherJob) -> Study:
    """The data of a study's runs and of their untrained bases.

    A run without an evaluation isn't finished. Raises ResultError for it, unless `job.only_finished` leaves it out.
    """
    paths = [Path(line) for line in job.results.read_text(encoding="utf-8").splitlines()]
    if job.only_finished:
        paths = [path for path in paths if path.is_file()]
    results = [(path, read(EvaluationResult, path)) for path in paths if path.name == RESULT]
    evaluations = {result.run or result.eval: (path, result) for path, result in results}
    runs: list[Row] = []
    steps: list[Row] = []
    outcomes: list[Row] = []
    for file in paths:
        if file.name != RUN or (run := read(RunResult, file)).experiment not in job.experiments:
            continue
        scored = evaluations.get(run.run)
        if scored is None and job.only_finished:
            continue
        if scored is None:
            raise ResultError(f"{file} has no evaluation among the results; give its experiment a task")
        runs.append(_run(job, run, scored[1]))
        steps += _steps(file, run)
        outcomes += _outcomes(job, run.run, *scored)
    for name, (file, base) in evaluations.items():
        if base.run is None and base.model in job.sizes:
            runs.append(_base(job, base))
            outcomes += _outcomes(job, name, file, base)
    protocol = hashlib.sha256(job.protocol.read_bytes()).hexdigest()
    header = StudyHeader(study=job.study, decides=job.decides, protocol=protocol, provenance=Provenance.of_now())
    frames = ((runs, RUNS), (steps, STEPS), (outcomes, OUTCOMES))
    return Study(header, *(pd.DataFrame(rows, columns=schema.names) for rows, schema in frames))


def _run(job: GatherJob, run: RunResult, scored: EvaluationResult) -> Row:
    settings = run.settings
    return {
        "run": run.run,
        "role": MAIN,
        "experiment": run.experiment,
        "size": job.experiments[run.experiment],
        "arm": run.arm,
        "model": settings.model,
        "weights": settings.base.weights_name,
        "seed": settings.seed,
        "rate": settings.optimizer.learning_rate,
        "status": run.status,
        "reason": run.reason,
        "seconds": float(run.summary.seconds) if run.summary else None,
        "settings": settings.model_dump_json(),
        **_stamps(run.provenance, scored.provenance),
    }


def _base(job: GatherJob, scored: EvaluationResult) -> Row:
    pretrained = job.pretrained.get(scored.model)
    return {
        "run": scored.eval,
        "role": BASE,
        "experiment": "",
        "size": job.sizes[scored.model],
        "arm": "",
        "model": scored.model,
        "weights": scored.base.weights_name,
        "status": scored.status,
        **_stamps(read(PretrainReport, pretrained).provenance if pretrained else None, scored.provenance),
    }


def _stamps(trained: Provenance | None, evaluated: Provenance) -> Row:
    """The columns of the stamps of a policy's training, if it was trained here, and of its evaluation."""

    def columns(stamp: Provenance, prefix: str = "") -> Row:
        machine = stamp.machine
        about = {"files": stamp.files, "host": machine.host, "driver": machine.driver, "cuda": machine.cuda}
        return {f"{prefix}{key}": value for key, value in {**stamp.columns, **about, "time": stamp.time}.items()}

    versions = {"versions": json.dumps(trained.versions, sort_keys=True), **columns(trained)} if trained else {}
    return versions | columns(evaluated, "evaluated_")


def _steps(file: Path, run: RunResult) -> list[Row]:
    """The metrics of a run's steps; a failed run's rows end where it failed."""
    rows = (row.content() for row in read_rows(StepMetrics, file.parent / METRICS_FILE))
    return [{"run": run.run, "step": row["step"], **{name: row.get(name) for name in METRICS}} for row in rows]


def _outcomes(job: GatherJob, run: str, file: Path, scored: EvaluationResult) -> list[Row]:
    """The right completions of each problem of an evaluation; none for a failed run."""
    if scored.status != OK:
        return []
    rows = sorted(read_rows(OutcomeRow, file.parent / OUTCOMES_FILE), key=lambda row: (row.dataset, row.problem))
    return [
        {
            "run": run,
            **dict(zip(("task", "split", "temperature"), job.tasks[row.dataset], strict=True)),
            **row.model_dump(exclude={"dataset"}),
        }
        for row in rows
    ]
