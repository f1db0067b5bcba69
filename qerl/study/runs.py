"""A study's data: Parquet files of its runs, steps and outcomes, their making from stored results, and paired outcomes.

Each file states in its metadata the study, whether its numbers decide anything, and the stamp of the job that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from qerl.host.provenance import put
from qerl.report_jobs import GatherJob
from qerl.results import paths
from qerl.results.paths import STUDY_FILES
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import (
    OK,
    EvaluationResult,
    OutcomeRow,
    PretrainReport,
    Provenance,
    ResultError,
    Stored,
    read,
    read_rows,
    read_steps,
)
from qerl.results.statistics import Differences, pass_at_k

# Schemas of a study's Parquet files: one row per run, per step, and per problem of an evaluation.

#: The role of a run: trained, or an untrained base.
MAIN, BASE = "main", "base"

_TEXT = pa.string()
#: A stamp's columns: `host` is a hash, and `files` one of the package's files.
STAMP = ("commit", "files", "machine", "host", "driver", "cuda", "time")
#: A run with its stamp and its evaluation's. An untrained base has the stamp of its pretraining, and no arm, seed
#: and rate. A run that failed has its error as `status`. `settings` and `versions` are JSON.
RUNS = pa.schema(
    [
        *((name, _TEXT) for name in ("run", "role", "experiment", "size", "arm", "model", "weights")),
        ("seed", pa.int64()),
        ("rate", pa.float64()),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("seconds", pa.float64()),
        ("settings", _TEXT),
        ("versions", _TEXT),
        *((name, _TEXT) for name in STAMP),
        *((f"evaluated_{name}", _TEXT) for name in STAMP),
    ]
)
#: Metrics that hardly repeat; their bytes are stored plane by plane, which compresses better.
_SPLIT = ["entropy", "entropy/sampler", "temperature", "mismatch/kl", "ess/tokens", "ess/sequences", "noise/norm"]
_SPLIT += ["grad_norm"]
#: The metrics of a step that the study uses, under their names in metrics.jsonl.
METRICS = (
    *("reward", "reward/correct", "reward/equal_groups", "discovery", "entropy", "entropy/sampler", "temperature"),
    *("mismatch/kl", "ess/tokens", "ess/sequences", "clip_ratio/low", "clip_ratio/high", "noise/sigma", "noise/norm"),
    *("grad_norm", "completion_length", "truncated"),
)
STEPS = pa.schema([("run", _TEXT), ("step", pa.int32()), *((name, pa.float32()) for name in METRICS)])
#: A problem of an evaluation: `right` of `drawn` completions are right, in `distinct` ways (countdown only). A problem
#: that is asked at several temperatures has a row of each.
OUTCOMES = pa.schema(
    [
        *((name, _TEXT) for name in ("run", "task", "split")),
        ("temperature", pa.float32()),
        ("problem", _TEXT),
        *((name, pa.int16()) for name in ("right", "drawn", "distinct")),
    ]
)
_SCHEMAS: dict[str, pa.Schema] = dict(zip(STUDY_FILES, (RUNS, STEPS, OUTCOMES), strict=True))
_KEY = b"qerl"


class StudyHeader(Stored):
    """The metadata of each of a study's files. `decides` is false for a run of the pipeline alone.

    `protocol` is the SHA-256 of the file that says what is compared; the first study's data lack it.
    """

    study: str
    decides: bool
    protocol: str = ""
    provenance: Provenance


@dataclass(frozen=True)
class Study:
    """The frames of a study, with the columns of the schemas above."""

    header: StudyHeader
    runs: pd.DataFrame
    steps: pd.DataFrame
    outcomes: pd.DataFrame

    def frames(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Each file's name and frame."""
        yield from zip(STUDY_FILES, (self.runs, self.steps, self.outcomes), strict=True)


