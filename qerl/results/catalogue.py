"""The schema of each result file, by its name, its folder, and the kind that it states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.results import paths
from qerl.results.files import ResultError, read, read_rows
from qerl.results.schema.evaluation import (
    EvaluationResult,
    MergedExport,
    OutcomeRow,
    OwnEvaluationResult,
    SampleRow,
    StoredPolicyResult,
)
from qerl.results.schema.gates import GateMeasurements, NumericsResult, SpeedResult, VerdictResult
from qerl.results.schema.preparation import PretrainReport, QuantizationReport
from qerl.results.schema.profile import RolloutBenchResult, StepBenchResult
from qerl.results.schema.speed import (
    DecodeResult,
    GrpoStepResult,
    ProductsResult,
    PromptsResult,
    RolloutMixResult,
    TraceRow,
)
from qerl.results.schema.stored import Stored
from qerl.results.schema.training import RolloutRow, RunResult, StepMetrics
from qerl.results.study import check_study_file

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
_BENCHES: dict[str, Schema] = {
    "decode": DecodeResult,
    "grpo_step": GrpoStepResult,
    "prompts": PromptsResult,
    "products": ProductsResult,
    "rollout_mix": RolloutMixResult,
}
_KINDS: dict[str, Schema] = {"rollout": RolloutBenchResult, "step": StepBenchResult}
#: Schemas of the other files, which their content identifies.
_BY_CONTENT: list[tuple[Schema, Callable[[Content], bool]]] = [
    (StoredPolicyResult, lambda content: "tasks" in content and "stored" in content),
    (OwnEvaluationResult, lambda content: "tasks" in content and "adapter" in content),
    (EvaluationResult, lambda content: "tasks" in content),
    (VerdictResult, lambda content: "gates" in content),
    *((schema, lambda content, kind=kind: content.get("kind") == kind) for kind, schema in _KINDS.items()),
    *((schema, lambda content, bench=bench: content.get("bench") == bench) for bench, schema in _BENCHES.items()),
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
