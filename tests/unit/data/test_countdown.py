import re
from fractions import Fraction

import numpy as np
import pytest

from qerl.data.generated import generate_countdown
from qerl.data.grading import Goal, extract, is_correct, solution_key, well_formed
from qerl.data.records import DataError, detect_format, parse_record
from qerl.settings.base import parse
from qerl.settings.data import CountdownData, DatasetSettings

SMALL = CountdownData(source="countdown", train=400, validation=30, test=30)
ALL, SOME = "20 = all of 3 4 8", "20 = some of 3 4 8 8"


@pytest.mark.parametrize(
    ("goal", "text", "right"),
    [
        (ALL, "#### (8-3)*4", True),
        (ALL, "8-3=5\n5*4=20\n#### 4 * (8 - 3)", True),
        (ALL, "<think>#### 1+1</think>#### (8-3)*4", True),
        (ALL, "#### (8-3)*4 ", True),
        ("9 = all of 1 1 3 3 3", "#### (3-1/3)*3+1", True),
        ("24 = all of 1 3 4 6", "#### 6/(1-3/4)", True),
        (SOME, "#### 8+8+4", True),
        (SOME, "#### 8*3-4", True),
        (ALL, "#### 20", False),
        (ALL, "#### 12+8", False),
        (ALL, "#### 8+8+4", False),
        (ALL, "#### 4*(8-3)+3-3", False),
        (SOME, "#### 4+4+8+4", False),
        (SOME, "#### 8*3-4-4+4", False),
        (ALL, "#### (8-3)*4=20", False),
        (ALL, "#### 4*8-4*3", False),
        (ALL, "#### 8*4/3", False),
        (ALL, "#### 3/(4-4)+8", False),
        (ALL, "####(8-3)*4", False),
        (ALL, "(8-3)*4", False),
        (ALL, "\\boxed{(8-3)*4}", False),
        (ALL, "#### 8*3+4\n#### (8-3)*4", False),
        (ALL, "#### \n(8-3)*4", False),
        (ALL, "#### (8-3)*4 or 8*3-4", False),
        (ALL, "<think>#### (8-3)*4", False),
    ],
)
def test_a_formula_is_right_by_its_value_and_its_numbers(goal, text, right):
    assert is_correct(text, goal, "countdown") is right


@pytest.mark.parametrize(
    ("answer", "right", "formed"),
    [("(8-3)*4", True, True), (" 4*(8-3)\n", True, True), ("8+3", False, True), ("\\boxed{(8-3)*4}", False, False)],
)
def test_tags_hold_the_formula_alone(answer, right, formed):
    text = f"<think>well</think><answer>{answer}</answer>"
    assert is_correct(text, ALL, "countdown", "tags") is right
    assert well_formed(text, "countdown", "tags") is formed


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        *(("#### 1+1", True), ("8-3=5\n#### 1+1\n", True), ("#### 1+1\nwell", False), ("#### 1+1\n#### 1+1", False)),
        ("#### one", False),
    ],
)
def test_one_formula_stands_at_the_end(text, formed):
    assert well_formed(text, "countdown") is formed


def test_equal_solutions_have_equal_keys():
    assert solution_key("(8-3)*4") == solution_key("4*(8-3)") != solution_key("8*3-4")


@pytest.mark.parametrize("text", ["20", "20 = most of 3 4", "20 = all of", "-1 = all of 3", "20 = all of 3 4 "])
def test_other_goals_are_refused(text):
    with pytest.raises(ValueError, match="no goal"):
        Goal.read(text)


# --- records


def test_a_record_states_a_goal():
    record = {"numbers": np.array([3, 4, 8]), "target": np.int64(20)}
    problem = parse_record(record, detect_format(record), "here")
    assert (problem.question, problem.answer) == ("Use all of 3, 4, 8 to make 20.", ALL)
    assert Goal.read(problem.answer) == Goal(20, (3, 4, 8))


