"""Every file in results/reference matches its schema, or is of a kind without one."""

import json
from pathlib import Path

import pytest

from qerl.gates import compare
from qerl.results import schema
from qerl.results.schema import ResultError, read, read_rows
from qerl.results.speeds import SCHEMAS, TraceRow
from qerl.study.runs import read_study
from tests.gpu.time_products import ProductsResult

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
#: Files for people, or made of results: nothing reads them back.
SHOWN = {
    ".md": "text",
    ".svg": "figure",
    ".txt": "log",
    ".tsv": "seconds of a job, by Snakemake",
    ".xml": "report of tests",
}
#: Tables are derived from results; three files of numbers have readers and schemas of their own.
TABLES = {"sizes.csv", "speeds.csv"}
FILES = sorted(file for file in REFERENCE.rglob("*") if file.is_file())
STORED = [file for file in FILES if file.suffix in (".json", ".jsonl")]
#: Schemas by the name of a file, or else by a key that only they have.
NAMED = {"run.json": schema.RunResult, "report.json": schema.QuantizationReport, "pretrain.json": schema.PretrainReport}
NAMED |= {"measured.json": compare.GateMeasurements}
NAMED |= {"numerics.json": compare.NumericsResult, "speed.json": compare.SpeedResult}
NAMED |= {"metrics.jsonl": schema.StepMetrics, "samples.jsonl": schema.SampleRow, "outcomes.jsonl": schema.OutcomeRow}
KEYS = {"stored": schema.StoredPolicyResult, "adapter": schema.OwnEvaluationResult, "tasks": schema.EvaluationResult}
KEYS |= {"gates": schema.VerdictResult, "arms": schema.DoseReport}


def schema_of(file: Path) -> type[schema.Stored]:
    if file.suffix == ".jsonl":
        return TraceRow if file.parent.name == "traces" else NAMED[file.name]
    content = json.loads(file.read_text())
    if file.parent.name == "kernels":
        return ProductsResult
    if "bench" in content:
        return SCHEMAS[content.get("kind") or content["bench"]]
    return NAMED.get(file.name) or next(KEYS[key] for key in KEYS if key in content)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_stored_file_is_as_its_schema_says_and_written_as_it_was_read(file):
    """Writing what was read gives the same JSON, numbers to the digit; a run states settings of newer versions."""
    if file.suffix == ".jsonl":
        rows = [json.dumps(row.content()) for row in read_rows(schema_of(file), file)]
        assert rows == file.read_text().splitlines() or "walk" not in file.parts
        return
    result = read(schema_of(file), file)
    if not isinstance(result, schema.RunResult):
        assert json.dumps(result.content(), sort_keys=True) == json.dumps(json.loads(file.read_text()), sort_keys=True)


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES if file.suffix == ".parquet"}), ids=str)
def test_a_study_is_as_its_schema_says(folder):
    assert len(read_study(folder).runs)


def test_every_other_file_has_a_reason():
    for file in set(FILES) - set(STORED):
        is_table = file.suffix == ".csv" and (file.parent.name == "tables" or file.name in TABLES)
        assert file.suffix in (*SHOWN, ".parquet") or is_table, file


def test_a_key_that_no_schema_has_is_refused(tmp_path):
    stored = json.loads((REFERENCE / "cpu/profile/rollout.json").read_text())
    file = tmp_path / "rollout.json"
    for changed in (stored | {"seeds": 1}, stored | {"points": [stored["points"][0] | {"speed": 1.0}]}):
        file.write_text(json.dumps(changed))
        with pytest.raises(ResultError, match=r"is not a RolloutBenchResult: unknown key `(seeds|points\[0\]\.speed)`"):
            read(SCHEMAS["rollout"], file)
