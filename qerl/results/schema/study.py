"""Schemas of a study's Parquet files: one row per run, per step, and per problem of an evaluation.

Each file states in its metadata the study, whether its numbers decide anything, and the stamp of the job that wrote it.
"""

from __future__ import annotations

import pyarrow as pa

from qerl.results.schema.stored import Provenance, Stored

#: The role of a run: its experiment's question, the pilot that chooses learning rates, or an untrained base.
MAIN, PILOT, BASE = "main", "pilot", "base"

_TEXT = pa.string()
#: A run with its stamp and that of its evaluation. An untrained base has no arm, seed and rate. A run that failed has
#: its error as `status`. `settings` and `versions` are JSON.
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
        ("commit", _TEXT),
        ("machine", _TEXT),
        ("time", _TEXT),
        ("versions", _TEXT),
        ("evaluated_commit", _TEXT),
        ("evaluated_machine", _TEXT),
        ("evaluated_time", _TEXT),
    ]
)
#: The metrics of a step that the study uses, under their names in metrics.jsonl.
METRICS = (
    "reward",
    "reward/correct",
    "reward/equal_groups",
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
#: A problem of an evaluation: `right` of `drawn` completions are right, in `distinct` ways (countdown only).
OUTCOMES = pa.schema(
    [
        ("run", _TEXT),
        ("task", _TEXT),
        ("split", _TEXT),
        ("problem", _TEXT),
        ("right", pa.int16()),
        ("drawn", pa.int16()),
        ("distinct", pa.int16()),
    ]
)


class StudyHeader(Stored):
    """The metadata of each of a study's files. `decides` is false for a run of the pipeline alone."""

    study: str
    decides: bool
    provenance: Provenance
