"""A study's data: the Parquet files of its runs, steps and outcomes, with their schemas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from qerl.host.provenance import put
from qerl.results.paths import STUDY_FILES
from qerl.results.schema import Provenance, Stored
from qerl.results.store import ResultError

# Schemas of a study's Parquet files: one row per run, per step, and per problem of an evaluation.
#
# Each file states in its metadata the study, whether its numbers decide anything, and the stamp of the job that wrote
# it.

#: The role of a run: trained, or an untrained base.
MAIN, BASE = "main", "base"

_TEXT = pa.string()
#: A stamp's columns: `host` is a hash, and `files` one of the package's files.
STAMP = ("commit", "files", "machine", "host", "driver", "cuda", "time")
#: A run with its stamp and that of its evaluation. An untrained base has the stamp of its pretraining, and no arm, seed
#: and rate. A run that failed has its error as `status`. `settings` and `versions` are JSON.
RUNS = pa.schema(
    [
        ("run", _TEXT),
        ("role", _TEXT),
        ("experiment", _TEXT),
        ("size", _TEXT),
        ("arm", _TEXT),
        ("model", _TEXT),
        ("weights", _TEXT),
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
#: The metrics of a step that the study uses, under their names in metrics.jsonl.
METRICS = (
    "reward",
    "reward/correct",
    "reward/equal_groups",
    "discovery",
    "entropy",
    "entropy/sampler",
    "temperature",
    "mismatch/kl",
    "ess/tokens",
    "ess/sequences",
    "clip_ratio/low",
    "clip_ratio/high",
    "noise/sigma",
    "noise/norm",
    "grad_norm",
    "completion_length",
    "truncated",
)
STEPS = pa.schema([("run", _TEXT), ("step", pa.int32()), *((name, pa.float32()) for name in METRICS)])
#: A problem of an evaluation: `right` of `drawn` completions are right, in `distinct` ways (countdown only). A problem
#: that is asked at several temperatures has a row of each.
OUTCOMES = pa.schema(
    [
        ("run", _TEXT),
        ("task", _TEXT),
        ("split", _TEXT),
        ("temperature", pa.float32()),
        ("problem", _TEXT),
        ("right", pa.int16()),
        ("drawn", pa.int16()),
        ("distinct", pa.int16()),
    ]
)


class StudyHeader(Stored):
    """The metadata of each of a study's files. `decides` is false for a run of the pipeline alone.

    `protocol` is the SHA-256 of the file that says what is compared; the first study's data lack it.
    """

    study: str
    decides: bool
    protocol: str = ""
    provenance: Provenance


# A study's data: the Parquet files of its runs, steps and outcomes, from which its page is made.

_KEY = b"qerl"
_SCHEMAS: dict[str, pa.Schema] = dict(zip(STUDY_FILES, (RUNS, STEPS, OUTCOMES), strict=True))
#: Columns of numbers that hardly repeat; their bytes are stored plane by plane, which compresses better.
_SPLIT = ["entropy", "entropy/sampler", "temperature", "mismatch/kl", "ess/tokens", "ess/sequences", "noise/norm"]
_SPLIT += ["grad_norm"]


@dataclass(frozen=True)
class Study:
    """The frames of a study, with the columns of the schemas above."""

    header: StudyHeader
    runs: pd.DataFrame
    steps: pd.DataFrame
    outcomes: pd.DataFrame

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """The frames without their names."""
        return self.runs, self.steps, self.outcomes

    def frames(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Each file's name and frame."""
        yield from zip(STUDY_FILES, self.tables(), strict=True)


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
    tables = {name: _table(folder / name) for name in _SCHEMAS}
    headers = {_header(folder / name, table) for name, table in tables.items()}
    if len(headers) > 1:
        raise ResultError(f"the files in {folder} are of several studies; write all of them with one job")
    frames = [table.to_pandas() for table in tables.values()]
    return Study(StudyHeader.model_validate_json(headers.pop()), *frames)


def read_studies(folders: Sequence[Path]) -> Study:
    """The study whose runs lie in some folders, with the stamp of the data that was gathered last.

    `runs` also has the columns `part`, the name of a run's folder, and `protocol`, the hash of the version of the
    protocol by which it was run. Raises ResultError if the folders are of several studies, or if two of them have the
    same run.
    """
    parts = [read_study(folder) for folder in folders]
    if len({(part.header.study, part.header.decides) for part in parts}) > 1:
        raise ResultError(f"{_listed(folders)} are of several studies; keep each study's data in a folder of its own")
    for folder, part in zip(folders, parts, strict=True):
        part.runs["part"], part.runs["protocol"] = folder.name, part.header.protocol
    frames = [pd.concat(frames, ignore_index=True) for frames in zip(*(part.tables() for part in parts), strict=True)]
    runs = frames[0]["run"]
    if runs.duplicated().any():
        raise ResultError(f"{runs[runs.duplicated()].iloc[0]} is in several of {_listed(folders)}; delete one of them")
    return Study(max((part.header for part in parts), key=lambda header: header.provenance.time), *frames)


def _listed(folders: Sequence[Path]) -> str:
    return " and ".join(map(str, folders))


def check_study_file(file: Path) -> None:
    """Raise ResultError unless a file has the schema that its name promises, and a header."""
    _header(file, _table(file))


def _table(file: Path) -> pa.Table:
    if not file.is_file():
        raise ResultError(f"{file} doesn't exist; the rule gather_study makes it")
    try:
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise ResultError(f"{file} is no Parquet file ({error}); delete it and make it again") from None
    if not table.schema.equals(_SCHEMAS[file.name]):
        raise ResultError(f"{file} has other columns than this version writes; make it again with gather_study")
    return table


def _header(file: Path, table: pa.Table) -> str:
    """The header of a file as JSON."""
    text = (table.schema.metadata or {}).get(_KEY, b"").decode()
    try:
        StudyHeader.model_validate_json(text)
    except ValidationError:
        raise ResultError(f"{file} doesn't state its study; make it again with gather_study") from None
    return text
