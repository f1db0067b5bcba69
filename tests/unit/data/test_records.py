from decimal import Decimal

import numpy as np
import pytest
import yaml

from qerl.data.grading import is_correct
from qerl.data.records import DataError, detect_format, parse_record

GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
MATH = {"problem": "Half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 3"}
MATH500 = {**MATH, "answer": "\\frac{1}{2}", "subject": "Algebra", "unique_id": "x", "level": 2}
AIME = {"id": 60, "problem": "Count them.", "solution": "So \\boxed{033}.", "answer": "033", "year": "2024"}


@pytest.mark.parametrize(
    ("record", "record_format", "answer", "level"),
    [
        (GSM8K, "gsm8k", "4", None),
        ({**GSM8K, "answer": "#### 1,200"}, "gsm8k", "1,200", None),
        ({**GSM8K, "answer": "#### -12.50 dollars.\n2 lines"}, "gsm8k", "-12.50", None),
        ({**GSM8K, "answer": "#### 11."}, "gsm8k", "11", None),
        (MATH, "math", "\\frac{1}{2}", 3),
        (MATH500, "math", "\\frac{1}{2}", 2),
        ({**MATH, "level": "Level ?"}, "math", "\\frac{1}{2}", None),
        ({**MATH, "answer": float("nan")}, "math", "\\frac{1}{2}", 3),
        (AIME, "aime", "33", None),
        ({"Problem": "Count.", "Answer": 204}, "aime", "204", None),
        ({"problem": "Count.", "answer": 0}, "aime", "0", None),
    ],
)
def test_each_format_is_detected_and_parsed(record, record_format, answer, level):
    assert detect_format(record) == record_format
    problem = parse_record(record, record_format, "here")
    assert (problem.answer, problem.level) == (answer, level)
    assert problem.question == (record.get("question") or record.get("problem") or record.get("Problem"))


@pytest.mark.parametrize(
    ("answer", "text"), [("\\frac{1}{2}", "\\frac{1}{2}"), (0.0, "0.0"), (" -1 ", "-1"), ("1e5", "1e5")]
)
def test_a_math_problem_may_have_an_answer_alone(answer, text):
    problem = parse_record({"problem": "Which?", "answer": answer}, "math", "here")
    assert (problem.answer, problem.solution) == (text, None)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e-05, "0.00001"),
        (-1.5e-07, "-0.00000015"),
        (1e16, "10000000000000000"),
        (np.float32(1e-05), "0.00001"),
        (Decimal("1E+2"), "100"),
    ],
)
def test_a_number_has_no_exponent_and_is_found_right(number, text):
    problem = parse_record({"problem": "Which?", "answer": number}, "math", "here")
    assert problem.answer == text
    assert is_correct(f"\\boxed{{{text}}}", problem.answer, "math")


def test_the_error_for_an_answer_that_is_no_number_quotes_it():
    record = {"question": "How many?", "answer": "2 + 3 = 5, so\n#### 5 million"}
    with pytest.raises(DataError, match=r"^a.jsonl, line 3 states no answer: .*`units` .* ends in '.*#### 5 million'$"):
        parse_record(record, "gsm8k", "a.jsonl, line 3")
    assert parse_record(record, "gsm8k", "a.jsonl, line 3", ["million"]).answer == "5"


def test_an_aime_problem_may_lack_a_solution():
    assert parse_record({"problem": "Count.", "answer": 7}, "aime", "here").solution is None


