"""Expected answers in a notation that completions don't use are found at preparation."""

import json

import pytest

from qerl.data.records import usual
from qerl.data.sources import prepare
from qerl.settings.data import DatasetSettings, LocalData

#: Answers as records have them, and what a reader writes for them in a box.
UNUSUAL = {
    **{"1e3": "1000", "1.5e-3": "0.0015", "√2": "\\sqrt{2}", "3√(x+1)": "3\\sqrt{x+1}", "x**2": "x^{2}"},
    **{"x**10+1": "x^{10}+1", "٣٤": "34", "３４": "34", "½": "\\frac{1}{2}", "7½": "7\\frac{1}{2}", "x²": "x^{2}"},
    **{"∞": "\\infty", "pi": "\\pi", "1 000": "1000", "5 million": "5000000", "5 \\text{ million}": "5000000"},
}
USUAL = [
    *("1000", "\\frac{1}{2}", "1/2", "\\sqrt{2}", "x^2+2x+1", "2\\pi", "(1, 2]", "\\text{no}", "cat", "2025-01-05"),
    *("-0.5",),
    *("50\\%", "1,000", "x = 5", "\\{1,2\\}", "5\\text{ cm}", "ab", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    *("3 \\times 4",),
]


@pytest.mark.parametrize(("answer", "writing"), UNUSUAL.items())
def test_the_usual_writing_of_an_answer(answer, writing):
    assert usual(answer) == writing


@pytest.fixture
def warnings(tmp_path, caplog):
    def prepared(answers, form="native"):
        rows = [{"problem": f"Problem {n}?", "answer": answer} for n, answer in enumerate(answers)]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        origin = LocalData(source="local", path=path, test_fraction=0, validation_fraction=0)
        prepare(DatasetSettings(format="math", origin=origin, answer=form), tmp_path / "out")
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    return prepared


@pytest.mark.parametrize("answer", UNUSUAL)
def test_an_answer_that_no_usual_completion_equals_is_a_warning(warnings, answer):
    [message] = warnings([*USUAL, answer])
    assert message.startswith("split train: ")
    assert "answers of 1 problems" in message
    assert message.endswith(f": {answer!r} ({UNUSUAL[answer]})")


@pytest.mark.parametrize("answer", ["x^{2", "\\frac{1}{2", "9" * 300 + "{"])
def test_an_answer_that_is_wrong_in_its_own_box_is_a_warning(warnings, answer):
    [message] = warnings(["2", answer])
    assert "answers of 1 problems" in message


def test_each_problem_counts_and_three_answers_are_named(warnings):
    [message] = warnings(["1e3", "2", "1e3", "√2", "x**2", "٣٤"])
    assert "answers of 5 problems" in message
    assert message.endswith(": '1e3' (1000), '√2' (\\sqrt{2}), 'x**2' (x^{2})")


@pytest.mark.parametrize("form", ["native", "tags"])
def test_usual_answers_are_no_warning(warnings, form):
    assert warnings(USUAL, form) == []
