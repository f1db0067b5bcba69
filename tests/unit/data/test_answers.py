import pytest

from qerl.data.answers import extract, gold, is_correct, well_formed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"),
        ("So 9*2=18\n#### 18.", "18"),
        ("#### 18.0", "18"),
        ("#### 1,800", "1800"),
        ("#### -3", "-3"),
        ("#### .5", "0.5"),
        ("#### 0018", "18"),
        ("#### 18\n#### 20", "18"),
        ("#### 1800", "1,800.00"),
    ],
)
def test_gsm8k_right(text, answer):
    assert is_correct(text, answer, "gsm8k")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "18",
        "#### ",
        "#### eighteen",
        "#### 1999",
        "#### 1",
        "#### 180",
        "#### -18",
        "#### 18.5",
        "### 18",
        "\\boxed{18}",
        "#### 20\n#### 18",
        "#### $18",
        "####18",
        "####\n18",
        "#### .\n#### 18",
        "#### 18.0.0",
    ],
)
def test_gsm8k_wrong(text):
    assert not is_correct(text, "18", "gsm8k")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac12"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("first \\boxed{3}, no: \\boxed{4}", "4"),
        ("\\boxed{ 4 }", "4"),
        ("\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}"),
        ("\\boxed{\\text{(B)}}", "\\text{(B)}"),
        ("\\boxed{1,000}", "1000"),
    ],
)
def test_math_right(text, answer):
    assert is_correct(text, answer, "math")


@pytest.mark.parametrize(
    "text", ["", "4", "\\boxed{}", "\\boxed{5}", "\\boxed{4", "\\boxed{4}, no: \\boxed{5}", "\\boxed{44}", "#### 4"]
)
def test_math_wrong(text):
    assert not is_correct(text, "4", "math")


@pytest.mark.parametrize("text", ["\\boxed{33}", "\\boxed{033}", "\\boxed{1} then \\boxed{ 33 }"])
def test_aime_right(text):
    assert is_correct(text, "33", "aime")


@pytest.mark.parametrize("text", ["33", "\\boxed{34}", "\\boxed{33.0}", "\\boxed{-33}", "\\boxed{1033}", "\\boxed{x}"])
def test_aime_wrong(text):
    assert not is_correct(text, "33", "aime")


@pytest.mark.parametrize(
    ("text", "record_format", "expected"),
    [
        ("9*2=18\n#### 18", "gsm8k", True),
        ("#### 18 \n", "gsm8k", True),
        ("#### 18.", "gsm8k", False),
        ("#### 18 apples", "gsm8k", False),
        ("#### 18\n#### 18", "gsm8k", False),
        ("#### x #### 18", "gsm8k", False),
        ("18", "gsm8k", False),
        ("So $\\boxed{\\frac{1}{2}}$.", "math", True),
        ("\\[\\boxed{5}\\]", "math", True),
        ("\\(\\boxed{5}\\).", "math", True),
        ("**\\boxed{5}**", "math", True),
        ("**$\\boxed{5}$.**", "math", True),
        ("\\[ x = \\boxed{5}. \\]", "math", True),
        ("\\[\\boxed{5}\\] minus seven", "math", False),
        ("\\boxed{I do not know}", "math", False),
        ("\\boxed{\\text{I do not know}}", "math", False),
        ("\\boxed{5 \\text{ is wrong}}", "math", False),
        ("\\boxed{\\text{Tuesday}}", "math", True),
        ("\\boxed{\\text{no solution}}", "math", True),
        ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "math", True),
        ("\\boxed{\\sin 2x + xyz}", "math", True),
        ("\\boxed{1} and \\boxed{1}", "math", False),
        ("\\boxed{1} apples", "math", False),
        ("\\boxed{1", "math", False),
        ("\\boxed{}", "math", False),
        ("\\boxed{12}", "aime", True),
        ("\\boxed{1200}", "aime", False),
        ("", "aime", False),
    ],
)
def test_well_formed(text, record_format, expected):
    assert well_formed(text, record_format) is expected


def test_extract_returns_the_answer_as_written():
    assert extract("#### 1,800.50 and more", "gsm8k") == "1,800.50"
    assert extract("\\boxed{a\\}b{c}}", "math") == "a\\}b{c}"
    assert extract("nothing", "math") is None


@pytest.mark.parametrize(("solution", "answer"), [("a\n#### 1,234", "1,234"), ("####18", "18"), ("#### 3/4", None)])
def test_the_answer_of_a_record(solution, answer):
    """Read more leniently than a completion's; but a fraction isn't its numerator."""
    assert gold(solution, "gsm8k") == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("our answer is $\\boxed 2$.", "2"),
        ("not \\boxed{3}, but $x = \\boxed 12$", "12"),
        ("\\boxed{3}, and $\\boxed x + 1$", "3"),
    ],
)
def test_the_answer_of_a_record_in_a_box_without_braces(solution, answer):
    """Two solutions of MATH's training problems have one; a completion's box needs its braces."""
    assert gold(solution, "math") == answer
    assert extract("$\\boxed 2$", "math") is None
