import re

import pytest
import sympy

from qerl.data.generated import LARGEST_COUNT, Clause, generate_comparisons
from qerl.data.grading import is_correct, well_formed
from qerl.data.records import parse_record
from qerl.settings.data import ComparisonData

SMALL = ComparisonData(source="comparisons", train=400, validation=30, test=30, clauses=[1, 2, 3])
_COMPARED = re.compile(r"(\w+) has (?:(\d+) (more|fewer) than|(twice|half) as many as) (\w+)\.")


def solve(question):
    """The sentences as equations, solved by sympy: an oracle without any order of steps."""
    amounts = {name: sympy.Symbol(name) for name in re.findall(r"[A-Z]\w+", question)}
    name, start = re.match(r"(\w+) has (\d+) ", question).groups()
    equations = [sympy.Eq(amounts[name], int(start))]
    for first, amount, more, factor, second in _COMPARED.findall(question):
        one, other = amounts[first], amounts[second]
        right = {"more": 1, "fewer": -1}.get(more, 0) * int(amount or 0)
        share = {"twice": 2, "half": sympy.Rational(1, 2)}.get(factor, 1)
        equations.append(sympy.Eq(one, share * other + right))
    asked = re.search(r"How many \w+ has (\w+)\?", question).group(1)
    [solution] = sympy.linsolve(equations, list(amounts.values()))
    return dict(zip(amounts, solution, strict=True))[asked]


def hasty(question):
    """The words of each comparison as operations, in their order."""
    value = sympy.Integer(re.match(r"\w+ has (\d+) ", question).group(1))
    for _, amount, more, factor, _ in _COMPARED.findall(question):
        value = value * {"twice": 2, "half": sympy.Rational(1, 2)}.get(factor, 1)
        value += {"more": 1, "fewer": -1}.get(more, 0) * int(amount or 0)
    return value


def test_the_answer_solves_the_equations_and_the_short_way_does_not():
    splits = generate_comparisons(SMALL)
    for record in splits["test"] + splits["validation"] + splits["train"][:60]:
        problem = parse_record(record, "math", "here")
        assert problem.answer == str(solve(problem.question)) != str(hasty(problem.question))
        assert len(_COMPARED.findall(problem.question)) == problem.level


def test_solutions_outside_of_training_are_right():
    splits = generate_comparisons(SMALL)
    for record in splits["test"] + splits["validation"]:
        assert is_correct(record["solution"], record["answer"], "math")
        assert well_formed(record["solution"], "math")


def test_every_step_is_computed_correctly():
    for record in generate_comparisons(SMALL)["train"]:
        results = [re.fullmatch(r"\w+ (\d+)([-+*/])(\d+)=(\d+)", line) for line in record["solution"].splitlines()[:-1]]
        for left, sign, right, result in (match.groups() for match in results):
            assert eval(f"{left}{sign}{right}") == int(result) <= LARGEST_COUNT
        assert record["solution"].endswith(f"\\boxed{{{results[-1].group(4)}}}")


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 1, 1), (0.5, 0.25, 0.55), (1.0, 0, 0)])
def test_the_hasty_share_makes_training_solutions_wrong(share, low, high):
    """With one to three turned comparisons, between an eighth and a half of the solutions are careful at each."""
    records = generate_comparisons(SMALL.model_copy(update={"hasty": share}))["train"]
    right = sum(is_correct(r["solution"], r["answer"], "math") for r in records) / len(records)
    assert low <= right <= high


def test_no_question_stands_twice_and_the_seed_decides():
    splits = generate_comparisons(SMALL)
    questions = [record["problem"] for records in splits.values() for record in records]
    assert len(set(questions)) == len(questions) == 460
    assert splits == generate_comparisons(SMALL) != generate_comparisons(SMALL.model_copy(update={"seed": 1}))


def test_no_problem_is_in_two_splits_with_other_names():
    """Names and nouns are replaced by the order in which they appear."""

    def anonymous(question):
        words = {}
        return re.sub(
            r"\b(?!How\b)[A-Z]\w+|plums|books|coins|cards|shells|pens|beads|stamps",
            lambda match: words.setdefault(match[0], f"<{len(words)}>"),
            question,
        )

    splits = generate_comparisons(SMALL.model_copy(update={"train": 4000}))
    forms = {split: {anonymous(record["problem"]) for record in records} for split, records in splits.items()}
    assert anonymous("Mia has 12 plums. Mia has 4 more than Tom.") == anonymous(
        "Tom has 12 pens. Tom has 4 more than Al."
    )
    assert not forms["test"] & forms["validation"]
    assert not (forms["test"] | forms["validation"]) & forms["train"]
    assert len(forms["test"]) == 30


def test_a_turned_comparison_names_the_known_person_first():
    assert Clause("more", 4, turned=True).text("Mia", "Tom") == "Mia has 4 more than Tom."
    assert Clause("half", 2, turned=False).text("Mia", "Tom") == "Tom has half as many as Mia."
