"""Generated problems against oracles that read their words alone and share no code with the generators."""

import re
from collections import Counter
from fractions import Fraction

import pytest
import sympy

from qerl.data.generated import LARGEST_COUNT
from qerl.data.generated import generate as generate_splits
from qerl.data.grading import extract, is_correct, well_formed
from qerl.data.records import DataError, detect_format, parse_record
from qerl.settings.base import parse
from qerl.settings.data import ComparisonData, CountdownData, DatasetSettings, Generated

ARITHMETIC = Generated(train=300, validation=50, test=50)
COMPARISONS = ComparisonData(source="comparisons", train=400, validation=30, test=30, clauses=[1, 2, 3])
COUNTDOWN = CountdownData(source="countdown", train=400, validation=30, test=30)


def generate(name, **changes):
    """The records of each split of a generator, with other settings than those above."""
    settings = {"comparisons": COMPARISONS, "countdown": COUNTDOWN}.get(name, ARITHMETIC)
    return generate_splits(settings.model_copy(update=changes), GENERATORS[name])


#: The name of each generator, with the format of its records.
GENERATORS = {**{name: name for name in ("gsm8k", "math", "aime", "countdown")}, "comparisons": "math"}

# --- oracles

_WORDS = {"doubles": ("*", 2), "triples": ("*", 3)}
_SIGNS = dict.fromkeys(["buys", "finds", "gets", "wins", "collects", "picks", "add", "plus"], "+")
_SIGNS |= dict.fromkeys(["loses", "sells", "gives", "uses", "drops", "breaks", "subtract", "minus"], "-")
_SIGNS |= dict.fromkeys(["times", "multiply by"], "*")
_OPERATION = re.compile(rf"(doubles|triples)|({'|'.join(_SIGNS)}) (\d+)|[a-e]=[a-e]([-+*])(\d+)")
_COMPARED = re.compile(r"(\w+) has (?:(\d+) (more|fewer) than|(twice|half) as many as) (\w+)\.")


def compute(question):
    """The result of an arithmetic problem, and its number of operations."""
    value = int(re.search(r"\d+", question).group())
    operations = _OPERATION.findall(question)
    for word, verb, number, sign, operand in operations:
        sign, right = _WORDS[word] if word else (sign or _SIGNS[verb], int(operand or number))
        value = {"+": value + right, "-": value - right, "*": value * right}[sign]
    return value, len(operations)


def solve(question):
    """The sentences of comparisons as equations, solved by sympy, without any order of steps."""
    amounts = {name: sympy.Symbol(name) for name in re.findall(r"[A-Z]\w+", question)}
    name, start = re.match(r"(\w+) has (\d+) ", question).groups()
    equations = [sympy.Eq(amounts[name], int(start))]
    for first, amount, more, factor, second in _COMPARED.findall(question):
        right = {"more": 1, "fewer": -1}.get(more, 0) * int(amount or 0)
        share = {"twice": 2, "half": sympy.Rational(1, 2)}.get(factor, 1)
        equations.append(sympy.Eq(amounts[first], share * amounts[second] + right))
    person = re.search(r"How many \w+ has (\w+)\?", question).group(1)
    [solution] = sympy.linsolve(equations, list(amounts.values()))
    return dict(zip(amounts, solution, strict=True))[person]


def in_order_of_words(question):
    """The words of each comparison as operations, in their order."""
    value = sympy.Integer(re.match(r"\w+ has (\d+) ", question).group(1))
    for _, amount, more, factor, _ in _COMPARED.findall(question):
        value = value * {"twice": 2, "half": sympy.Rational(1, 2)}.get(factor, 1)
        value += {"more": 1, "fewer": -1}.get(more, 0) * int(amount or 0)
    return value


def evaluated(formula):
    return eval(re.sub("([0-9]+)", r"Fraction(\1)", formula), {"Fraction": Fraction})


def core(name, record):
    """A problem without the order of its numbers, or without its names and nouns."""
    if name == "countdown":
        return tuple(sorted(record["numbers"])), record["target"]
    words = {}
    return re.sub(
        r"\b(?!How\b)[A-Z]\w+|plums|books|coins|cards|shells|pens|beads|stamps",
        lambda match: words.setdefault(match[0], f"<{len(words)}>"),
        record["problem"],
    )


# --- every generator


