"""The instruction of a data set without one of its own: it asks for the answer that the grader reads."""

import json
from typing import get_args

import pytest

import qerl
from qerl.data.grading import well_formed
from qerl.data.sources import parse_run
from qerl.settings.base import parse
from qerl.settings.data import INSTRUCTIONS, AnswerForm, DatasetSettings, RecordFormat
from tests.tiny import tiny_qwen2, write_template

#: How a policy that does as it is told states 18, and what the instruction must name for that.
STATED = {
    ("native", "gsm8k"): ("9 + 9 = 18\n#### 18", "####"),
    ("native", "math"): ("So it is \\boxed{18}.", "\\boxed{}"),
    ("native", "aime"): ("So it is \\boxed{18}.", "\\boxed{}"),
    ("native", "countdown"): ("9 + 9 = 18\n#### 9+9", "####"),
    **{("tags", name): ("<think>9 + 9</think><answer>18</answer>", "<answer>") for name in get_args(RecordFormat)},
}

#: A file may have records of any format.
ORIGIN = {"source": "local", "path": "records.jsonl"}


@pytest.mark.parametrize("form", get_args(AnswerForm))
@pytest.mark.parametrize("record_format", get_args(RecordFormat))
def test_by_default_a_data_set_asks_for_what_its_grader_reads(record_format, form):
    settings = parse(DatasetSettings, {"format": record_format, "answer": form, "origin": ORIGIN}, "")
    stated, marker = STATED[form, record_format]
    assert well_formed(stated, record_format, form)
    assert marker in settings.instruction
    assert settings.instruction == INSTRUCTIONS[form][record_format]


@pytest.mark.parametrize("given", ["", "Be brief."])
def test_an_instruction_that_is_given_stays(given):
    values = {"format": "gsm8k", "instruction": given, "origin": {"source": "generated"}}
    assert parse(DatasetSettings, values, "").instruction == given


def test_a_run_and_an_evaluation_by_hand_ask_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    file = tmp_path / "pears.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "#### 18"}) + "\n")
    run = parse_run({"model": "m", "dataset": file, "out": tmp_path / "run"}, "run.yaml")
    assert "####" in run.dataset.instruction
    model = tiny_qwen2(tmp_path / "model")
    write_template(model)
    policy = qerl.load(model, dtype="float32")
    for name, given, asked in (("default", {}, True), ("nothing", {"instruction": ""}, False)):
        outcome = qerl.evaluate(policy, file, tmp_path / name, repeats=1, max_tokens=2, **given)
        assert ("####" in outcome.samples["prompt"][0]) == asked