def write_study(folder: Path, study: Study) -> None:
    """Write the three files to `folder`, each completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {_KEY: study.header.model_dump_json(exclude_unset=True).encode()}
    for name, frame in study.frames():
        table = pa.Table.from_pandas(frame, _SCHEMAS[name], preserve_index=False).replace_schema_metadata(header)
        split = [column for column in table.column_names if column in _SPLIT]
        whole = [column for column in table.column_names if column not in split]
        partial = folder / f"{name}.partial"
        pq.write_table(
            table, partial, compression="zstd", compression_level=15, use_dictionary=whole, use_byte_stream_split=split
        )
        put(partial, folder / name)


def read_study(folder: Path) -> Study:
    """The study in a folder. Raises ResultError if a file is missing, or of another schema or study."""
    headers, frames = [], []
    for name, schema in _SCHEMAS.items():
        file = folder / name
        if not file.is_file():
            raise ResultError(f"{file} doesn't exist; the rule gather_study makes it")
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"{file} is no whole Parquet file ({error}); delete it and make it again") from None
        if not table.schema.equals(schema):
            raise ResultError(f"{file} has other columns than this version writes; make it again with gather_study")
        try:
            headers.append(StudyHeader.model_validate_json((table.schema.metadata or {}).get(_KEY, b"")))
        except ValidationError:
            raise ResultError(f"{file} doesn't state its study; make it again with gather_study") from None
        frames.append(table.to_pandas())
    if any(header != headers[0] for header in headers):
        raise ResultError(f"the files in {folder} are of several studies; write all of them with one job")
    study = Study(headers[0], *frames)
    if wrong := next(_inconsistent(study), ""):
        raise ResultError(f"the files in {folder} don't belong together: {wrong}; make them again with gather_study")
    return study


def _inconsistent(study: Study) -> Iterator[str]:
    """What files that are right by themselves contradict: rows that are twice, missing or of no run, and counts."""
    ended = study.runs.loc[(study.runs["role"] == MAIN) & (study.runs["status"] == OK), "run"]
    keys = (["run"], ["run", "step"], ["run", "task", "split", "temperature", "problem"])
    for (name, frame), key in zip(study.frames(), keys, strict=True):
        runs = frame["run"]
        for said, wrong in (
            ("a row twice", runs[frame.duplicated(key)]),
            (f"rows that {paths.STUDY_RUNS} lacks", runs[~runs.isin(study.runs["run"])]),
            ("no row", ended[~ended.isin(runs)]),
        ):
            if len(wrong):
                yield f"{name} has {said} of {wrong.iloc[0]}"
    counts = study.outcomes
    impossible = counts[(counts["drawn"] < 1) | (counts["right"] < 0) | (counts["right"] > counts["drawn"])]
    for row in impossible.to_dict("records"):
        yield f"{paths.STUDY_OUTCOMES} has {row['right']} right of {row['drawn']} completions of {row['run']}"


def read_studies(folders: Sequence[Path]) -> Study:
    """The study whose runs lie in some folders, with the stamp of the data that was gathered last.

    `runs` also has the columns `part`, the name of a run's folder, and `protocol`, the hash of the version of the
    protocol by which it was run. Raises ResultError if the folders are of several studies, or if two of them have the
    same run.
    """
    parts, named = [read_study(folder) for folder in folders], " and ".join(map(str, folders))
    if len({(part.header.study, part.header.decides) for part in parts}) > 1:
        raise ResultError(f"{named} are of several studies; keep each study's data in a folder of its own")
    for folder, part in zip(folders, parts, strict=True):
        part.runs["part"], part.runs["protocol"] = folder.name, part.header.protocol
    frames = [[frame for _, frame in part.frames()] for part in parts]
    runs, steps, outcomes = (pd.concat(same, ignore_index=True) for same in zip(*frames, strict=True))
    for run in runs.loc[runs["run"].duplicated(), "run"]:
        holders = [str(folder) for folder, part in zip(folders, parts, strict=True) if run in {*part.runs["run"]}]
        raise ResultError(f"run {run} is in {' and '.join(holders)}; keep it in one of them, or each counts anew")
    newest = max((part.header for part in parts), key=lambda header: header.provenance.time)
    return Study(newest, runs, steps, outcomes)


# A study's data from the stored results of its runs.

Row = dict[str, Any]


def gather_study(job: GatherJob) -> None:
    """Write the study's runs, steps and outcomes to `job.out`."""
    write_study(job.out, gathered(job))


def gathered(job: GatherJob) -> Study:
    """The data of a study's runs and of their untrained bases.

    A run without an evaluation isn't finished. Raises ResultError for it, unless `job.only_finished` leaves it out.
    """
    stored = StoredResults([path for path in listed(job.results) if not job.only_finished or path.is_file()])
    evaluations = {result.run or result.eval: (path, result) for path, result in stored.evaluation_results}
    runs: list[Row] = []
    steps: list[Row] = []
    outcomes: list[Row] = []
    for file, run in stored.run_results:
        scored = evaluations.get(run.run)
        if run.experiment not in job.experiments or (scored is None and job.only_finished):
            continue
        if scored is None:
            raise ResultError(f"{file} has no evaluation among the results; give its experiment a task")
        settings = run.settings
        runs.append(
            {
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
                **_stamps(run.provenance, scored[1].provenance),
            }
        )
        for row in read_steps(file, run):  # a failed run's end where it failed
            metrics = row.content()
            steps.append({"run": run.run, "step": row.step, **{name: metrics.get(name) for name in METRICS}})
        outcomes += _outcomes(job, run.run, *scored)
    for name, (file, base) in evaluations.items():
        if base.run is None and base.model in job.sizes:
            pretrained = job.pretrained.get(base.model)
            trained = read(PretrainReport, pretrained).provenance if pretrained else None
            identity = {"run": base.eval, "role": BASE, "experiment": "", "size": job.sizes[base.model], "arm": ""}
            policy = {"model": base.model, "weights": base.base.weights_name, "status": base.status}
            runs.append({**identity, **policy, **_stamps(trained, base.provenance)})
            outcomes += _outcomes(job, name, file, base)
    protocol = hashlib.sha256(job.protocol.read_bytes()).hexdigest()
    header = StudyHeader(study=job.study, decides=job.decides, protocol=protocol, provenance=Provenance.of_now())
    frames = ((runs, RUNS), (steps, STEPS), (outcomes, OUTCOMES))
    return Study(header, *(pd.DataFrame(rows, columns=schema.names) for rows, schema in frames))


