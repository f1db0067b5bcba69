"""Graders: no text crashes or stalls them, and they judge numbers by exact arithmetic."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qerl.data import expressions
from qerl.data.grading import extract, is_correct, well_formed
from qerl.data.records import Problem
from qerl.rl.rewards import Answer, reward_parts, total
from qerl.settings.run import RewardSettings

FORMATS = ["gsm8k", "math", "aime"]
FORMS = ["native", "tags"]

fragments = st.sampled_from(
    [
        *("#### ", "\\boxed{", "{", "}", "\\frac", "^{", "9^{9^{9}}", "\\sqrt", "!", "_", "\\", "$", "\\(", "\\)"),
        *("<think>", "</think>", "<answer>", "</answer>", "٣", "３", "²", "½", "\0", "\ud800", "\u202e", "\u2212"),
        *("-", "+", ",", ".", "1", "18", "0", "9" * 400, " ", "\n", "x", "%", "\\text{", "\\infty", "e", "i", "nan"),
        *("\\begin{pmatrix}", "\\end{pmatrix}", "\\int_0^", "[", ")", "=", "<", "\\pm", "°", "\\%", "__import__"),
    ]
)
soup = st.lists(fragments, max_size=12).map("".join) | st.text(max_size=40)
placed = st.tuples(
    st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "<think></think><answer>${}$</answer>"]),
    soup,
).map(lambda parts: parts[0].replace("{{", "{").replace("}}", "}").replace("{}", parts[1], 1))


def verdicts(text, expected):
    return [is_correct(text, expected, f, form) for f in FORMATS for form in FORMS]


@given(text=placed)
@example(text="\\boxed{\0}")
@example(text="\\boxed{\ud800}")
@example(text="\\boxed{" + "9" * 400 + "!}")
@example(text="\\boxed{9^{9^{9}}}")
@example(text="#### " + "9" * 5000)
@example(text="\\boxed{" + "(" * 250 + ")" * 250 + "}")
def test_any_text_has_a_verdict_within_the_limits(text):
    expressions.equal("1", "1")  # the helper's start is no part of a verdict
    start = time.process_time()
    verdicts(text, "123456789")
    assert time.process_time() - start < 1  # of this process: the helper has its own limit
    for record_format in FORMATS:
        for form in FORMS:
            answer = extract(text, record_format, form)
            assert answer is not None or not well_formed(text, record_format, form)
            # What a text states is right where it is asked for, and a text that states nothing never is.
            assert is_correct(text, answer or "123456789", record_format, form) == (answer is not None)


@given(expected=soup, answer=soup)
@settings(max_examples=30)
def test_any_two_expressions_are_equal_or_not(expected, answer):
    expressions.equal(expected, answer)
    assert expressions.equal("\\frac{1}{2}", "0.5"), "the helper doesn't survive the pair"
    assert not expressions.equal("\\frac{1}{2}", "0.6")


fractions = st.builds(Fraction, st.integers(-60, 60), st.integers(1, 40))


def spellings(value: Fraction, factor: int):
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    return [
        f"\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}",
        f"{top}/{bottom}",
        f"\\frac{{{top * factor}}}{{{bottom * factor}}}",
        f"\\dfrac{{{top}}}{{{bottom}}}",
        f"{Decimal(top) / Decimal(bottom):f}" if 10**6 % bottom == 0 else f"\\tfrac{{{top}}}{{{bottom}}}",
    ]


@given(value=fractions, other=fractions, factor=st.integers(2, 9), which=st.integers(0, 5))
@example(value=Fraction(1, 2), other=Fraction(1, 3), factor=2, which=0)
@example(value=Fraction(-7, 3), other=Fraction(7, 3), factor=2, which=1)
@example(value=Fraction(3, 8), other=Fraction(376, 1000), factor=2, which=5)
@settings(max_examples=30)
def test_fractions_are_equal_as_in_exact_arithmetic(value, other, factor, which):
    expected = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert is_correct(f"\\boxed{{{spellings(value, factor)[which]}}}", expected, "math")
    assert is_correct(f"\\boxed{{{spellings(other, factor)[which]}}}", expected, "math") is (value == other)


@given(
    text=placed,
    tokens=st.integers(0, 4096),
    limit=st.integers(1, 4096),
    buffer=st.integers(0, 4095),
    weights=st.tuples(*[st.floats(-10, 10)] * 3),
)
def test_the_reward_is_the_weighted_sum_of_parts_within_their_bounds(text, tokens, limit, buffer, weights):
    chosen = RewardSettings(correct=weights[0], format=weights[1], overlong=abs(weights[2]), overlong_buffer=buffer)
    problem = Problem("0" * 16, "q", None, "123456789")
    parts = reward_parts(Answer(text, min(tokens, limit), limit), problem, "gsm8k", chosen)
    assert parts["correct"] in (0.0, 1.0)
    assert parts["format"] in (0.0, 1.0)
    assert -1 <= parts["overlong"] <= 0
    expected = weights[0] * parts["correct"] + weights[1] * parts["format"] + abs(weights[2]) * parts["overlong"]
    assert total(parts, chosen.weights) == pytest.approx(expected, abs=1e-9)
