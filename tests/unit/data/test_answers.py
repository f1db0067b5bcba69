from decimal import Decimal

import pytest

from qerl.data.grading import extract, gold, is_correct, well_formed

# fmt: off
#: Well-formed and malformed completions of each format.
FORMS = {
    "gsm8k": (("9*2=18\n#### 18", "#### 18 \n"),
       ("#### 18.", "#### 18 apples", "#### 18\n#### 18", "#### x #### 18", "18")),
    "math": (("So $\\boxed{\\frac{1}{2}}$.", "\\[\\boxed{5}\\]", "\\(\\boxed{5}\\).", "**\\boxed{5}**",
        "**$\\boxed{5}$.**", "\\[ x = \\boxed{5}. \\]", "\\boxed{\\text{Tuesday}}", "\\boxed{\\text{no solution}}",
        "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\boxed{\\sin 2x + xyz}"),
       ("\\[\\boxed{5}\\] minus seven", "\\boxed{I do not know}", "\\boxed{\\text{I do not know}}",
        "\\boxed{5 \\text{ is wrong}}", "\\boxed{1} and \\boxed{1}", "\\boxed{1} apples", "\\boxed{1", "\\boxed{}")),
    "aime": (("\\boxed{12}",),
       ("\\boxed{1200}", "")),
}
# fmt: on


@pytest.mark.parametrize("record_format", FORMS)
def test_well_formed(record_format):
    for formed, texts in zip((True, False), FORMS[record_format], strict=True):
        for text in texts:
            assert well_formed(text, record_format) is formed, text


def test_extract_returns_the_answer_as_written():
    assert extract("#### 1,800.50 and more", "gsm8k") == "1,800.50"
    assert extract("\\boxed{a\\}b{c}}", "math") == "a\\}b{c}"
    assert extract("nothing", "math") is None


#: What may follow `####` in a record, and its number.
GOLD = {
    **{"1,234": "1234", "18": "18", "-3": "-3", "\u22123": "-3", "+3": "3", "0.5": "0.5", ".5": "0.5", "18.": "18"},
    **{"$5": "5", "-$5.50": "-5.5", "5 €": "5", "\\$1,234.50": "1234.5", "$18$": "18", "**18**": "18", "5%": "5"},
    **{"12 apples": "12", "5 \\text{ km/h}": "5", "18 dollars.": "18", "1,234,567": "1234567"},
    **{"\\boxed{7}": "7", " 18 \r": "18", "x = 18": "18"},
}

#: What has a number at its start that isn't the whole of it.
NO_GOLD = [
    *("1'000", "1\u2019000", "1 000", "1\u00a0000", "1\u202f000", "1_000", "1.000.000", "1.000,5", "12,34,567"),
    *("1{,}234", "1,5", "12,3", "1,2345", "1,23", "1234,567", "0,123", "18,", "1,234,5", "5 million", "5 thousand"),
    *("5M", "5k"),
    *("5 dozen", "5 percent", "5 per cent", "5%%", "5\u2030", "7\u00bd", "\u00bd", "7 1/2", "1\u20135", "1\u20145"),
    *("1-5",),
    *("1 to 5", "1~5", "1..5", "2\u20443", "3/4", "36/2", "5 \\times 10^3", "5\u00d710\u00b3", "5e3", "5 x 10"),
    *("5*2", "5\u00b2"),
    *("5^2", "5!", "5 or 6", "5, 6", "5; 6", "5 and 6", "5+", "5-", "5?", "5\u066b5", "5\u0663", "\u0663\u0664"),
    *("\uff15",),
    *("5\uff15", "1\uff0c000", "1\u066c000", "5\u200b", "0x12", "12:30", "5 hours 30 minutes", "5'6"),
    *("5 \\text{ million}",),
    *("5\\%0", "5\\frac{1}{2}", "\\sqrt{5}", "5 \\pm 1", "about 5", "five", "", "$", "5 m/s/s/s", "5 widgets"),
    *("5 (or 6)",),
]


@pytest.mark.parametrize(("stated", "number"), GOLD.items())
def test_the_answer_of_a_record_is_the_number_after_the_hashes(stated, number):
    answer = gold(f"So 4 and 5.\n#### {stated}\nThat is all.", "gsm8k")
    assert answer is not None
    assert Decimal(answer.replace(",", "")) == Decimal(number)
    assert is_correct(f"#### {number}", answer, "gsm8k")
    assert is_correct(f"<answer>{number}</answer>", answer, "gsm8k", "tags")


@pytest.mark.parametrize("stated", NO_GOLD)
def test_the_answer_of_a_record_is_never_a_part_of_a_number(stated):
    assert gold(f"So 4 and 5.\n#### {stated}", "gsm8k") is None


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        *(("####18", "18"), ("####\n18", "18"), ("#### Halve it\n36/2\n#### 18", "18")),
        *(("#### 1. Halve it\n36/2\n#### 18", None), ("#### 17\n#### 18", None), ("#### 18\n#### It is even", None)),
        ("<think>#### 17</think>\n#### 18", "18"),
    ],
)
def test_the_answer_of_a_record_stands_after_the_last_hashes(solution, answer):
    """lm-eval compares with it, and a completion's first number after hashes counts: two numbers contradict."""
    assert gold(solution, "gsm8k") == answer


def test_the_answer_of_a_record_has_the_units_of_its_data_set():
    assert gold("#### 5 widgets", "gsm8k", ("widgets",)) == "5"
    assert gold("#### 5 widgets", "gsm8k", ("gadgets",)) is None


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