@pytest.mark.parametrize(("name", "record_format"), GENERATORS.items())
def test_splits_have_their_sizes_no_question_stands_twice_and_the_seed_decides(name, record_format):
    splits = generate(name)
    problems = {s: [parse_record(r, record_format, "here") for r in records] for s, records in splits.items()}
    assert {split: len(records) for split, records in splits.items()} == {
        "train": 300 if name in ("gsm8k", "math", "aime") else 400,
        **dict.fromkeys(("validation", "test"), 50 if name in ("gsm8k", "math", "aime") else 30),
    }
    assert max(Counter(p.question for each in problems.values() for p in each).values()) == 1
    assert splits == generate(name) != generate(name, seed=1)
    for problem in problems["test"] + problems["validation"]:
        assert is_correct(problem.solution, problem.answer, record_format)
        assert well_formed(problem.solution, record_format)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_step_is_computed_correctly(name):
    most = {"comparisons": LARGEST_COUNT, "countdown": COUNTDOWN.largest_target}.get(name, 50)
    for record in generate(name)["train"]:
        solution = record.get("solution") or record["answer"]
        steps = re.findall(r"(\d+[-+*/]\d+)=(\d+)", solution)
        assert all(evaluated(step) == int(result) <= most for step, result in steps)
        assert not steps or evaluated(extract(solution, GENERATORS[name])) == int(steps[-1][1])


@pytest.mark.parametrize(
    ("name", "key", "share", "low", "high"),
    [
        *(("gsm8k", "terse", 0.0, 1, 1), ("gsm8k", "terse", 0.5, 0.43, 0.57), ("gsm8k", "terse", 1.0, 0, 0)),
        # With one to three turned comparisons, an eighth to a half of the solutions are careful at each.
        *(("comparisons", "hasty", 0.0, 1, 1), ("comparisons", "hasty", 0.5, 0.25, 0.55)),
        *(("comparisons", "hasty", 1.0, 0, 0), ("countdown", "missed", 0.0, 0.95, 1)),
        *(("countdown", "missed", 0.75, 0.2, 0.3), ("countdown", "missed", 1.0, 0, 0.05)),
    ],
)
def test_the_share_of_flawed_solutions_holds_in_training_alone(name, key, share, low, high):
    def share_of_good(records):
        problems = [parse_record(record, GENERATORS[name], "here") for record in records]
        if key == "terse":
            return sum("=" in problem.solution for problem in problems) / len(problems)
        return sum(is_correct(p.solution, p.answer, GENERATORS[name]) for p in problems) / len(problems)

    splits = generate(name, **{key: share}, train=600 if key == "terse" else 1000)
    assert low <= share_of_good(splits["train"]) <= high
    assert share_of_good(splits["test"]) == share_of_good(splits["validation"]) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("comparisons", {"train": 4000}),
        # The study's own numbers, with which 57 % of the test problems once were training problems in another order.
        ("countdown", {"numbers": [3, 4], "largest": 20, "train": 8000, "validation": 64, "test": 128}),
    ],
)
def test_no_problem_is_in_two_splits_in_another_guise(name, changes):
    splits = {split: [core(name, r) for r in records] for split, records in generate(name, **changes).items()}
    held_out = Counter(splits["test"] + splits["validation"])
    assert max(held_out.values()) == 1
    assert not held_out.keys() & set(splits["train"])


@pytest.mark.parametrize(
    ("name", "changes"), [("math", {"train": 100_000}), ("countdown", {"numbers": [2], "largest_target": 2})]
)
def test_more_problems_than_there_are_is_an_error(name, changes, monkeypatch):
    monkeypatch.setattr("qerl.data.generated.LEVELS", {"math": (1,)})
    with pytest.raises(DataError, match="no more problems to generate; ask for fewer"):
        generate(name, **changes)


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


# --- each generator's answers


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("record_format", ["gsm8k", "math", "aime"])
def test_arithmetic_has_the_value_of_its_words(record_format, seed):
    for record in (record for records in generate(record_format, seed=seed).values() for record in records):
        assert detect_format(record) == record_format
        problem = parse_record(record, record_format, "here")
        value, steps = compute(problem.question)
        assert problem.answer == extract(problem.solution, record_format) == str(value)
        assert problem.level in (None, steps)
        assert 0 <= value <= 999


def test_the_answer_of_comparisons_solves_the_equations_and_the_short_way_does_not():
    splits = generate("comparisons")
    for record in splits["test"] + splits["validation"] + splits["train"][:60]:
        problem = parse_record(record, "math", "here")
        assert problem.answer == str(solve(problem.question)) != str(in_order_of_words(problem.question))
        assert len(_COMPARED.findall(problem.question)) == problem.level


@pytest.mark.parametrize("use", ["all", "some"])
def test_the_formula_of_countdown_has_the_target_and_the_numbers(use):
    splits = generate("countdown", use=use)
    for record in splits["test"] + splits["validation"]:
        formula = record["solution"].rpartition("#### ")[2]
        numbers, used = Counter(record["numbers"]), Counter(map(int, re.findall("[0-9]+", formula)))
        assert evaluated(formula) == record["target"]
        assert used == numbers or (use == "some" and used <= numbers)
    assert all(extract(record["solution"], "countdown") for record in splits["train"])