def _stamps(trained: Provenance | None, evaluated: Provenance) -> Row:
    """The columns of the stamps of a policy's training, if it was trained here, and of its evaluation."""

    def columns(stamp: Provenance, prefix: str = "") -> Row:
        machine = stamp.machine
        about = {"files": stamp.files, "host": machine.host, "driver": machine.driver, "cuda": machine.cuda}
        return {f"{prefix}{key}": value for key, value in {**stamp.columns, **about, "time": stamp.time}.items()}

    versions = {"versions": json.dumps(trained.versions, sort_keys=True), **columns(trained)} if trained else {}
    return versions | columns(evaluated, "evaluated_")


def _outcomes(job: GatherJob, run: str, file: Path, scored: EvaluationResult) -> list[Row]:
    """The right completions of each problem of an evaluation; none for a failed run."""
    if scored.status != OK:
        return []
    rows = sorted(read_rows(OutcomeRow, file.parent / paths.OUTCOMES), key=lambda row: (row.dataset, row.problem))
    asked = {name: dict(zip(("task", "split", "temperature"), task, strict=True)) for name, task in job.tasks.items()}
    return [{"run": run, **asked[row.dataset], **row.model_dump(exclude={"dataset"})} for row in rows]


# Outcomes of a study's runs, paired by base, seed and problem.

#: What identifies a row of `outcomes` and `means` besides the problem.
RUN = ["run", "role", "experiment", "size", "arm", "model", "seed", "rate"]


def outcomes(runs: pd.DataFrame, counts: pd.DataFrame, k: int) -> pd.DataFrame:
    """The unbiased pass@k of each run on each problem, in the column `value`.

    `runs` and `counts` are a study's runs and outcomes of one task and split. Runs without an outcome, such as failed
    ones, have no row.
    """
    pairs = counts[["right", "drawn"]].drop_duplicates().itertuples(index=False, name=None)
    at_k = {pair: float(pass_at_k(pair[0], pair[1], k)) for pair in pairs}
    values = [at_k[pair] for pair in zip(counts["right"], counts["drawn"], strict=True)]
    scored = counts[["run", "problem"]].assign(value=pd.Series(values, counts.index, dtype=float))
    return runs[RUN].merge(scored, on="run", validate="one_to_many")


def means(runs: pd.DataFrame, steps: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The mean of a metric over all steps of each run that ended well, in the column `value`."""
    of_run = steps.groupby("run")[metric].mean().rename("value").reset_index()
    ended = runs[runs["status"] == OK]
    return ended[RUN].merge(of_run, on="run", validate="one_to_one").assign(problem="")


def differences(frame: pd.DataFrame, arm: str, other: str) -> Differences:
    """The outcome of `arm` less the outcome of `other` on each problem, by base and seed, of one experiment.

    A pair with a failed run is left out. Runs that saw different problems are a `ResultError`.
    """

    def by_run(name: str) -> dict[tuple[str, int], pd.Series]:
        runs = frame[frame["arm"] == name].astype({"seed": int}).groupby(["model", "seed"])
        return {key: run.set_index("problem")["value"].sort_index() for key, run in runs}  # type: ignore[misc]

    one, two = by_run(arm), by_run(other)
    pairs: dict[str, dict[int, Any]] = {}
    for model, seed in sorted(one.keys() & two.keys()):
        first, second = one[model, seed], two[model, seed]
        if not (first.index.is_unique and first.index.equals(second.index)):
            raise ResultError(f"{arm} and {other} saw different problems from {model} with seed {seed}")
        of_pair = first.to_numpy(float) - second.to_numpy(float)
        if np.isnan(of_pair).any():
            raise ResultError(f"{arm} or {other} lacks the measure on some problem from {model} with seed {seed}")
        pairs.setdefault(model, {})[seed] = of_pair
    return pairs
