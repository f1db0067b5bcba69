import hashlib
import json
import sys

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from qerl.data.records import DataError
from qerl.data.sources import SPLITS, check_problem_file, prepare, read_meta, read_records, read_split
from qerl.settings.data import DatasetSettings, FunctionData, Generated, LocalData

TAGS = "Write <think>steps</think><answer>number</answer>."


def gsm8k(count, start=0):
    return [
        {"question": f"What is {n} plus 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"}
        for n in range(start, start + count)
    ]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepared(tmp_path, origin, record_format="gsm8k", name="out"):
    prepare(DatasetSettings(format=record_format, origin=origin, instruction=TAGS, answer="tags"), tmp_path / name)
    return tmp_path / name


def held_out(path):
    """All records of a file as problems of the test."""
    return LocalData(source="local", path=path, test_fraction=1, validation_fraction=0)


def questions(folder):
    return {split: [p.question for p in read_split(folder, split)] for split in SPLITS}


def test_a_generated_set_is_described_by_its_meta(tmp_path):
    folder = prepared(tmp_path, Generated(train=20, validation=5, test=7), "aime")
    meta = read_meta(folder)
    assert (meta.format, meta.instruction, meta.answer) == ("aime", TAGS, "tags")
    assert meta.origin["source"] == "generated"
    assert meta.rows == {"train": 20, "validation": 5, "test": 7}
    for split in SPLITS:
        assert meta.sha256[split] == hashlib.sha256((folder / f"{split}.jsonl").read_bytes()).hexdigest()
        assert len(read_split(folder, split)) == meta.rows[split]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_the_suffix_of_a_file_does_not_change_its_split(tmp_path, suffix):
    path, reference = tmp_path / f"a{suffix}", write_lines(tmp_path / "b.jsonl", gsm8k(400))
    if suffix == ".parquet":
        pd.DataFrame(gsm8k(400)).to_parquet(path)
    else:
        path.write_text(json.dumps(gsm8k(400)) if suffix == ".json" else reference.read_text())
    found = questions(prepared(tmp_path, LocalData(source="local", path=path)))
    assert found == questions(prepared(tmp_path, LocalData(source="local", path=reference), name="reference"))
    assert sorted(q for split in found.values() for q in split) == sorted(r["question"] for r in gsm8k(400))
    assert 20 <= len(found["validation"]) <= 60
    assert 55 <= len(found["test"]) <= 105


def test_more_records_move_no_other_to_another_split(tmp_path):
    few, many = (write_lines(tmp_path / f"{n}.jsonl", gsm8k(n)) for n in (100, 200))
    before = questions(prepared(tmp_path, LocalData(source="local", path=few)))
    after = questions(prepared(tmp_path, LocalData(source="local", path=many), name="after"))
    assert all(set(before[split]) <= set(after[split]) for split in SPLITS)


def test_a_folder_keeps_its_splits_and_may_lack_some(tmp_path):
    source = tmp_path / "gsm8k" / "main"
    source.mkdir(parents=True)
    pd.DataFrame(gsm8k(10)).to_parquet(source / "train-00000-of-00001.parquet")
    pd.DataFrame(gsm8k(4, start=10)).to_parquet(source / "test-00000-of-00001.parquet")
    folder = prepared(tmp_path, LocalData(source="local", path=tmp_path / "gsm8k"))
    assert read_meta(folder).rows == {"train": 10, "validation": 0, "test": 4}
    assert read_split(folder, "validation") == []


def test_shares_of_splits_are_refused_for_a_folder_which_has_its_splits(tmp_path):
    (tmp_path / "given").mkdir()
    write_lines(tmp_path / "given/train.jsonl", gsm8k(4))
    for name in ("validation_fraction", "test_fraction"):
        with pytest.raises(DataError, match=rf"origin.{name} divides one list .* remove it"):
            prepared(tmp_path, LocalData(source="local", path=tmp_path / "given", **{name: 0.5}))


