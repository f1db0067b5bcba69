"""Problems from files, folders and functions: their splits, mistakes in them, and the prepared folder."""

import hashlib
import json
import sys
from datetime import date, datetime
from decimal import Decimal

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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def local(path, **shares):
    return LocalData(source="local", path=path, **shares)


def held_out(path):
    """All records of a file as problems of the test."""
    return local(path, test_fraction=1, validation_fraction=0)


def prepared(tmp_path, origin, record_format="gsm8k", name="out"):
    prepare(DatasetSettings(format=record_format, origin=origin, instruction=TAGS, answer="tags"), tmp_path / name)
    return tmp_path / name


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
    about = json.loads((folder / "dataset.json").read_text())
    del about["units"]  # as in a folder that was prepared before there were units
    (folder / "dataset.json").write_text(json.dumps(about))
    assert read_meta(folder).units == []


# --- splits


def test_a_folder_keeps_its_splits_joins_their_shards_and_may_lack_some(tmp_path):
    for shard in range(2):
        write_lines(tmp_path / f"in/main/train-0000{shard}-of-00002.jsonl", gsm8k(3, start=3 * shard))
    pd.DataFrame(gsm8k(4, start=10)).to_parquet(tmp_path / "in/main/test-00000-of-00001.parquet")
    folder = prepared(tmp_path, local(tmp_path / "in"))
    assert questions(folder)["train"] == [r["question"] for r in gsm8k(6)]
    assert read_meta(folder).rows == {"train": 6, "validation": 0, "test": 4}
    for name in ("validation_fraction", "test_fraction"):
        with pytest.raises(DataError, match=rf"origin.{name} divides one list .* remove it"):
            prepared(tmp_path, local(tmp_path / "in", **{name: 0.5}))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *((("train", name), f"{name}.jsonl names no split") for name in ("val", "eval", "dev-00000-of-00001")),
        (("train-00000-of-00003", "train-00002-of-00003"), "has 2 of 3 files of the split train; download it again"),
        (("test", "test-1"), "several files for the split test"),
        (("notes",), "no file named.*to_parquet"),
    ],
)
def test_a_folder_whose_splits_are_unclear_is_an_error(tmp_path, names, message):
    for number, name in enumerate(names):
        write_lines(tmp_path / f"{name}.jsonl", gsm8k(3, start=3 * number))
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, local(tmp_path))


@pytest.mark.parametrize("name", ["test.tsv", "test.jsonl.xz", "data/validation-00000-of-00001.arrow"])
def test_a_split_in_another_kind_of_file_is_not_left_out_silently(tmp_path, name):
    write_lines(tmp_path / "train.jsonl", gsm8k(3))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "train.tsv").touch()  # beside the file that is read
    with pytest.raises(DataError, match=rf"{name} isn't read: expected one of \.jsonl, .*; or move it out of"):
        prepared(tmp_path, local(tmp_path))


# --- repeated and contradictory questions


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="qerl")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_question_is_asked_once_in_every_split(tmp_path, said):
    write_lines(tmp_path / "in/test.jsonl", [*gsm8k(3), *gsm8k(1)])
    write_lines(tmp_path / "in/validation.jsonl", gsm8k(3, start=2))
    write_lines(tmp_path / "in/train.jsonl", [*gsm8k(9), *gsm8k(2, start=6)])
    found = questions(prepared(tmp_path, local(tmp_path / "in")))
    expected = [record["question"] for record in gsm8k(9)]
    assert found == {"test": expected[:3], "validation": expected[3:5], "train": expected[5:]}
    held_out = "whose question is in another split, held out there"
    assert said() == [
        "split test: dropped 1 records that repeat a question",
        f"split validation: dropped 1 records {held_out}",
        "split train: dropped 2 records that repeat a question",
        f"split train: dropped 5 records {held_out}",
    ]


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


# --- files


def test_units_of_the_data_set_may_follow_an_answer(tmp_path):
    rows = [*gsm8k(3), {"question": "How many?", "answer": "2 + 3 = 5\n#### 5 widgets"}]
    origin = held_out(write_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=r"a\.jsonl, line 4 states no answer"):
        prepared(tmp_path, origin, name="refused")
    prepare(DatasetSettings(format="gsm8k", origin=origin, units=["widgets"]), tmp_path / "out")
    assert [problem.answer for problem in read_split(tmp_path / "out", "test")] == ["1", "2", "3", "5"]
    assert check_problem_file(origin.path, "gsm8k", units=["widgets"]) == "gsm8k"


