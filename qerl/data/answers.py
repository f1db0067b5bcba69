"""Answer extraction and grading, as pure functions of the completion's text.

The place of the answer in a completion depends on the form that the data set asks for:

native: gsm8k as `#### n` (the first one counts, read as lm-eval's strict match reads it), math and aime as `\\boxed{}`
(the last one counts). countdown has a formula after the first `#### `, to the end of the line, without delimiters.
`qerl.data.countdown` grades it.

tags: `<think>...</think><answer>...</answer>`, the answer inside the answer tags. The last `<answer>` counts, up to the
first `</answer>` after it. A tag that is never closed states nothing, even if a closed one stands before it. Inside,
gsm8k and aime expect a number (`qerl.data.amounts`), math an expression, countdown a formula. `\\boxed{}`, `$...$`,
`\\(...\\)`, `\\[...\\]` and `**...**` around a number or an expression are removed. If a longer text ends with one box,
the box counts.

In both forms, thinking never counts. Only the text after the last `</think>` and before any later `<think>` does.
A `</think>` without a `<think>` is fine, since some chat templates open the thinking in the prompt. Tags are lower case
and exact; `<Answer>` and `<answer >` are text.

An expression of math is equal if math-verify says so and it says no more than the expected answer (`qerl.data.prose`).
Words and dates are equal as text, in any case and with any spaces.
After `####`, all commas are ignored, as in lm-eval. Elsewhere only commas between thousands are, and in math `1,2` is
two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from functools import lru_cache
from typing import Literal

from qerl.data import expressions
from qerl.data.amounts import read_amount
from qerl.data.countdown import solves, stated_formula
from qerl.data.formulas import parse_formula
from qerl.data.prose import is_date, is_prose, is_text, same_text, tells_more
from qerl.settings.data import AnswerForm, RecordFormat

Verdict = Literal["right", "wrong", "timeout"]

_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
#: The pattern of lm-eval's strict match.
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_GOLD_HASHES = re.compile(r"####\s?(.*)")
#: Percentages of gsm8k are plain numbers, and its grader ignores what follows a number.
_GOLD_UNITS = ("%",)
_NUMBER = re.compile(rf"([-+\u2212]?)({_DIGITS})\.?")
_THOUSANDS = re.compile(r"[-+\u2212]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_DELIMITED = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\*\*([^*]+)\*\*|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL
)
#: The most nested delimiters around an answer.
_MOST_DELIMITERS = 4
_BOXED = "\\boxed{"
#: A box without braces, as a few solutions of MATH have it; lm-eval too reads it up to the dollar sign.
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$\\]+)\$")
_BEFORE_BOX = re.compile(r"(?:[\s$*]|\\[(\[])*")
_AFTER_BOX = re.compile(r"(?:[\s.$*]|\\[)\]])*")
#: The tags of thinking and of the answer, in their order.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
#: The most characters of an expression.
_LONGEST_EXPRESSION = 512
_AIME_ANSWER = re.compile(r"[0-9]{1,3}")


def after_thinking(text: str) -> str:
    """The part of a completion after the thinking, which may state an answer."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def gold(solution: str, record_format: RecordFormat, units: Collection[str] = ()) -> str | None:
    """Return the answer that the worked solution of a record states, as written; None if it states none.

    An answer of gsm8k is the line after the last `####`, which must be one number, with or without a unit. It is none
    if a completion of the same text would count as another number.
    """
    if record_format != "gsm8k":
        return extract(_UNBRACED.sub(r"\\boxed{\1}$", solution), record_format)
    lines = _GOLD_HASHES.findall(after_thinking(solution))
    number = read_amount(_bare(lines[-1]) or "", (*units, *_GOLD_UNITS)) if lines else None
    graded = extract(solution, record_format)
    agree = number is not None and (graded is None or _number(graded, record_format) == _number(number, record_format))
    return number if agree else None


def extract(
    text: str, record_format: RecordFormat, form: AnswerForm = "native", units: Collection[str] = ()
) -> str | None:
    """Return the final answer that `text` states, None if it states none.

    `units` may follow a number besides `qerl.data.amounts.UNITS`. A number with units is returned without them, any
    other answer as written, without delimiters.
    """
    spoken = after_thinking(text)
    if form == "tags":
        return _tagged(spoken, record_format, units)
    if record_format in ("gsm8k", "countdown"):
        answer = _after_hashes(spoken, record_format)
        return answer[0] if answer else None
    boxed = _last_boxed(spoken)
    return _in_format(boxed[0].strip(), record_format, units) if boxed else None


def boxed(text: str) -> str | None:
    """The content of the last box after the thinking, empty if the box is open; None if there is no box."""
    spoken = after_thinking(text)
    box = _last_boxed(spoken)
    return box[0] if box else "" if _BOXED in spoken else None


def stated(answer: str, record_format: RecordFormat, form: AnswerForm = "native") -> str:
    """Return the text in which a completion is expected to state `answer`, as `extract` reads it."""
    if form == "tags":
        return f"<think>...</think><answer>{answer}</answer>"
    return f"#### {answer}" if record_format in ("gsm8k", "countdown") else f"{_BOXED}{answer}}}"