def test_nested_parquet_columns_survive(tmp_path):
    pd.DataFrame([{**r, "tags": [1, 2]} for r in gsm8k(3)]).to_parquet(tmp_path / "test.parquet")
    folder = prepared(tmp_path, held_out(tmp_path / "test.parquet"))
    assert json.loads((folder / "test.jsonl").read_text().splitlines()[0])["tags"] == [1, 2]


def test_training_questions_of_other_splits_and_duplicates_are_dropped(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "train.jsonl", gsm8k(10) + gsm8k(2))
    write_lines(source / "test.jsonl", [{**r, "question": r["question"] + "  "} for r in gsm8k(3, start=8)])
    found = questions(prepared(tmp_path, LocalData(source="local", path=source)))
    assert found["train"] == [r["question"] for r in gsm8k(8)]
    assert len(found["test"]) == 3


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="qerl")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_question_is_asked_once_in_every_split(tmp_path, said):
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "test.jsonl", [*gsm8k(3), *gsm8k(1)])
    write_lines(source / "validation.jsonl", gsm8k(3, start=2))
    write_lines(source / "train.jsonl", [*gsm8k(9), *gsm8k(2, start=6)])
    found = questions(prepared(tmp_path, LocalData(source="local", path=source)))
    expected = [record["question"] for record in gsm8k(9)]
    assert found == {"test": expected[:3], "validation": expected[3:5], "train": expected[5:]}
    held_out = "whose question is in another split, held out there"
    assert said() == [
        "split test: dropped 1 records that repeat a question",
        f"split validation: dropped 1 records {held_out}",
        "split train: dropped 2 records that repeat a question",
        f"split train: dropped 5 records {held_out}",
    ]


def test_an_answer_with_a_unit_of_its_data_set_is_prepared_and_another_is_refused_with_its_line(tmp_path):
    rows = [*gsm8k(3), {"question": "How many?", "answer": "2 + 3 = 5\n#### 5 widgets"}]
    origin = held_out(write_lines(tmp_path / "a.jsonl", rows))
    settings = DatasetSettings(format="gsm8k", origin=origin)
    with pytest.raises(DataError, match=r"a\.jsonl, line 4 states no answer"):
        prepare(settings, tmp_path / "refused")
    with_units = settings.model_copy(update={"units": ["widgets"]})
    prepare(with_units, tmp_path / "out")
    assert [problem.answer for problem in read_split(tmp_path / "out", "test")] == ["1", "2", "3", "5"]
    with pytest.raises(DataError, match=r"a\.jsonl, line 4 states no answer"):
        check_problem_file(origin.path, "gsm8k")
    assert check_problem_file(origin.path, "gsm8k", units=["widgets"]) == "gsm8k"