LIST = json.dumps(gsm8k(2), indent=1)
GOOD = json.dumps(gsm8k(1)[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", f'{GOOD}\n{{"question": "Two?"}}', r"a\.jsonl, line 2 has no `answer`"),
        ("a.jsonl", f'{GOOD}\n{{"question": "Two?", "answer": NaN}}', "line 2 has an empty `answer`; fill it, or"),
        ("a.jsonl", f'{GOOD}\n{{"question": ', "line 2 is not valid JSON in UTF-8: Expecting value: line 1 column 13 "),
        ("a.jsonl", f"{GOOD}\n[1]", "line 2 is not a record"),
        ("a.jsonl", '{"question": "2?", "answer": "#### 2", "answer": "#### 3"}', "line 1 has the key `answer` twice"),
        ("a.jsonl", '{"question": "2?", "answer": "#### 2", "m": {"x": 1, "x": 1}}', "line 1 has the key `x` twice"),
        ("a.json", '[{"question": "1?", "answer": "#### 1"}, {"a": 1, "a": 1}]', "has the key `a` twice"),
        ("a.json", f'[{GOOD}, {{"question": null}}]', "record 2 has an empty `question`"),
        ("a.jsonl", '{"question": "Gr\udcf6?"}', r"line 1 is not valid JSON in UTF-8: .*; save the file as UTF-8"),
        ("a.jsonl", LIST, r"line 1 is not valid JSON .*; write one record a line, or name .* \.json$"),
        ("a.jsonl", "\ufeff" + LIST, r"line 1 is not valid JSON .*; write one record a line, or name .* \.json$"),
        ("a.jsonl", "", "holds no records"),
        ("a.csv", "question,answer", "is not a valid csv file: .*Empty CSV"),
        ("a.csv", "question,answer\n1?,2,3", "is not a valid csv file: .*Expected 2 columns, got 3"),
        ("a.csv", "question,answer,by\n1?,#### 1,Gr\udcf6n", "column `by` is not in UTF-8; save the file as UTF-8"),
        ("a.tsv", "question\tanswer", "expected one of.*to_parquet"),
        ("lines.json", "{}\n{}\n", "Extra data.*name a file with one record a line .jsonl"),
        ("org/name", None, "org/name doesn't exist .*source: hub"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_fix(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    for use in (lambda: check_problem_file(tmp_path / name), lambda: prepared(tmp_path, local(tmp_path / name))):
        with pytest.raises(DataError, match=message):
            use()


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", f"{GOOD}\r\n"), ("a.json", f"[{GOOD}]")])
def test_a_mark_of_byte_order_is_no_part_of_a_record(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(("\ufeff" + content).encode())
    assert read_records(prepared(tmp_path, held_out(path)), "test") == gsm8k(1)


def test_values_of_parquet_are_those_that_were_written(tmp_path):
    """Not those of float64, which has no 2^53 + 1 and another 0.1 than float32."""
    path = tmp_path / "a.parquet"
    columns = {
        "problem": ["One?", "Two?"],
        "answer": pd.array([0.1, 2.7], "float32"),
        "big": pd.array([2**53 + 1, None]),
        **{"list": [[1, 2]] * 2, "time": [datetime(2024, 5, 1, 12)] * 2, "day": [date(2024, 5, 1)] * 2},
        "cost": [Decimal("1.50")] * 2,
    }
    pd.DataFrame(columns).set_index("problem").to_parquet(path)  # an index is a column too
    folder = prepared(tmp_path, held_out(path), "math")
    assert [problem.answer for problem in read_split(folder, "test")] == ["0.1", "2.7"]
    first, second = read_records(folder, "test")
    assert [first["big"], second["big"]] == [2**53 + 1, None]
    plain = [[1, 2], "2024-05-01T12:00:00", "2024-05-01", "1.50"]
    assert [first[key] for key in ("list", "time", "day", "cost")] == plain
    cells = [pa.array(["Two?"]), pa.array(["#### 2"]), pa.array(["#### 3"])]
    parquet.write_table(pa.Table.from_arrays(cells, ["question", "answer", "answer"]), path)
    with pytest.raises(DataError, match=r"a\.parquet has the column `answer` twice; keep one"):
        check_problem_file(path)


@pytest.mark.parametrize("large", ["12345678901234567", "12345678901234567890", "-9007199254740993", "1e400"])
def test_a_number_of_csv_keeps_its_digits(tmp_path, large):
    """A float has 53 bits, and pyarrow reads all numbers of such a column as floats."""
    (tmp_path / "a.csv").write_text(f"problem,answer,rate\nOne?,{large},0.25\nTwo?,2.5,\nThree?,007,1e20\n")
    folder = prepared(tmp_path, held_out(tmp_path / "a.csv"), "math")
    assert [problem.answer for problem in read_split(folder, "test")] == [large, "2.5", "007"]
    assert [record["rate"] for record in read_records(folder, "test")] == [0.25, None, 1e20]


# --- a function of the user

OWN = """
def good(count=400):
    return [{"question": f"What is {n} plus 1?", "answer": f"{n}+1={n + 1}\\n#### {n + 1}"} for n in range(count)]

lazily = lambda: iter(good())
splits = lambda: {"train": good(10), "test": good(12)[8:]}
bad = lambda: [*good(2), {"question": "Two?", "answer": "two"}]
bad_split = lambda: {"test": good(2), "train": [*good(4)[2:], {"question": "Two?"}]}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Origins whose functions are in a module of the working directory."""
    name = f"data_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return lambda function: FunctionData(source="python", function=f"{name}:{function}")


def test_returned_records_are_split_like_those_of_a_file_and_returned_splits_stay(tmp_path, own):
    reference = questions(prepared(tmp_path, local(write_lines(tmp_path / "a.jsonl", gsm8k(400))), name="reference"))
    assert 20 <= len(reference["validation"]) <= 60
    assert 55 <= len(reference["test"]) <= 105
    for name in ("good", "lazily"):
        assert questions(prepared(tmp_path, own(name), name=name)) == reference
    expected = [record["question"] for record in gsm8k(12)]
    found = questions(prepared(tmp_path, own("splits"), name="splits"))
    assert found == {"train": expected[:8], "validation": [], "test": expected[8:]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("bad", r":bad, record 3 states no answer: `answer` must end in `#### n`"),
        ("bad_split", r":bad_split, split train, record 3 has no `answer`"),
    ],
)
def test_bad_returned_records_are_named(tmp_path, own, function, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, own(function))
