"""The problems that records state, mistakes in records, and answers in a notation that no completion uses."""

from decimal import Decimal

import numpy as np
import pytest

from qerl.data.grading import Goal, is_correct
from qerl.data.records import DataError, detect_format, parse_record, warn_of_notation

GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
MATH = {"problem": "Half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 3"}
MATH500 = {**MATH, "answer": "\\frac{1}{2}", "subject": "Algebra", "unique_id": "x", "level": 2}
AIME = {"id": 60, "problem": "Count them.", "solution": "So \\boxed{033}.", "answer": "033", "year": "2024"}
COUNTDOWN = {"numbers": np.array([3, 4, 8]), "target": np.int64(20)}
CHAT = [{"role": "user", "content": "Two?"}]


@pytest.mark.parametrize(
    ("record", "record_format", "answer", "level"),
    [
        (GSM8K, "gsm8k", "4", None),
        ({**GSM8K, "answer": "#### 1,200"}, "gsm8k", "1,200", None),
        ({**GSM8K, "answer": "#### -12.50 dollars.\n2 lines"}, "gsm8k", "-12.50", None),
        (MATH, "math", "\\frac{1}{2}", 3),
        (MATH500, "math", "\\frac{1}{2}", 2),
        *(({**MATH, "level": gap}, "math", "\\frac{1}{2}", None) for gap in ("Level ?", float("nan"), None, " ")),
        ({**MATH, "level": 3.0}, "math", "\\frac{1}{2}", 3),
        ({**MATH, "answer": float("nan")}, "math", "\\frac{1}{2}", 3),
        (AIME, "aime", "33", None),
        ({"Problem": "Count.", "Answer": 204}, "aime", "204", None),
        ({"problem": "Count.", "answer": 0}, "aime", "0", None),
        (COUNTDOWN, "countdown", "20 = all of 3 4 8", None),
    ],
)
def test_each_format_is_detected_and_parsed(record, record_format, answer, level):
    assert detect_format(record) == record_format
    problem = parse_record(record, record_format, "here")
    assert (problem.answer, problem.level) == (answer, level)
    questions = (record.get(name) for name in ("question", "problem", "Problem"))
    assert problem.question == next(filter(None, questions), "Use all of 3, 4, 8 to make 20.")
    if record_format == "countdown":
        assert Goal.read(problem.answer) == Goal(20, (3, 4, 8))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *(("\\frac{1}{2}", "\\frac{1}{2}"), (0.0, "0.0"), (" -1 ", "-1"), (1e-05, "0.00001"), (1e16, f"1{'0' * 16}")),
        *((-1.5e-07, "-0.00000015"), (np.float32(1e-05), "0.00001"), (Decimal("1E+2"), "100")),
    ],
)
def test_a_math_problem_may_have_an_answer_alone_and_a_number_has_no_exponent(answer, text):
    problem = parse_record({"problem": "Which?", "answer": answer}, "math", "here")
    assert (problem.answer, problem.solution) == (text, None)
    assert is_correct(f"\\boxed{{{text}}}", problem.answer, "math")


#: Answers of gsm8k that aren't one number.
NO_NUMBERS = ("11/2", "1,000/3", "12:30", "2e10", "10 000", "3 1/2", "3.5.2", "1.000,5", "10-12", "2 x 3")
NOT_WHOLE = [
    *({"numbers": "3 4 8"}, {"numbers": []}, {"numbers": None}, {"numbers": [3, -4]}, {"numbers": [3, 4.5]}),
    *({"numbers": [3, True]}, {"target": "20"}, {"target": -20}, {"target": None}, {"use": "most"}),
]


