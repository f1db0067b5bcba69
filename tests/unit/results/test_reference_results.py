"""Every file of results/reference is as its schema says, or has a reason for having none."""

import json
from pathlib import Path

import pytest

from qerl.results import catalogue
from qerl.results.files import ResultError

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
TABLES = {"problems.csv", "sizes.csv", "speeds.csv"}
#: JSON files of trials, or of before there was a schema; they stand behind lines of docs/lab.
EARLY = {
    "decode/attention-in-turn-1cb7b36.json": "two versions of a kernel in turn",
    "decode/native-7b-nvfp4-17e82a2.json": "decode points of several ranks in one file",
    "decode/native-7b-nvfp4-ba4a620.json": "decode points of several ranks in one file",
    "decode/native-7b-nvfp4-eaedd22.json": "decode points of several ranks in one file",
    "decode/native-7b-nvfp4-f703bd0.json": "decode points of several ranks in one file",
    "decode/native-7b-nvfp4.json": "decode points of several ranks in one file",
    "decode/vllm-7b-bf16.json": "decode points of several ranks in one file",
    "decode/vllm-7b-nvfp4.json": "decode points of several ranks in one file",
    "decode/update-7b.json": "an update by part, of before it was a part of a step's file",
    "kernels/division-and-pages-990cc87.json": "variants of a kernel in turn",
    "prompts/in-turn-7B-nvfp4.json": "variants of prompts and of attention in turn",
    "vllm-steps-7b-bf16.json": "steps with vLLM, of before there was a grid",
    "vllm-steps-7b-nvfp4.json": "steps with vLLM, of before there was a grid",
}
FILES = sorted(file for file in REFERENCE.rglob("*") if file.is_file())
STORED = [file for file in FILES if file.suffix in (".json", ".jsonl")]


def _early(file: Path) -> bool:
    return str(file.relative_to(REFERENCE / "h200")) in EARLY if file.is_relative_to(REFERENCE / "h200") else False


@pytest.mark.parametrize("file", [file for file in STORED if not _early(file)], ids=lambda file: file.stem)
def test_a_stored_file_is_as_its_schema_says(file):
    catalogue.check(file)


def test_every_other_file_has_a_reason():
    for file in set(FILES) - set(STORED):
        is_table = file.suffix == ".csv" and (file.parent.name == "tables" or file.name in TABLES)
        assert file.suffix in SHOWN or is_table, file
    early = {str(file.relative_to(REFERENCE / "h200")) for file in STORED if _early(file)}
    assert early == set(EARLY)
    for file in map((REFERENCE / "h200").joinpath, EARLY):
        assert catalogue.schema_of(file) is None


def test_a_file_is_written_as_it_was_read():
    """Writing what was read gives the same JSON, numbers to the digit, for every file that a schema describes."""
    for file in STORED:
        schema = None if _early(file) else catalogue.schema_of(file)
        if schema and file.suffix == ".json" and schema.__name__ != "RunResult":
            written = schema.model_validate_json(file.read_bytes()).content()
            assert json.dumps(written, sort_keys=True) == json.dumps(json.loads(file.read_text()), sort_keys=True), file


def test_a_key_that_no_schema_has_is_refused(tmp_path):
    stored = json.loads((REFERENCE / "cpu/profile/rollout.json").read_text())
    file = tmp_path / "profile" / "rollout.json"
    file.parent.mkdir()
    for changed in (stored | {"seeds": 1}, stored | {"points": [stored["points"][0] | {"speed": 1.0}]}):
        file.write_text(json.dumps(changed))
        with pytest.raises(ResultError, match=r"is not a RolloutBenchResult: unknown key `(seeds|points\[0\]\.speed)`"):
            catalogue.check(file)


def test_a_metric_keeps_its_kind_of_number():
    file = REFERENCE / "h200/walk/train/main-nf4-lora-seed0/metrics.jsonl"
    schema = catalogue.schema_of(file)
    for line in file.read_text().splitlines():
        assert json.dumps(schema.model_validate_json(line).content()) == line
