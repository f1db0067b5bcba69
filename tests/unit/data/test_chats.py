"""Prompts that are chats, with system message and variables of the template, and records for TRL and verl."""

import json

import datasets
import pandas as pd
import pyarrow as pa
import pytest

from qerl.data.prompts import TemplateInput, longer_than, prompts_ids
from qerl.data.records import DataError, detect_format, parse_record
from qerl.data.sources import check_problem_file, prepare, read_records, read_split
from qerl.models.loading import load_tokenizer
from qerl.settings.data import DatasetSettings
from tests.tiny import tiny_tokenizer, write_template

TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ASKED = {"role": "user", "content": "What is 2+3?"}
TRL = {"prompt": [SYSTEM, *TURNS, ASKED], "solution": "It is $\\boxed{5}$.", "difficulty": 0.5}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASKED],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0, "answer": "2+3=5\n#### 5"},
}


@pytest.fixture
def tokenizer(tmp_path):
    tiny_tokenizer(tmp_path)
    write_template(tmp_path, TEMPLATE)
    return load_tokenizer(tmp_path)


def prepared(folder, path, **settings):
    origin = {"source": "local", "path": path}
    prepare(DatasetSettings.model_validate({"format": "prompt", "origin": origin, **settings}), folder / "out")
    return folder / "out"


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def all_records(folder):
    return [record for split in ("train", "validation", "test") for record in read_records(folder, split)]


@pytest.mark.parametrize("record", [TRL, VERL, {"prompt": "What is 2+3?", "answer": "5"}])
def test_a_record_for_trl_or_verl_states_its_chat_and_answer(record):
    assert detect_format({"question": "?", **record}) == "prompt" or isinstance(record["prompt"], str)
    problem = parse_record(record, "prompt", "here")
    assert (problem.question, problem.answer) == ("What is 2+3?", "5")
    assert len(problem.context) == (3 if record is TRL else 0)
    assert problem.record == record


@pytest.mark.parametrize("key", ["", "Think."])
@pytest.mark.parametrize("own", ["none", "column", "chat"])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_prompts_are_what_the_template_makes_of_the_chat(tmp_path, tokenizer, key, own, arguments):
    chat = [*([SYSTEM] if own == "chat" else []), *TURNS, ASKED]
    record = {"prompt": chat, **({"system": "Be brief."} if own == "column" else {})}
    data = write(tmp_path / "data/train.jsonl", [record])
    folder = prepared(tmp_path, data.parent, system=key, template_arguments=arguments, instruction="Go.")
    problems = read_split(folder, "train")
    system = [{"role": "system", "content": key}] if key and own == "none" else [SYSTEM] if own != "none" else []
    whole = [*system, *TURNS, {"role": "user", "content": "What is 2+3?\nGo."}]
    expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=False, **arguments)
    given = TemplateInput(arguments=arguments)
    assert prompts_ids(tokenizer, problems, "Go.", given) == [expected]
    assert longer_than(len(expected) - 1, tokenizer, problems, "Go.", given) == {problems[0].id: len(expected)}
    assert longer_than(len(expected), tokenizer, problems, "Go.", given) == {}


def test_what_a_template_would_drop_is_an_error(tmp_path, tokenizer):
    problem = parse_record(TRL, "prompt", "here")
    for name in ("enable_thinkin", "messages"):  # the template has those, but not from the data set
        with pytest.raises(DataError, match=f"has no variable '{name}' that a data set gives; correct it"):
            prompts_ids(tokenizer, [problem], "", TemplateInput(arguments={name: False}))
    write_template(tmp_path, "{{ messages[-1].content }}")
    with pytest.raises(DataError, match="drops the system message"):
        prompts_ids(load_tokenizer(tmp_path), [problem], "")


def test_chats_are_told_apart_by_all_that_they_say():
    chats = [[ASKED], [SYSTEM, ASKED], [*TURNS, ASKED], [SYSTEM, *TURNS, ASKED]]
    ids = [parse_record({"prompt": chat}, "prompt", "here").id for chat in chats]
    assert len(set(ids)) == 4
    assert ids[0] == parse_record({"problem": "What is 2+3?", "answer": "5"}, "math", "here").id


