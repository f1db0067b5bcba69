"""Data sets: any file is accepted or refused in one sentence, and accepted problems are split and graded correctly."""

import json
import random
from contextlib import suppress

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qerl.data.records import DataError, detect_format, parse_record, question_id
from qerl.data.sources import SPLITS, check_problem_file, prepare, read_split
from qerl.settings.data import DatasetSettings, LocalData
from tests.properties.values import refused_in_one_sentence, texts, values

FORMATS = ["gsm8k", "math", "aime"]
KEYS = ["question", "answer", "problem", "Problem", "solution", "level", "Answer"]
stated = st.sampled_from(["#### 5", "so 5\n#### 5", "\\boxed{5}", "5", "5.0", "Level 3", "Level ?", "9" * 5000])
records = st.dictionaries(st.sampled_from(KEYS) | texts, values | stated, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(record=records | values)
@example(record={"question": float("nan"), "answer": "#### 5"})
@example(record={"question": "\ud800", "answer": "#### 5"})
@example(record={"problem": "p", "solution": "\\boxed{5}", "level": "9" * 5000})
@example(record={"problem": "p", "solution": "\\boxed{5}", "level": float("nan")})
@example(record={"\x1e0": "#### 5"})
@pytest.mark.parametrize("record_format", FORMATS)
def test_any_record_states_a_problem_or_is_one_sentence(record_format, record):
    with refused_in_one_sentence("some place"):
        problem = parse_record(record, record_format, "some place")
        assert problem.question.strip()
        assert problem.answer.strip()
        assert problem.question != "nan" or "nan" in record.values()
    if isinstance(record, dict):
        with refused_in_one_sentence("some place"):
            assert detect_format(record, "some place") in FORMATS


def taken(path):
    """Whether a file is accepted; a refusal must be one sentence with the file's name."""
    with refused_in_one_sentence(str(path)):
        assert check_problem_file(path) in FORMATS
        return True
    return False


def all_are_problems(rows):
    with suppress(DataError):
        found = detect_format(rows[0])
        return all(parse_record(row, found, "row") for row in rows)
    return False


GOOD = b'{"question": "q", "answer": "#### 5"}'


@given(content=st.binary(max_size=80) | texts.map(lambda text: text.encode(errors="replace")))
@example(content=b"\xff\xfe")
@example(content=b"\xef\xbb\xbf" + GOOD)
@example(content=b"[" * 100_000)
@example(content=b'{"question": ' + b"9" * 5000 + b', "answer": "#### 5"}')
@example(content=b'{"question": "q", "answer": "#### 5", "other": "\\ud800"}')
@example(content=b'{"question": NaN, "answer": "#### 5"}')
@example(content=GOOD + b"\n" + b"\0")
@example(content=b"[" + GOOD + b", null]")
@example(content=b"PAR1" + b"\0" * 20 + b"PAR1")
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_any_bytes_are_problems_or_one_sentence_with_the_files_name(folder, suffix, content):
    path = folder / f"bytes{suffix}"
    path.write_bytes(content)
    if taken(path):
        # One whole record lies in it, whatever else does.
        assert any(key.encode() in content for key in ("answer", "Answer", "solution"))


@given(
    rows=st.lists(st.fixed_dictionaries({"question": texts}, optional={"answer": texts | stated}), max_size=4),
    bad=records,
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_any_json_records_are_problems_or_one_sentence_with_the_files_name(folder, suffix, rows, bad):
    path = folder / f"rows{suffix}"
    rows = [*rows, json.loads(json.dumps(bad, default=str, skipkeys=True))]
    path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    assert taken(path) == all_are_problems(rows)


#: Columns of one type each, as parquet has them.
columns = st.sampled_from(
    [texts.filter(str.isprintable), stated, st.integers(-5, 5), st.floats(), st.booleans(), st.dates()]
)
cells = columns.flatmap(lambda cell: st.lists(cell | st.none(), min_size=3, max_size=3)) | st.lists(
    st.lists(st.integers(0, 9), max_size=2), min_size=3, max_size=3
)


@given(table=st.dictionaries(st.sampled_from(KEYS), cells, max_size=5))
@example(table={"question": ["q", None, "r"], "answer": ["#### 5"] * 3})
@example(table={"problem": ["q", "s", "r"], "answer": [[1], [2], [1, 2]]})
@example(table={"problem": ["q", "s", "r"], "answer": [1, None, 3]})
@example(table={"problem": ["q", "s", "r"], "answer": ["1"] * 3, "solution": [[], [], []]})
def test_any_parquet_table_is_problems_or_one_sentence_with_the_files_name(folder, table):
    path = folder / "table.parquet"
    pd.DataFrame(table).to_parquet(path)
    assert taken(path) == (bool(table) and all_are_problems(pd.read_parquet(path).to_dict("records")))


questions = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1, max_size=30, unique_by=question_id
)
#: Shares of validation and test.
shares = st.tuples(st.floats(0, 0.5), st.floats(0, 0.5))


def splits_of(folder, questions, fractions):
    path = folder / "split.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "#### 5"}) + "\n" for q in questions))
    origin = LocalData(source="local", path=path, validation_fraction=fractions[0], test_fraction=fractions[1])
    prepare(DatasetSettings(format="gsm8k", origin=origin), folder / "prepared")
    return {split: [p.question for p in read_split(folder / "prepared", split)] for split in SPLITS}


@given(questions=questions, fractions=shares, more=st.floats(0, 0.5), seed=st.integers(0, 99))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_the_split_is_a_partition_that_depends_on_each_question_alone(folder, questions, fractions, more, seed):
    splits = splits_of(folder, questions, fractions)
    assert sorted(q for of_split in splits.values() for q in of_split) == sorted(questions)
    of_question = {q: split for split, of_split in splits.items() for q in of_split}
    some = random.Random(seed).sample(questions, (len(questions) + 1) // 2)
    for split, of_split in splits_of(folder, some, fractions).items():
        assert all(of_question[q] == split for q in of_split)
    # A larger share of test takes from the others and gives back nothing.
    larger = splits_of(folder, questions, (fractions[0], min(0.5, fractions[1] + more)))
    assert set(splits["test"]) <= set(larger["test"])
