"""Formulas against Python's own parser and a count of OEIS, and the goals of countdown that they reach."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.data.grading import Goal, canonical, is_correct, leaves, parse_formula, solution_key, value, well_formed


def combinations(numbers):
    """Every formula that uses each of the given numbers once."""
    if len(numbers) == 1:
        yield numbers[0]
    for chosen in range(1, 2 ** len(numbers) - 1):
        left = [n for i, n in enumerate(numbers) if chosen >> i & 1]
        right = [n for i, n in enumerate(numbers) if not chosen >> i & 1]
        for a in combinations(left):
            for b in combinations(right):
                yield from ((sign, a, b) for sign in "+-*/")


@pytest.mark.parametrize(("operands", "count"), [(1, 1), (2, 6), (3, 68), (4, 1170)])
def test_there_are_as_many_distinct_formulas_as_oeis_counts(operands, count):
    """A140606: inequivalent expressions of n operands with + - * /."""
    assert len({canonical(formula) for formula in combinations([2, 3, 5, 7][:operands])}) == count


def python_value(text):
    """The value by Python's own parser, in fractions; None for a division by zero."""
    try:
        return eval(re.sub("([0-9]+)", r"Fraction(\1)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


TEXTS = st.recursive(
    st.integers(0, 30).map(str),
    lambda inner: st.builds(
        lambda left, sign, right, wrapped: f"({left}{sign}{right})" if wrapped else f"{left}{sign}{right}",
        inner,
        st.sampled_from(["+", "-", "*", "/", " + ", " / "]),
        inner,
        st.booleans(),
    ),
    max_leaves=6,
)


@given(TEXTS, TEXTS)
def test_the_value_is_that_of_python_and_equal_forms_have_equal_values(one, other):
    first, second = parse_formula(one), parse_formula(other)
    assert value(first) == python_value(one)
    assert list(leaves(first)) == [int(number) for number in re.findall("[0-9]+", one)]
    if canonical(first) == canonical(second):
        assert value(first) == value(second)
        assert sorted(leaves(first)) == sorted(leaves(second))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        *(("2*(8-3)", "(8-3)*2", True), ("1+2+3", "3+(2+1)", True), ("9-(4-1)", "1+9-4", True)),
        *(("8/(4/2)", "2*8/4", True), ("(1-2)*(3-4)", "(2-1)*(4-3)", True), ("5-(1-2)*3", "5+3*(2-1)", True)),
        *(("1-2", "2-1", False), ("2*8-2*3", "2*(8-3)", False), ("2+2", "2*2", False)),
    ],
)
def test_order_and_grouping_make_no_other_solution(one, other, same):
    assert (solution_key(one) == solution_key(other)) is same


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-3", "+3", "3-", "2 3", "(3", "3)", "()", "2**3", "2//3", "2(3)", "03", "1.5", "1e3", "2*3=6"),
        *("3\n+4", "3\t+4", "٣+4", "²+4", "3×4", "3\u22124", "a+1", "__import__('os')", "3;4", "[3]", "1_000"),
        *("1,000", "1234567", "1+" * 50 + "1", "(" * 2000, "(" * 49 + "1" + ")" * 52),
    ],
)
def test_other_texts_are_no_formulas(text):
    assert parse_formula(text) is None


def test_deep_parentheses_are_read():
    assert value(parse_formula("(" * 49 + "7" + ")" * 49)) == 7


# --- countdown

ALL, SOME = "20 = all of 3 4 8", "20 = some of 3 4 8 8"
#: Goals, and completions that reach them or don't.
REACHED = {
    ALL: ["#### (8-3)*4", "8-3=5\n5*4=20\n#### 4 * (8 - 3)", "<think>#### 1+1</think>#### (8-3)*4", "#### (8-3)*4 "],
    "9 = all of 1 1 3 3 3": ["#### (3-1/3)*3+1"],
    "24 = all of 1 3 4 6": ["#### 6/(1-3/4)"],
    SOME: ["#### 8+8+4", "#### 8*3-4"],
}
MISSED = {
    ALL: [
        *("#### 20", "#### 12+8", "#### 8+8+4", "#### 4*(8-3)+3-3", "#### (8-3)*4=20", "#### 4*8-4*3", "#### 8*4/3"),
        *("#### 3/(4-4)+8", "####(8-3)*4", "(8-3)*4", "\\boxed{(8-3)*4}", "#### 8*3+4\n#### (8-3)*4"),
        *("#### \n(8-3)*4", "#### (8-3)*4 or 8*3-4", "<think>#### (8-3)*4"),
    ],
    SOME: ["#### 4+4+8+4", "#### 8*3-4-4+4"],
}


@pytest.mark.parametrize(("table", "right"), [(REACHED, True), (MISSED, False)])
def test_a_formula_is_right_by_its_value_and_its_numbers(table, right):
    for goal, text in [(goal, text) for goal, texts in table.items() for text in texts]:
        assert is_correct(text, goal, "countdown") is right, text


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


@pytest.mark.parametrize("text", ["20", "20 = most of 3 4", "20 = all of", "-1 = all of 3", "20 = all of 3 4 "])
def test_other_goals_are_refused(text):
    with pytest.raises(ValueError, match="no goal"):
        Goal.read(text)