def is_correct(
    text: str,
    problem_answer: str,
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> bool:
    """Whether the final answer of `text` equals `problem_answer`, as a number or expression, or reaches its goal."""
    return verdict(text, problem_answer, record_format, form, units) == "right"


def verdict(
    text: str,
    problem_answer: str,
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> Verdict:
    """The verdict on `text`, as `is_correct`; `timeout` if the comparison of expressions exceeded its limits."""
    answer = extract(text, record_format, form, units)
    if answer is None:
        return "wrong"
    if record_format == "countdown":
        return "right" if solves(answer, problem_answer) else "wrong"
    number, expected = (_number(stated, record_format) for stated in (answer, problem_answer))
    if number is not None and expected is not None:
        return "right" if number == expected else "wrong"
    return _same_expression(problem_answer, answer, tuple(units)) if record_format == "math" else "wrong"


def well_formed(
    text: str, record_format: RecordFormat, form: AnswerForm = "native", units: Collection[str] = ()
) -> bool:
    """Whether `text` states exactly one final answer, which `extract` finds, and nothing after it.

    With tags, the text has each of the four tags once, in their order, with only white space outside. Inside the
    answer's tags stands only the answer. Prose such as `I do not know` isn't an answer.
    """
    answer = extract(text, record_format, form, units)
    if answer is None or (record_format == "math" and is_prose(answer[:_LONGEST_EXPRESSION], units)):
        return False
    if form == "tags":
        return all(text.count(tag) == 1 for tag in TAGS) and _TAGGED.fullmatch(text) is not None and _is_alone(text)
    spoken = after_thinking(text)
    if record_format in ("gsm8k", "countdown"):
        return _ends_in_hashes(spoken, record_format)
    boxed = _last_boxed(spoken)
    return boxed is not None and spoken.count(_BOXED) == 1 and _AFTER_BOX.fullmatch(spoken, boxed[1]) is not None


def _hashes(spoken: str) -> tuple[str, int] | None:
    """The number of the first `#### n` and the index after it."""
    match = _HASHES.search(spoken)
    if match is None or _number(match.group(1).rstrip(".,"), "gsm8k") is None:
        return None
    number = match.group(1).rstrip(".,")
    return number, match.start(1) + len(number)


def _after_hashes(spoken: str, record_format: RecordFormat) -> tuple[str, int] | None:
    return _hashes(spoken) if record_format == "gsm8k" else stated_formula(spoken)


def _ends_in_hashes(spoken: str, record_format: RecordFormat) -> bool:
    answer = _after_hashes(spoken, record_format)
    return answer is not None and spoken.count("####") == 1 and not spoken[answer[1] :].strip()


def _tagged(spoken: str, record_format: RecordFormat, units: Collection[str]) -> str | None:
    if record_format == "countdown":
        formula = _content(spoken).strip()
        return formula if parse_formula(formula) is not None else None
    answer = _bare(_content(spoken))
    if not answer or record_format == "math":
        return answer or None
    amount = read_amount(answer, units)
    return None if amount is None else _in_format(amount, record_format, units)


def _content(spoken: str) -> str:
    """The content of the last answer tag, empty if the tag isn't closed."""
    _, opened, rest = spoken.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return content if opened and closed else ""


def _is_alone(text: str) -> bool:
    """Whether the answer tag holds no text before a box."""
    before, box, _ = _content(text).partition(_BOXED)
    return not box or _BEFORE_BOX.fullmatch(before) is not None


def _bare(content: str) -> str | None:
    """The content of answer tags without box and delimiters; None if a box is open, not the only one or not the end."""
    if _BOXED in content:
        boxed = _last_boxed(content)
        if boxed is None or content.count(_BOXED) > 1 or not _AFTER_BOX.fullmatch(content, boxed[1]):
            return None
        content = boxed[0]
    for _ in range(_MOST_DELIMITERS):
        delimited = _DELIMITED.fullmatch(content.strip())
        content = delimited.group(delimited.lastindex or 0) if delimited else content
    return content.strip()


def _in_format(answer: str, record_format: RecordFormat, units: Collection[str]) -> str | None:
    if record_format == "aime":
        amount = read_amount(answer, units)
        return amount if amount and _AIME_ANSWER.fullmatch(amount) else None
    return answer or None


def _last_boxed(text: str) -> tuple[str, int] | None:
    """Content of the last `\\boxed{}` and the index after its closing brace; None if there is none or it is open."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for brace in re.finditer(r"\\?[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : start + brace.start()], start + brace.end()
    return None


def _number(text: str, record_format: RecordFormat) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (record_format == "math" and "," in text and not _THOUSANDS.match(text)):
        return None
    value = Decimal(match.group(2).replace(",", ""))
    return value if match.group(1) in ("", "+") else value.copy_negate()


@lru_cache(maxsize=4096)
def _same_expression(expected: str, answer: str, units: tuple[str, ...]) -> Verdict:
    if expected.strip() == answer:
        return "right"
    if len(answer) > _LONGEST_EXPRESSION:
        return "wrong"
    if is_text(expected):
        return "right" if same_text(answer, expected) else "wrong"
    if is_date(answer) or tells_more(answer, expected, units):
        return "wrong"
    equal = expressions.equal(*(_ascii(text) for text in (expected, answer)))
    return "timeout" if equal is None else "right" if equal else "wrong"


def _ascii(text: str) -> str:
    return text.replace("\u2212", "-")
