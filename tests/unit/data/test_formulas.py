import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.data.grading import canonical, leaves, parse_formula, value


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


NUMBERS = st.integers(0, 30).map(str)
TEXTS = st.recursive(
    NUMBERS,
    lambda inner: st.builds(
        lambda left, sign, right, wrapped: f"({left}{sign}{right})" if wrapped else f"{left}{sign}{right}",
        inner,
        st.sampled_from(["+", "-", "*", "/", " + ", " / "]),
        inner,
        st.booleans(),
    ),
    max_leaves=6,
)


@given(TEXTS)
def test_the_value_is_that_of_python(text):
    formula = parse_formula(text)
    assert value(formula) == python_value(text)
    assert list(leaves(formula)) == [int(number) for number in re.findall("[0-9]+", text)]


@given(TEXTS, TEXTS)
def test_equal_forms_have_equal_values(one, other):
    first, second = parse_formula(one), parse_formula(other)
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
    assert (canonical(parse_formula(one)) == canonical(parse_formula(other))) is same


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-3", "+3", "3-", "2 3", "(3", "3)", "()", "2**3", "2//3", "2(3)", "03", "1.5", "1e3", "2*3=6"),
        *("3\n+4", "3\t+4", "٣+4", "²+4", "3×4", "3\u22124", "a+1", "__import__('os')", "3;4", "[3]", "1_000"),
        *("1,000", "1234567"),
        "1+" * 50 + "1",
        "(" * 2000,
        "(" * 49 + "1" + ")" * 52,
    ],
)
def test_other_texts_are_no_formulas(text):
    assert parse_formula(text) is None


def test_deep_parentheses_are_read():
    assert value(parse_formula("(" * 49 + "7" + ")" * 49)) == 7


def test_a_division_by_zero_has_no_value():
    assert value(parse_formula("3/(4-4)")) is None
    assert value(parse_formula("0*(1/0)")) is None
