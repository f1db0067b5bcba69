"""Expected answers in a notation that completions don't use, so that none of them is graded as right.

math-verify reads LaTeX. It takes `1e3` for a product, and `√2`, `x**2` and `٣٤` equal their own characters alone. A
policy can't solve such problems, which the preparation of a data set must say.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal

from qerl.data.answers import is_correct, stated
from qerl.data.prose import is_text
from qerl.data.records import Problem
from qerl.host.progress import log
from qerl.settings.data import AnswerForm, RecordFormat, Split

#: The most answers that a warning quotes.
_NAMED = 3
_NUMBER_WITH_EXPONENT = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,2})")
_COUNT = re.compile(
    r"([0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)\s*(?:\\text\s*\{\s*)?(thousand|million|billion|trillion)\s*\}?"
)
_COUNTS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RAISED = "".join(
    sign for sign in map(chr, range(0x80, 0x2100)) if unicodedata.decomposition(sign).startswith("<super>")
)
_SIGNS = {
    **{"∞": "\\infty ", "π": "\\pi ", "θ": "\\theta ", "·": "\\cdot ", "⋅": "\\cdot ", "×": "\\times ", "÷": "\\div "},
    **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset "},
    **{"∈": "\\in ", "°": "^\\circ ", "−": "-", "⁄": "/"},
}
#: Characters and calls of other notations, and LaTeX for them.
_LATEX: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\*\*\s*\(([^()]*)\)|\*\*\s*(-?[0-9]+|\w)"), r"^{\1\2}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"∛\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))"), r"\\sqrt[3]{\1\2}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|oo)(?![A-Za-z])"), lambda name: f"\\{name[1].replace('oo', 'infty')} "),
    (re.compile(f"[{_RAISED}]+"), lambda signs: f"^{{{unicodedata.normalize('NFKC', signs[0])}}}"),
    (re.compile(r"(?<=[0-9])[\s'’_](?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"(?<!\\)%"), r"\\%"),
]


def warn_of_notation(
    split: Split,
    problems: Iterable[Problem],
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> None:
    """Warn of the problems whose answer no usual completion equals, with their number and examples."""
    if record_format == "countdown":  # its answer is a goal, which formulas reach
        return
    written: dict[str, str] = {}
    unequal: list[str] = []
    for answer in (problem.answer for problem in problems):
        if answer not in written:
            written[answer] = _graded_wrong(answer, record_format, form, units)
        if written[answer]:
            unequal.append(answer)
    if unequal:
        named = ", ".join(
            f"{answer[:40]!r} ({written[answer][:40]})" for answer in list(dict.fromkeys(unequal))[:_NAMED]
        )
        log.warning(
            "split %s: the grader refuses what completions usually write for the answers of %d problems; write them "
            "as completions do: %s",
            split,
            len(unequal),
            named,
        )


def _graded_wrong(answer: str, record_format: RecordFormat, form: AnswerForm, units: Collection[str]) -> str:
    """The usual writing of an answer if the grader refuses it, empty if it is right."""
    for writing in dict.fromkeys((answer, usual(answer))):
        if not is_correct(stated(writing, record_format, form), answer, record_format, form, units):
            return writing
    return ""


def usual(answer: str) -> str:
    """What completions write for an answer in the notation of a program or of Unicode: decimals and LaTeX."""
    answer = "".join(str(unicodedata.decimal(sign, sign)) for sign in answer.strip())
    if is_text(answer):
        return answer
    if number := _NUMBER_WITH_EXPONENT.fullmatch(answer):
        return f"{Decimal(number[1]).scaleb(int(number[2])):f}"
    if count := _COUNT.fullmatch(answer):
        return f"{Decimal(count[1].replace(',', '')).scaleb(_COUNTS[count[2]]):f}"
    answer = "".join(_fraction(sign) for sign in answer)
    for pattern, latex in _LATEX:
        answer = pattern.sub(latex, answer)
    return "".join(_SIGNS.get(sign, sign) for sign in answer).strip()


def _fraction(sign: str) -> str:
    """A character such as `½` as LaTeX; any other as it is."""
    over, slash, under = unicodedata.normalize("NFKC", sign).partition("⁄")
    return f"\\frac{{{over}}}{{{under}}}" if slash and over and under else sign