@pytest.mark.parametrize(
    "changes",
    [
        *({"numbers": "3 4 8"}, {"numbers": []}, {"numbers": None}, {"numbers": [3, -4]}, {"numbers": [3, 4.5]}),
        *({"numbers": [3, True]}, {"target": "20"}, {"target": -20}, {"target": None}, {"use": "most"}),
    ],
)
def test_another_record_is_an_error_that_names_the_place(changes):
    with pytest.raises(DataError, match="line 7"):
        parse_record({"numbers": [3, 4, 8], "target": 20, **changes}, "countdown", "line 7")


# --- generated problems


def evaluated(formula):
    return eval(re.sub("([0-9]+)", r"Fraction(\1)", formula), {"Fraction": Fraction})


@pytest.mark.parametrize("use", ["all", "some"])
def test_every_problem_outside_of_training_has_its_solution(use):
    splits = generate_countdown(SMALL.model_copy(update={"use": use}))
    for record in splits["test"] + splits["validation"]:
        problem = parse_record(record, "countdown", "here")
        used = sorted(map(int, re.findall("[0-9]+", problem.solution.rpartition("####")[2])))
        assert evaluated(problem.solution.rpartition("#### ")[2]) == record["target"]
        assert used == sorted(record["numbers"]) or (use == "some" and set(used) <= set(record["numbers"]))
        assert is_correct(problem.solution, problem.answer, "countdown")
        assert well_formed(problem.solution, "countdown")


def test_every_step_is_computed_correctly():
    for record in generate_countdown(SMALL)["train"]:
        *steps, final = record["solution"].splitlines()
        for step in steps:
            left, right = step.split("=")
            assert evaluated(left) == int(right) <= SMALL.largest_target
        assert evaluated(final.removeprefix("#### ")) == int(steps[-1].split("=")[1])


@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_the_share_of_misses_holds_in_training_alone(share):
    splits = generate_countdown(SMALL.model_copy(update={"missed": share, "train": 1000}))
    problems = [parse_record(record, "countdown", "here") for record in splits["train"]]
    missed = sum(not is_correct(p.solution, p.answer, "countdown") for p in problems) / len(problems)
    assert missed == pytest.approx(share, abs=0.05)
    assert all(extract(p.solution, "countdown") for p in problems)


def test_no_question_stands_twice_and_the_seed_decides():
    splits = generate_countdown(SMALL)
    questions = [parse_record(r, "countdown", "").question for records in splits.values() for r in records]
    assert len(set(questions)) == len(questions) == 460
    assert splits == generate_countdown(SMALL) != generate_countdown(SMALL.model_copy(update={"seed": 1}))


def test_no_problem_is_in_two_splits_in_another_order():
    """On the study's own numbers, where 57 % of the test problems once were training problems in another order."""
    study = {"numbers": [3, 4], "largest": 20, "train": 8000, "validation": 64, "test": 128}
    splits = generate_countdown(CountdownData(source="countdown", **study))
    cores = {split: [(tuple(sorted(r["numbers"])), r["target"]) for r in records] for split, records in splits.items()}
    for one, other in (("test", "validation"), ("test", "train"), ("validation", "train")):
        assert not set(cores[one]) & set(cores[other])
    for split in ("test", "validation"):
        assert len(set(cores[split])) == len(cores[split])


def test_too_many_problems_are_an_error():
    with pytest.raises(DataError, match="no more problems"):
        generate_countdown(SMALL.model_copy(update={"numbers": [2], "largest": 2, "largest_target": 2}))


@pytest.mark.parametrize(
    ("record_format", "source", "message"),
    [
        ("gsm8k", "countdown", "format: countdown"),
        ("gsm8k", "comparisons", "format: math"),
        ("countdown", "generated", "origin.source=countdown"),
    ],
)
def test_a_generator_has_its_format(record_format, source, message):
    with pytest.raises(ValueError, match=message):
        parse(DatasetSettings, {"format": record_format, "origin": {"source": source}}, "")