def test_answers_that_contradict_each_other_drop_their_question(tmp_path, said):
    rows = gsm8k(4)
    rows += [{**rows[0], "answer": "#### 1.0"}, {**rows[1], "answer": "#### 7"}, {**rows[1], "answer": "#### 7"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = questions(prepared(tmp_path, held_out(path)))
    assert found["test"] == [rows[n]["question"] for n in (0, 2, 3)]
    assert said() == [
        "split test: dropped 1 records that repeat a question",
        "split test: dropped 1 questions whose answers contradict each other; correct them: "
        f"{path}, line 2 (2) and {path}, line 6 (7)",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "Two?"}', r"a\.jsonl, line 2 has no `answer`"),
        ('{"question": "Two?", "answer": ""}', "line 2 has an empty `answer`; fill it, or leave the record out"),
        ('{"question": "Two?", "answer": "two"}', "line 2 states no answer"),
        ('{"question": "Two?", "answer": null}', "line 2 has an empty `answer`; fill it, or leave the record out"),
        ('{"question": "Two?", "answer": NaN}', "line 2 has an empty `answer`; fill it, or leave the record out"),
        ('{"question": ', r"line 2 is not valid JSON in UTF-8: Expecting value: line 1 column 13 "),
        ("[1]", "line 2 is not a record"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(gsm8k(1)[0]) + "\n" + content + "\n")
    with pytest.raises(DataError, match=message):
        check_problem_file(path)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, LocalData(source="local", path=path))


def test_a_column_twice_in_a_table_is_refused(tmp_path):
    columns = [pa.array(["Two?"]), pa.array(["#### 2"]), pa.array(["#### 3"])]
    parquet.write_table(pa.Table.from_arrays(columns, ["question", "answer", "answer"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has the column `answer` twice; keep one"):
        check_problem_file(tmp_path / "a.parquet")


LIST = json.dumps(gsm8k(2), indent=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "2?", "answer": "#### 2", "answer": "#### 3"}', "line 1 has the key `answer` twice"),
        ("a.jsonl", '{"question": "2?", "answer": "#### 2", "m": {"x": 1, "x": 1}}', "line 1 has the key `x` twice"),
        ("a.json", '[{"question": "1?", "answer": "#### 1"}, {"a": 1, "a": 1}]', "has the key `a` twice"),
        (
            "a.jsonl",
            '{"question": "Gr\udcf6\udcdfe?"}',
            r"line 1 is not valid JSON in UTF-8: .*; save the file as UTF-8",
        ),
        ("a.jsonl", LIST, r"line 1 is not valid JSON .*; write one record a line, or name .* \.json$"),
        ("a.jsonl", "\ufeff" + LIST, r"line 1 is not valid JSON .*; write one record a line, or name .* \.json$"),
        ("a.jsonl", "", "holds no records"),
        ("a.csv", "question,answer", "expected one of.*to_parquet"),
        ("lines.json", "{}\n{}\n", "Extra data.*name a file with one record a line .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_its_fix(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        check_problem_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jsonl", "a.jsonl doesn't exist"),
        ("org/name", "org/name doesn't exist .*source: hub"),
        ("", "no file named.*to_parquet"),
    ],
)
def test_a_path_without_problems_is_an_error(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        check_problem_file(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(
            (("train", name), f"{name}.jsonl names no split; rename it")
            for name in ("val", "valid", "dev-00000-of-00001")
        ),
        (("train", "eval"), "eval.jsonl names no split; rename it"),
        (("train-00000-of-00003", "train-00002-of-00003"), "has 2 of 3 files of the split train; download it again"),
        (("test", "test-1"), "several files for the split test"),
    ],
)
def test_a_folder_whose_splits_are_unclear_is_an_error(tmp_path, names, message):
    for number, name in enumerate(names):
        write_lines(tmp_path / f"{name}.jsonl", gsm8k(3, start=3 * number))
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, LocalData(source="local", path=tmp_path))


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "{}\r\n"), ("a.json", "[{}]")])
def test_a_mark_of_byte_order_is_no_part_of_a_record(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(("\ufeff" + content.replace("{}", json.dumps(gsm8k(1)[0]))).encode())
    folder = prepared(tmp_path, held_out(path))
    assert read_records(folder, "test") == gsm8k(1)


def test_a_good_file_yields_its_format(tmp_path):
    assert check_problem_file(write_lines(tmp_path / "a.jsonl", gsm8k(3))) == "gsm8k"
    assert check_problem_file(write_lines(tmp_path / "b.jsonl", [{"problem": "Two?", "answer": 2}])) == "aime"


def test_numbers_of_parquet_are_those_that_were_written(tmp_path):
    """Not those of float64, which has no 2^53 + 1 and another 0.1 than float32."""
    path = tmp_path / "a.parquet"
    columns = {
        "problem": ["One?", "Two?"],
        "answer": pd.array([0.1, 2.7], "float32"),
        "big": pd.array([2**53 + 1, None]),
    }
    pd.DataFrame(columns).to_parquet(path)
    origin = held_out(path)
    folder = prepared(tmp_path, origin, "math")
    assert [problem.answer for problem in read_split(folder, "test")] == ["0.1", "2.7"]
    assert [record["big"] for record in read_records(folder, "test")] == [2**53 + 1, None]


def test_a_value_without_json_is_named_by_its_column(tmp_path):
    path = tmp_path / "a.parquet"
    pd.DataFrame([{**record, "image": b"x"} for record in gsm8k(3)]).to_parquet(path)
    with pytest.raises(DataError, match=r"column .image. holds a value of type bytes, .*; leave the column out"):
        prepared(tmp_path, LocalData(source="local", path=path))


@pytest.mark.parametrize("name", ["test.csv", "test.jsonl.gz", "data/validation-00000-of-00001.arrow"])
def test_a_split_in_another_kind_of_file_is_not_left_out_silently(tmp_path, name):
    write_lines(tmp_path / "train.jsonl", gsm8k(3))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "train.csv").touch()  # beside the file that is read
    with pytest.raises(DataError, match=rf"{name} isn't read: expected one of \.jsonl, .*; or move it out of"):
        prepared(tmp_path, LocalData(source="local", path=tmp_path))


