"""Every file in results/reference matches its schema, or is of a kind without one."""

import json
from pathlib import Path

import pytest

from qerl.results import readers
from qerl.results.store import ResultError

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
STORED = [file for file in FILES if file.suffix in (".json", ".jsonl", ".parquet")]


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_stored_file_is_as_its_schema_says(file):
    readers.check(file)


def test_every_other_file_has_a_reason():
    for file in set(FILES) - set(STORED):
        is_table = file.suffix == ".csv" and (file.parent.name == "tables" or file.name in TABLES)
        assert file.suffix in SHOWN or is_table, file


def test_a_file_is_written_as_it_was_read():
    """Writing what was read gives the same JSON, numbers to the digit, for every file that a schema describes."""
    for file in STORED:
        schema = readers.schema_of(file)
        if schema and file.suffix == ".json" and schema.__name__ != "RunResult":
            written = schema.model_validate_json(file.read_bytes()).content()
            assert json.dumps(written, sort_keys=True) == json.dumps(json.loads(file.read_text()), sort_keys=True), file
    file = REFERENCE / "h200/walk/train/main-nf4-lora-seed0/metrics.jsonl"
    for line in file.read_text().splitlines():
        assert json.dumps(readers.schema_of(file).model_validate_json(line).content()) == line


def test_a_key_that_no_schema_has_is_refused(tmp_path):
    stored = json.loads((REFERENCE / "cpu/profile/rollout.json").read_text())
    file = tmp_path / "profile" / "rollout.json"
    file.parent.mkdir()
    for changed in (stored | {"seeds": 1}, stored | {"points": [stored["points"][0] | {"speed": 1.0}]}):
        file.write_text(json.dumps(changed))
        with pytest.raises(ResultError, match=r"is not a RolloutBenchResult: unknown key `(seeds|points\[0\]\.speed)`"):
            readers.check(file)
