"""Answers made to mislead a grader, with the verdict that a careful reader gives, and inputs made to stall it."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl.data import expressions
from qerl.data.answers import extract, is_correct, well_formed


def tags(answer, thought="well"):
    return f"<think>{thought}</think><answer>{answer}</answer>"


#: format, expected answer, completion, verdict.
NATIVE = [
    # units, currency, percent: after the number they don't matter, before it strict match fails, as in lm-eval
    ("gsm8k", "18", "#### 18 apples", True),
    ("gsm8k", "18", "#### 18%", True),
    ("gsm8k", "18", "#### $18", False),
    ("gsm8k", "1800", "#### 1,800", True),
    ("gsm8k", "180", "#### 1,80", True),
    ("gsm8k", "5", "#### +5", False),
    ("gsm8k", "-5", "#### -5", True),
    ("gsm8k", "-5", "#### \u22125", False),
    ("gsm8k", "5", "#### -5", False),
    ("gsm8k", "0.5", "#### .5", True),
    ("gsm8k", "5", "#### 5.", True),
    ("gsm8k", "18", "#### 18.0", True),
    ("gsm8k", "18", "#### 18.0000001", False),
    ("gsm8k", "18", "#### 17.999999", False),
    ("gsm8k", "18", "<think>#### 18</think> I don't know", False),
    ("gsm8k", "18", "<think>#### 20</think>#### 18", True),
    ("gsm8k", "18", "<think>#### 18", False),
    ("gsm8k", "18", tags("18"), False),
    ("math", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", True),
    ("math", "\\frac{1}{2}", "\\boxed{1/2}", True),
    ("math", "\\frac{1}{2}", "\\boxed{.5}", True),
    ("math", "\\frac{3}{2}", "\\boxed{1\\frac{1}{2}}", True),
    ("math", "\\frac{1}{3}", "\\boxed{0.33}", False),
    ("math", "-\\frac{1}{2}", "\\boxed{\\frac{-1}{2}}", True),
    ("math", "-5", "\\boxed{\u22125}", True),
    ("math", "5", "\\boxed{+5}", True),
    ("math", "5", "\\boxed{5.}", True),
    ("math", "5", "\\boxed{-5}", False),
    ("math", "1000", "\\boxed{1{,}000}", True),
    ("math", "1000", "\\boxed{1,000.0}", True),
    ("math", "12", "\\boxed{1,2}", False),
    ("math", "1,2", "\\boxed{2,1}", True),
    ("math", "50\\%", "\\boxed{50\\%}", True),
    ("math", "10", "\\boxed{10\\%}", False),
    ("math", "5", "\\boxed{5\\text{ cm}}", True),
    ("math", "5", "\\boxed{x=5}", True),
    ("math", "5", "\\boxed{5 \\text{ or } 6}", False),
    ("math", "\\text{Tuesday}", "\\boxed{Tuesday}", True),
    ("math", "x", "\\boxed{y}", False),
    ("math", "\\{1,2\\}", "\\boxed{\\{1,2\\}}", True),
    ("math", "4", "\\boxed{{4}}", True),
    ("math", "4", "\\boxed{5}, no: \\boxed{4}", True),
    ("math", "4", "\\boxed{4}, no: \\boxed{5}", False),
    ("math", "4", "\\boxed{4}, no: \\boxed{5", False),
    ("math", "4", "<think>\\boxed{4}</think> so 4", False),
    ("math", "4", "4", False),
    ("aime", "33", "\\boxed{033}", True),
    ("aime", "33", "\\boxed{33.0}", False),
    ("aime", "33", "\\boxed{33 \\text{ ways}}", False),
    ("aime", "33", "\\boxed{30+3}", False),
    ("aime", "33", "<think>\\boxed{33}</think>", False),
    *[(f, "18", text, False) for f in ("gsm8k", "math", "aime") for text in ("", " \n\t ", "####", "\\boxed{}")],
]

TAGGED = [
    ("gsm8k", "18", tags("18"), True),
    ("gsm8k", "18", tags("\n 18 \n"), True),
    ("gsm8k", "18", tags("18 apples"), True),
    ("gsm8k", "18", tags("18 km/h."), True),
    ("gsm8k", "18", tags("18%"), True),
    ("gsm8k", "18", tags("$18"), True),
    ("gsm8k", "18", tags("18 €"), True),
    ("gsm8k", "-18", tags("-$18.00"), True),
    ("gsm8k", "1800", tags("$1,800.00"), True),
    ("gsm8k", "18", tags("+18"), True),
    ("gsm8k", "-18", tags("\u221218"), True),
    ("gsm8k", "18", tags("-18"), False),
    ("gsm8k", "0.5", tags(".5"), True),
    ("gsm8k", "18", tags("18."), True),
    ("gsm8k", "18", tags("$18$"), True),
    ("gsm8k", "18", tags("\\(18\\)"), True),
    ("gsm8k", "18", tags("$\\boxed{18}$"), True),
    ("gsm8k", "18", tags("#### 18"), False),
    ("gsm8k", "18", tags("18 or 20"), False),
    ("gsm8k", "18", tags("18, 20"), False),
    ("gsm8k", "18", tags("18 20"), False),
    ("gsm8k", "18", tags("9*2"), False),
    ("gsm8k", "18", tags("18/1"), False),
    ("gsm8k", "18", tags("18^1"), False),
    ("gsm8k", "3", tags("3!"), False),
    ("gsm8k", "18", tags("9*2=18"), False),
    ("gsm8k", "18", tags("The answer is 18"), False),
    ("gsm8k", "18", tags("eighteen"), False),
    ("gsm8k", "18", tags("1.8e1"), False),
    ("gsm8k", "18", tags("1999"), False),
    ("gsm8k", "18", tags(""), False),
    ("gsm8k", "18", tags(" \n "), False),
    ("gsm8k", "18", "18", False),
    ("gsm8k", "18", "#### 18", False),
    # where the answer stands
    ("gsm8k", "18", "<answer>18</answer>", True),
    ("gsm8k", "18", "so</think><answer>18</answer>", True),
    ("gsm8k", "18", "<think><answer>18</answer></think>", False),
    ("gsm8k", "18", "<think><answer>18</answer></think><answer>20</answer>", False),
    ("gsm8k", "18", "<think><answer>20</answer></think><answer>18</answer>", True),
    ("gsm8k", "18", "<think>a<think>b</think><answer>18</answer></think>", False),
    ("gsm8k", "18", "<think>cut off <answer>18</answer>", False),
    ("gsm8k", "18", "<answer>18</answer><think>", True),
    ("gsm8k", "18", "<answer>18</answer></think>", False),
    ("gsm8k", "18", "<answer>20</answer><answer>18</answer>", True),
    ("gsm8k", "18", "<answer>18</answer><answer>20</answer>", False),
    ("gsm8k", "18", "<answer>18</answer><answer>20", False),
    ("gsm8k", "18", "<answer>18</answer><answer>", False),
    ("gsm8k", "18", "<answer>18", False),
    ("gsm8k", "18", "18</answer>", False),
    ("gsm8k", "18", "</answer>18<answer>", False),
    ("gsm8k", "18", "<answer><answer>18</answer></answer>", True),
    ("gsm8k", "18", "<answer>20<answer>18</answer></answer>", True),
    ("gsm8k", "18", "<ANSWER>18</ANSWER>", False),
    ("gsm8k", "18", "<answer >18</answer>", False),
    ("gsm8k", "18", "<answer>18</Answer>", False),
    ("math", "\\frac{1}{2}", tags("1/2"), True),
    ("math", "\\frac{1}{2}", tags("\\frac12"), True),
    ("math", "\\frac{1}{2}", tags("$\\frac{1}{2}$"), True),
    ("math", "\\frac{1}{2}", tags("$$\\frac{1}{2}$$"), True),
    ("math", "\\frac{1}{2}", tags("\\[\\frac{1}{2}\\]"), True),
    ("math", "\\frac{1}{2}", tags("\\boxed{\\frac{1}{2}}"), True),
    ("math", "\\frac{1}{2}", tags("It is $\\boxed{\\frac{1}{2}}$."), True),
    ("math", "\\frac{1}{2}", tags("\\boxed{\\frac{1}{2}"), False),
    ("math", "\\frac{1}{2}", tags("$\\frac{1}{2}$ or $\\frac{1}{3}$"), False),
    ("math", "18", tags("18.0"), True),
    ("math", "18", tags("20", thought="\\boxed{18}"), False),
    ("aime", "33", tags("033"), True),
    ("aime", "33", tags("33 ways"), True),
    ("aime", "33", tags("$\\boxed{33}$"), True),
    ("aime", "33", tags("-33"), False),
    ("aime", "33", tags("33.0"), False),
    ("aime", "33", tags("1033"), False),
]


@pytest.mark.parametrize(("record_format", "expected", "text", "verdict"), NATIVE)
def test_native_verdicts(record_format, expected, text, verdict):
    assert is_correct(text, expected, record_format, "native") is verdict


@pytest.mark.parametrize(("record_format", "expected", "text", "verdict"), TAGGED)
def test_tagged_verdicts(record_format, expected, text, verdict):
    assert is_correct(text, expected, record_format, "tags") is verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tags("18"), True),
        (" \n<think>a\nb</think>\n\n<answer>18</answer>\n", True),
        (tags("18", thought=""), True),
        ("<answer>18</answer>", False),
        ("<think></think>18", False),
        ("well</think><answer>18</answer>", False),
        ("<answer>18</answer><think></think>", False),
        (f"So: {tags('18')}", False),
        (f"{tags('18')} apples", False),
        ("<think></think> so <answer>18</answer>", False),
        (tags("18") + tags("18"), False),
        (tags("18") + "<answer>18</answer>", False),
        (tags("<answer>18</answer>"), False),
        (tags("18", thought="an <answer> is due"), False),
        (tags("18", thought="<think>"), False),
        ("<Think></Think><Answer>18</Answer>", False),
        (tags("eighteen"), False),
        (tags(""), False),
        ("", False),
        ("#### 18", False),
    ],
)
def test_well_formed_tags(text, expected):
    assert well_formed(text, "gsm8k", "tags") is expected


@pytest.mark.parametrize("record_format", ["gsm8k", "math", "aime"])
@pytest.mark.parametrize("form", ["native", "tags"])
def test_what_is_well_formed_states_an_answer(record_format, form):
    """Both parts of the reward look at the same place, in every text of the tables."""
    for _, _, text, _ in NATIVE + TAGGED:
        if well_formed(text, record_format, form):
            assert extract(text, record_format, form) is not None


def test_thinking_may_hold_a_native_answer():
    text = "<think>\\boxed{1}? No.</think>\\boxed{2}"
    assert extract(text, "math") == "2"
    assert well_formed(text, "math")


# --- time ------------------------------------------------------------------------------------------------------------

GARBAGE = {
    "braces": "{" * 100_000,
    "letters": "x1 ," * 25_000,
    "boxes": "\\boxed{" * 15_000,
    "nested": "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "hashes": "#### " * 20_000,
    "digits": "9" * 100_000,
    "commas": "9," * 50_000,
    "spaces": " " * 100_000,
    "think": "<think>" * 15_000,
    "answer": "<answer>" * 12_000,
    "pairs": "<answer>1</answer>" * 6_000,
    "dollars": "$" * 100_000,
    "signs": "-" * 100_000,
    "amount": "$" + " " * 100_000 + "x",
    "sign": "-" + " " * 100_000 + "x",
    "unit": "1" + " " * 100_000 + "!",
    "tabs": "$x" + "\t" * 100_000 + "$",
    "units": "1" + " a/" * 33_000 + "!",
    "binary": "\0\ud800\u00e9" * 30_000,
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("record_format", ["gsm8k", "math", "aime"])
def test_garbage_of_100_kb_is_wrong_at_once(name, record_format):
    """Without the helper: none of it gets as far as a symbolic comparison."""
    texts = [wrap.replace("*", GARBAGE[name]) for wrap in ("*", "#### *", "\\boxed{*}", tags("*"), tags("\\boxed{*}"))]
    start = time.process_time()
    for text in texts:
        for form in ("native", "tags"):
            assert not is_correct(text, "18", record_format, form)
            well_formed(text, record_format, form)
    assert time.process_time() - start < 2


PATHOLOGICAL = [
    "9^{9^{9^9}}",
    "9999999999!",
    "\\frac{1}{" * 50 + "2" + "}" * 50,
    "(1+" * 100 + "1" + ")" * 100,
    "(x+y+z)^{99999}",
]


@pytest.mark.parametrize("answer", PATHOLOGICAL)
def test_a_pathological_expression_is_wrong_in_bounded_time(answer):
    """The limit is on CPU time, so the wall clock gets a margin for a busy machine."""
    expressions.equal("1", "1")  # the helper's start is no part of a comparison
    start = time.monotonic()
    assert not is_correct(f"\\boxed{{{answer}}}", "18", "math")
    assert time.monotonic() - start < 5 * expressions.CPU_SECONDS
    assert is_correct("\\boxed{\\frac{2}{4}}", "\\frac12", "math")


def test_expressions_are_compared_in_threads():
    """math-verify's own time limit needs the main thread."""
    cases = [(f"{n}/2", f"\\frac{{{2 * n}}}{{4}}") for n in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda case: expressions.equal(*case), cases)) == [True] * 8
        assert list(pool.map(lambda case: expressions.equal(case[0], "x"), cases)) == [False] * 8


def test_expressions_are_compared_in_a_forked_process():
    assert expressions.equal("1/2", "2/4")
    child = os.fork()
    if child == 0:
        os._exit(42 if expressions.equal("1/3", "2/6") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert expressions.equal("1/4", "2/8")


def test_the_helper_ends_with_its_process_and_starts_anew_when_killed():
    code = (
        "from qerl.data import expressions as e; assert e.equal('1/2', '2/4'); first = e._helper.process; first.kill();"
        "first.wait(); assert e.equal('1/3', '2/6'); print(e._helper.process.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_error_of_the_comparison_is_no_verdict(monkeypatch, capfd):
    helper = expressions._Helper()
    with pytest.raises(RuntimeError, match="its error stands above"):
        helper.ask(b"no JSON\n")
    assert "JSONDecodeError" in capfd.readouterr().err
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(RuntimeError, match="its error stands above"):
        expressions._Helper().ask(b'["1", "2"]\n')