def test_files_in_hidden_folders_are_no_splits(tmp_path):
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write_lines(tmp_path / ".ipynb_checkpoints/train-checkpoint.jsonl", gsm8k(1))
    write_lines(tmp_path / "train.jsonl", gsm8k(3))
    assert read_meta(prepared(tmp_path, LocalData(source="local", path=tmp_path))).rows["train"] == 3


# --- a function of the user ------------------------------------------------------------------------------------------

OWN = """
def good(count=400):
    return [{"question": f"What is {n} plus 1?", "answer": f"{n}+1={n + 1}\\n#### {n + 1}"} for n in range(count)]

def splits():
    return {"train": good(10), "test": good(12)[8:]}

def bad():
    return [*good(2), {"question": "Two?", "answer": "two"}]

def bad_split():
    return {"test": good(2), "train": [*good(4)[2:], {"question": "Two?"}]}

def unknown():
    return {"training": good(2)}

def text():
    return "rows"

def number():
    return 7

def lazily():
    yield from good()

def empty():
    return []

def rows():
    return [1]

def table():
    import pandas as pd
    return {"train": pd.DataFrame(good(2))}

def unwritable():
    return [{**good(1)[0], "when": object()}]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Origins whose functions are in a module of the working directory."""
    name = f"data_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return lambda function: FunctionData(source="python", function=f"{name}:{function}")


def test_returned_records_are_split_like_those_of_a_file(tmp_path, own):
    file = write_lines(tmp_path / "a.jsonl", gsm8k(400))
    reference = questions(prepared(tmp_path, LocalData(source="local", path=file), name="reference"))
    assert questions(prepared(tmp_path, own("good"))) == reference
    assert questions(prepared(tmp_path, own("lazily"), name="lazily")) == reference


def test_returned_splits_are_kept_and_leaks_dropped(tmp_path, own):
    found = questions(prepared(tmp_path, own("splits")))
    expected = [record["question"] for record in gsm8k(12)]
    assert found == {"train": expected[:8], "validation": [], "test": expected[8:]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("bad", r":bad, record 3 states no answer: `answer` must end in `#### n`"),
        ("bad_split", r":bad_split, split train, record 3 has no `answer`"),
        ("unknown", "returned a split 'training'; the splits are train, validation, test"),
        ("text", ":text must return records.* not str"),
        ("number", ":number must return records.* not int"),
        ("empty", ":empty returned no record"),
        ("table", r':table, split train must return records, not a DataFrame; give its `.to_dict\("records"\)`'),
        ("rows", ":rows, record 1 is not a record"),
        ("unwritable", "value of type object, which can't be written as JSON"),
    ],
)
def test_bad_returned_records_are_named(tmp_path, own, function, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, own(function))