@pytest.mark.parametrize(
    ("record", "record_format", "message"),
    [
        ({"question": "Two?"}, "gsm8k", "no `answer`"),
        ({"question": "Two?", "answer": None}, "gsm8k", "an empty `answer`"),
        ({"question": "Two?", "answer": "It is 2."}, "gsm8k", "#### n"),
        *(
            ({"question": "Two?", "answer": f"So #### {answer}"}, "gsm8k", "states no answer.*one number.*format: math")
            for answer in (
                "11/2",
                "1,000/3",
                "-12/5",
                "12:30",
                "2e10",
                "10 000",
                "3 1/2",
                "3.5.2",
                "1.000,5",
                "10-12",
                "2 x 3",
            )
        ),
        ({"answer": "#### 2"}, "gsm8k", "no `question`"),
        ({"problem": "Two?", "solution": "It is 2."}, "math", "boxed"),
        ({"problem": "Two?", "answer": None}, "math", "neither `answer` nor `solution`; .*: problem, answer"),
        ({"problem": "Two?", "answer": ["2", "3"]}, "math", "list in `answer`"),
        ({"problem": "Two?", "answer": {"value": "2"}}, "math", "dict in `answer`"),
        ({"problem": "Two?", "answer": "One and one.\n#### 2"}, "math", "set `format: gsm8k`"),
        ({"problem": "Two?", "answer": "1000"}, "aime", "0 to 999"),
        ({"problem": "Two?", "answer": "-1"}, "aime", "0 to 999"),
        ({"problem": "Two?", "answer": "two"}, "aime", "0 to 999"),
        ({"problem": "Two?"}, "aime", "no `answer`"),
        (["Two?"], "gsm8k", "not a record"),
        ({**MATH, "level": "hard"}, "math", "level"),
    ],
)
def test_a_bad_record_is_an_error_that_names_its_place_and_key(record, record_format, message):
    with pytest.raises(DataError, match=f"^a.jsonl, line 3 .*{message}"):
        parse_record(record, record_format, "a.jsonl, line 3")


def test_an_unknown_record_has_no_format():
    with pytest.raises(DataError, match="line 3 has no key `question`"):
        detect_format({"prompt": "Two?"}, "line 3")


@pytest.mark.parametrize(
    ("record", "mapping"),
    [
        ({"prompt": "Two?", "answer": "It is\n#### 2"}, "format: gsm8k, columns: {question: prompt}"),
        ({"prompt": "Two?", "completion": "#### 2"}, "format: gsm8k, columns: {question: prompt, answer: completion}"),
        ({"prompt": "Two?", "answer": "\\frac{4}{2}"}, "format: math, columns: {problem: prompt}"),
        ({"prompt": "Two?", "ground_truth": 2}, "format: math, columns: {problem: prompt, answer: ground_truth}"),
        (
            {"instruction": "Two?", "input": "", "output": "#### 2"},
            "format: gsm8k, columns: {question: instruction, answer: output}",
        ),
        ({"query": "Two?", "response": "So \\boxed{2}"}, "format: math, columns: {problem: query, solution: response}"),
    ],
)
def test_the_error_for_other_column_names_suggests_a_mapping(record, mapping):
    with pytest.raises(DataError, match="line 3 has no key `question`") as error:
        detect_format(record, "line 3")
    assert f"write its own names as `dataset: {{{mapping}, origin: ...}}`" in str(error.value)
    told = yaml.safe_load(mapping.replace(", columns", "\ncolumns"))
    renamed = {name: record[own] for name, own in told["columns"].items()}
    assert parse_record({**record, **renamed}, told["format"], "here").answer in ("2", "\\frac{4}{2}")


def test_a_chat_is_no_question():
    with pytest.raises(DataError, match=r"its `prompt` is a list, such as a chat: give the question as text"):
        detect_format({"prompt": [{"role": "user", "content": "Two?"}], "answer": 2})
    with pytest.raises(DataError, match=r"its `messages` is a list, such as a chat: .* in a column of its own"):
        detect_format({"id": 1, "messages": [{"role": "user", "content": "Two?"}]})
    with pytest.raises(DataError, match="line 3 has a list in `question`; give it as text"):
        parse_record({**GSM8K, "question": [{"role": "user", "content": "Two?"}]}, "gsm8k", "line 3")


def test_the_id_depends_on_the_question_alone():
    one, same, other = ({**GSM8K, "question": q} for q in ("Two and two?", " Two  and two?\n", "Two and three?"))
    ids = [parse_record(record, "gsm8k", "here").id for record in (one, {**same, "answer": "#### 5"}, other)]
    assert ids[0] == ids[1] != ids[2]
