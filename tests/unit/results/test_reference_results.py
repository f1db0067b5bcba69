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


#: A stored file of a kind, the place of a number or list in it, and a value that nobody can have counted or measured.
IMPOSSIBLE = [
    ("cpu/profile/rollout.json", ("points", 0, "sequences"), 0),
    ("cpu/profile/rollout.json", ("points", 0, "completion_tokens"), -1),
    ("cpu/profile/rollout.json", ("points", 0, "samples", 0), 0.0),
    ("cpu/profile/rollout.json", ("points", 0, "samples", 0), float("nan")),
    ("h200/peers/prompts-7B-nvfp4-r16.json", ("points", 0, "samples"), []),
    ("h200/peers/prompts-7B-nvfp4-r16.json", ("work", "rank"), -1),
    ("dose/3m-first/dose-3m-0.json", ("arms", "nvfp4", "problems"), 0),
]


@pytest.mark.parametrize(("name", "place", "value"), IMPOSSIBLE)
def test_an_impossible_number_is_refused(tmp_path, name, place, value):
    content = json.loads((REFERENCE / name).read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    file = tmp_path / Path(name).name
    file.write_text(json.dumps(content))
    with pytest.raises(ResultError, match=rf"{file.name} is not a .*({place[-1] or place[-2]}|samples)"):
        read(schema_of(file), file)


@pytest.mark.parametrize("counts", [(5, 4, 1), (-1, 4, None), (0, 0, None), (1, 4, 2), (1, 4, -1)])
def test_impossible_counts_of_a_problem_are_refused(tmp_path, counts):
    row = dict(zip(("right", "drawn", "distinct"), counts, strict=True), dataset="d", problem="p")
    (tmp_path / "outcomes.jsonl").write_text(json.dumps(row))
    with pytest.raises(ResultError, match=r"outcomes\.jsonl, line 1: .*(right|drawn|distinct)"):
        list(read_rows(schema.OutcomeRow, tmp_path / "outcomes.jsonl"))