def test_a_chat_that_is_repeated_with_other_columns_is_told(tmp_path, caplog):
    """A game of one prompt has its state in a column."""
    prepared(tmp_path, write(tmp_path / "a.jsonl", [TRL, {**TRL, "difficulty": 0.7}, TRL]))
    assert "1 of these questions were repeated with other columns" in caplog.text
    assert "a.jsonl, line 1 and " in caplog.text
    caplog.clear()
    prepared(tmp_path, write(tmp_path / "a.jsonl", [TRL, TRL]))
    assert "other columns" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [ASKED, *TURNS]}, "line 1 has a `prompt` that doesn't end in a user's message"),
        ({"prompt": []}, "doesn't end in a user's message"),
        ({"prompt": [{"role": "user", "content": " "}]}, "doesn't end in a user's message"),
        ({"prompt": ["What?"]}, "message 1 of `prompt`, is not a record"),
        ({"prompt": [SYSTEM, {"role": "user"}]}, r"message 2 of `prompt`, must have .*; it has role \(str\)"),
        ({"prompt": [{**ASKED, "content": [{"type": "image"}]}]}, r"both text.*content \(list\)"),
        ({"prompt": [{**ASKED, "tool_calls": [1]}]}, r"nothing else; it has .*tool_calls \(list\)"),
        ({"system": "Be long."}, "a system message both in `prompt` and in `system`; keep one"),
        ({"prompt": None}, "an empty `prompt`"),
        ({"prompt": str([ASKED])}, "has a chat as text in `prompt`"),
        ({"prompt": json.dumps([SYSTEM, ASKED])}, "has a chat as text in `prompt`"),
    ],
)
def test_a_chat_that_cannot_be_asked_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        check_problem_file(write(tmp_path / "a.jsonl", [{**TRL, **change}]), "prompt")


def test_a_point_names_a_key_within_a_column(tmp_path):
    path = write(tmp_path / "a.jsonl", [VERL])
    [problem] = read_split(prepared(tmp_path, path, columns={"answer": "extra_info.answer"}), "train")
    assert problem.answer == "5"  # a worked solution of GSM8K
    with pytest.raises(DataError, match=r"has no `extra_info.gold`, which `columns` names for `answer`"):
        prepared(tmp_path, path, columns={"answer": "extra_info.gold"})


# --- kinds of files

RECORDS = [{"prompt": f"What is {n}+1?", "answer": str(n + 1), "share": n / 4, "time": "10:30"} for n in range(12)]


def to_lines(path):
    pd.DataFrame(RECORDS).to_json(path, orient="records", lines=True, compression="infer")


def to_arrow(path):
    """With a column of bytes, which JSON lacks, and of numbers of 32 bits."""
    data = datasets.Dataset.from_list([{**record, "image": b"\xff"} for record in RECORDS])
    data.cast_column("share", datasets.Value("float32")).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        *((f"a.{kind}", to_lines) for kind in ("jsonl", "JSONL", "ndjson", "jsonl.gz", "jsonl.zst")),
        *((f"a.{kind}", lambda path: pd.DataFrame(RECORDS).to_csv(path, index=False)) for kind in ("csv", "csv.gz")),
        ("a.PARQUET", lambda path: pd.DataFrame(RECORDS).to_parquet(path)),
        ("saved", to_arrow),
    ],
)
def test_records_of_each_kind_of_file_are_those_that_were_written(tmp_path, name, writer):
    writer(tmp_path / name)
    read = sorted(all_records(prepared(tmp_path, tmp_path / name)), key=lambda record: record["share"])
    numbers = name.startswith("a.csv")  # which has no types
    assert read == [{**each, "answer": int(each["answer"])} if numbers else each for each in RECORDS]


def test_splits_that_datasets_saved_are_the_splits(tmp_path):
    parts = {"train": RECORDS[:8], "test": RECORDS[8:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()}).save_to_disk(
        tmp_path / "saved"
    )
    folder = prepared(tmp_path, tmp_path / "saved")
    assert {name: read_records(folder, name) for name in parts} == parts
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="has a split 'dev'; the splits are"):
        check_problem_file(tmp_path / "other")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_named(tmp_path, suffix):
    whole = pa.compress(b'{"prompt": "What?", "answer": "1"}\n' * 9, codec={".gz": "gzip", ".zst": "zstd"}[suffix])
    for content in (b'{"prompt": "What?"}\n', whole.to_pybytes()[:-9]):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        with pytest.raises(DataError, match=rf"a.jsonl{suffix} isn't compressed as its name says"):
            check_problem_file(tmp_path / f"a.jsonl{suffix}")
