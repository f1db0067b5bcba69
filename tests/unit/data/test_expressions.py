"""Time and processes of grading: garbage, expressions of any size, threads, forks."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl.data import expressions
from qerl.data.grading import is_correct, well_formed
from tests.unit.data.test_grading import tags

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
    *("9^{9^{9^9}}", "9999999999!"),
    "\\frac{1}{" * 50 + "2" + "}" * 50,
    "(1+" * 100 + "1" + ")" * 100,
    "(x+y+z)^{99999}",
]


@pytest.mark.parametrize("answer", PATHOLOGICAL)
def test_a_pathological_expression_is_wrong_in_bounded_time(answer):
    """Without a limit, none of these would end within the test's own time limit."""
    assert not is_correct(f"\\boxed{{{answer}}}", "18", "math")
    assert is_correct("\\boxed{\\frac{2}{4}}", "\\frac12", "math")


def test_expressions_are_compared_in_threads():
    """math-verify's own time limit needs the main thread."""
    cases = [(f"{n}/2", f"\\frac{{{2 * n}}}{{4}}") for n in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda case: expressions.equal(*case), cases)) == [True] * 8
        assert list(pool.map(lambda case: expressions.equal(case[0], "x"), cases)) == [False] * 8


def test_a_word_is_no_question_for_another_library():
    assert expressions.equal("x", "task") is False
    assert expressions.equal("task", '"task": {}') is False


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