@pytest.mark.parametrize(
    ("record", "record_format", "message"),
    [
        ({"question": "Two?"}, "gsm8k", "no `answer`"),
        ({"question": "Two?", "answer": None}, "gsm8k", "an empty `answer`"),
        ({"question": "2?", "answer": "So\n#### 5 million"}, "gsm8k", "no answer: .*`units` .* in '.*#### 5 million'"),
        *(
            ({"question": "Two?", "answer": f"So #### {answer}"}, "gsm8k", "states no answer.*one number.*format: math")
            for answer in NO_NUMBERS
        ),
        ({"answer": "#### 2"}, "gsm8k", "no `question`"),
        ({**GSM8K, "question": CHAT}, "gsm8k", "a list in `question`; give it as text"),
        ({"problem": "Two?", "solution": "It is 2."}, "math", "boxed"),
        ({"problem": "Two?", "answer": None}, "math", "neither `answer` nor `solution`; .*: problem, answer"),
        ({"problem": "Two?", "answer": ["2", "3"]}, "math", "list in `answer`"),
        ({"problem": "Two?", "answer": {"value": "2"}}, "math", "dict in `answer`"),
        ({"problem": "Two?", "answer": "One and one.\n#### 2"}, "math", "set `format: gsm8k`"),
        *(({"problem": "Two?", "answer": answer}, "aime", "0 to 999") for answer in ("1000", "-1", "two")),
        (["Two?"], "gsm8k", "not a record"),
        *(({**MATH, "level": level}, "math", "level") for level in ("hard", 2.5)),
        *(({"numbers": [3, 4, 8], "target": 20, **changes}, "countdown", "has `numbers`") for changes in NOT_WHOLE),
    ],
)
def test_a_bad_record_is_an_error_that_names_its_place_and_key(record, record_format, message):
    with pytest.raises(DataError, match=f"^a.jsonl, line 3 .*{message}"):
        parse_record(record, record_format, "a.jsonl, line 3")


def test_the_error_for_other_column_names_says_how_to_name_them():
    with pytest.raises(DataError, match=r"^line 3 has no key `question`.* are text, label; .*{problem: NAME"):
        detect_format({"text": "Two?", "label": 2}, "line 3")


def test_the_id_depends_on_the_question_alone():
    one, same, other = ({**GSM8K, "question": q} for q in ("Two and two?", " Two  and two?\n", "Two and three?"))
    ids = [parse_record(record, "gsm8k", "here").id for record in (one, {**same, "answer": "#### 5"}, other)]
    assert ids[0] == ids[1] != ids[2]


# --- notation

UNUSUAL = [
    *("1e3", "1.5e-3", "√2", "3√(x+1)", "x**2", "x**10+1", "٣٤", "３４", "½", "7½", "x²", "∞", "pi", "1 000"),
    *("5 million", "5 \\text{ million}", "sqrt(2)"),
]
USUAL = [
    *("1000", "\\frac{1}{2}", "1/2", "\\sqrt{2}", "x^2+2x+1", "2\\pi", "(1, 2]", "\\text{no}", "cat", "2025-01-05"),
    *("-0.5", "50\\%", "1,000", "x = 5", "\\{1,2\\}", "5\\text{ cm}", "ab", "3 \\times 4", "\u22125", "\u00e9t\u00e9"),
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
]


@pytest.mark.parametrize(
    ("answers", "form", "count", "quotes"),
    [
        *(([*USUAL, answer], "native", 1, repr(answer)) for answer in UNUSUAL),
        # Wrong in its own box.
        *((["2", answer], "native", 1, repr(answer[:40])) for answer in ("x^{2", "\\frac{1}{2", "9" * 300 + "{")),
        (["1e3", "2", "1e3", "√2", "x**2", "٣٤"], "native", 5, "'1e3', '√2', 'x**2'"),
        *((USUAL, form, 0, "") for form in ("native", "tags")),
    ],
)
def test_answers_that_no_usual_completion_equals_are_a_warning(caplog, answers, form, count, quotes):
    problems = [parse_record({"problem": "Which?", "answer": answer}, "math", "here") for answer in answers]
    warn_of_notation("train", problems, "math", form)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(count)
    for message in messages:
        assert message.startswith(f"split train: the answers of {count} problems are in a notation")
        assert message.endswith(f": {quotes}")
