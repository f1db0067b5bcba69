import re

import pytest

from qerl.data.generated import generate_arithmetic
from qerl.data.grading import extract, is_correct, well_formed
from qerl.data.records import detect_format, parse_record
from qerl.settings.data import Generated

SMALL = Generated(train=600, validation=50, test=50)
FORMATS = ["gsm8k", "math", "aime"]
_WORDS = {"doubles": ("*", 2), "triples": ("*", 3)}
_SIGNS = dict.fromkeys(["buys", "finds", "gets", "wins", "collects", "picks", "add", "plus"], "+")
_SIGNS |= dict.fromkeys(["loses", "sells", "gives", "uses", "drops", "breaks", "subtract", "minus"], "-")
_SIGNS |= dict.fromkeys(["times", "multiply by"], "*")
_OPERATION = re.compile(rf"(doubles|triples)|({'|'.join(_SIGNS)}) (\d+)|[a-e]=[a-e]([-+*])(\d+)")


def solve(question):
    """Read the question's words and compute: an oracle that shares no code with the generator."""
    value = int(re.search(r"\d+", question).group())
    operations = _OPERATION.findall(question)
    for word, verb, number, sign, operand in operations:
        sign, right = _WORDS[word] if word else (sign or _SIGNS[verb], int(operand or number))
        value = {"+": value + right, "-": value - right, "*": value * right}[sign]
    return value, len(operations)


@pytest.mark.parametrize("record_format", FORMATS)
def test_every_solution_is_right_and_in_its_format(record_format):
    for records in generate_arithmetic(record_format, SMALL).values():
        for record in records:
            assert detect_format(record) == record_format
            problem = parse_record(record, record_format, "here")
            value, steps = solve(problem.question)
            assert is_correct(problem.solution, str(value), record_format)
            assert well_formed(problem.solution, record_format)
            assert problem.answer == extract(problem.solution, record_format)
            assert problem.level in (None, steps)
            for left, sign, right, result in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", problem.solution):
                assert eval(f"{left}{sign}{right}") == int(result)


@pytest.mark.parametrize("record_format", FORMATS)
def test_splits_have_their_sizes_and_share_no_question(record_format):
    splits = generate_arithmetic(record_format, SMALL)
    questions = [parse_record(r, record_format, "").question for records in splits.values() for r in records]
    assert {split: len(records) for split, records in splits.items()} == {"train": 600, "validation": 50, "test": 50}
    assert len(set(questions)) == len(questions) == 700


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 0.43, 0.57), (1.0, 1, 1)])
def test_the_terse_share_holds_in_train_alone(share, low, high):
    splits = generate_arithmetic("gsm8k", SMALL.model_copy(update={"terse": share}))
    terse = {split: sum("=" not in r["answer"] for r in records) / len(records) for split, records in splits.items()}
    assert low <= terse["train"] <= high
    assert terse["validation"] == terse["test"] == 0


def test_the_seed_decides():
    again, other = generate_arithmetic("math", SMALL), generate_arithmetic("math", SMALL.model_copy(update={"seed": 1}))
    assert generate_arithmetic("math", SMALL) == again != other


def test_levels_1_to_5_occur_in_math_and_aime_answers_are_in_range():
    assert {r["level"] for r in generate_arithmetic("math", SMALL)["train"]} == {f"Level {n}" for n in range(1, 6)}
    assert all(0 <= int(r["answer"]) <= 999 for r in generate_arithmetic("aime", SMALL)["train"])


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("qerl.data.generated.LEVELS", {"math": (1,)})
    with pytest.raises(ValueError, match="ask for fewer"):
        generate_arithmetic("math", Generated(train=100_000))
