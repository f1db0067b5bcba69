"""The one home of answer extraction and grading: pure functions of the completion's text.

Where a completion states its answer depends on the form that the data set asks for:

native: gsm8k as `#### n` (the first one counts, as in the data set's own grader and in lm-eval's strict match), math
    and aime as `\\boxed{}` (the last one counts).
tags: `<think>...</think><answer>...</answer>`, the answer inside the answer tags. The last `<answer>` counts, up to the
    first `</answer>` after it; one that is never closed states nothing, even if a closed one stands before it. Inside,
    gsm8k and aime expect a number and nothing else but a sign, a currency, a percent sign or a unit in words
    (`$1,800.50`, `-18 apples`, `25%`); math expects an expression. `\\boxed{}`, `$...$`, `\\(...\\)` and `\\[...\\]`
    around either are taken off.

In both, thinking never counts: only what follows the last `</think>` does, and of that only what precedes a `<think>`.
A `</think>` without a `<think>` is fine, since some chat templates open the thinking in the prompt. Tags are lower case
and exact; `<Answer>` and `<answer >` are text. Commas in numbers are ignored wherever they stand, as lm-eval ignores
them; but in math `1,2` is two numbers and only `1,200` is one.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

from qerl.config import AnswerForm, RecordFormat
from qerl.data import expressions

_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_HASHES = re.compile(rf"####\s?(-?{_DIGITS})")
_NUMBER = re.compile(rf"([-+\u2212]?)({_DIGITS})\.?")
_THOUSANDS = re.compile(r"[-+\u2212]?[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_CURRENCY = r"(?:\\?\$|[€£¥])"
_WORD = r"[^\W\d_]"
_UNIT = rf"(?:\\?%|[€£¥°]|{_WORD}(?:{_WORD}|[\s/°²³])*)?"
_AMOUNT = re.compile(rf"(?:{_CURRENCY}\s*)?(?:([-+\u2212])\s*)?(?:{_CURRENCY}\s*)?({_DIGITS})\s*{_UNIT}\.?")
_DELIMITED = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_BOXED = "\\boxed{"
_AFTER_BOX = re.compile(r"[\s.$]*")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
#: A longer expression is no answer.
_LONGEST_EXPRESSION = 512
_AIME_ANSWER = re.compile(r"[0-9]{1,3}")


def after_thinking(text: str) -> str:
    """Return the part of a completion that may state an answer: what follows the thinking."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def extract(text: str, record_format: RecordFormat, form: AnswerForm = "native") -> str | None:
    """Return the final answer that `text` states, None if it states none.

    A native answer is returned as written, one in tags without what may surround it.
    """
    spoken = after_thinking(text)
    if form == "tags":
        return _tagged(spoken, record_format)
    if record_format == "gsm8k":
        match = _HASHES.search(spoken)
        return match.group(1) if match else None
    boxed = _last_boxed(spoken)
    return _in_format(boxed[0].strip(), record_format) if boxed else None


def stated(answer: str, record_format: RecordFormat, form: AnswerForm = "native") -> str:
    """Return how a completion is expected to state `answer`: what `extract` reads it from."""
    if form == "tags":
        return f"<think>...</think><answer>{answer}</answer>"
    return f"#### {answer}" if record_format == "gsm8k" else f"{_BOXED}{answer}}}"


def is_correct(text: str, problem_answer: str, record_format: RecordFormat, form: AnswerForm = "native") -> bool:
    """Whether the final answer of `text` equals `problem_answer`: as a number, or as an expression (math)."""
    answer = extract(text, record_format, form)
    if answer is None:
        return False
    number, expected = (_number(stated, record_format) for stated in (answer, problem_answer))
    if number is not None and expected is not None:
        return number == expected
    return record_format == "math" and _same_expression(problem_answer, answer)


def well_formed(text: str, record_format: RecordFormat, form: AnswerForm = "native") -> bool:
    """Whether `text` states exactly one final answer, which `extract` finds, and nothing after it.

    With tags: each of the four tags once, in their order, with nothing but white space outside.
    """
    if extract(text, record_format, form) is None:
        return False
    if form == "tags":
        return all(text.count(tag) == 1 for tag in _TAGS) and _TAGGED.fullmatch(text) is not None
    spoken = after_thinking(text)
    if record_format == "gsm8k":
        match = _HASHES.search(spoken)
        return match is not None and spoken.count("####") == 1 and not spoken[match.end() :].strip()
    boxed = _last_boxed(spoken)
    return boxed is not None and spoken.count(_BOXED) == 1 and _AFTER_BOX.fullmatch(spoken, boxed[1]) is not None


def _tagged(spoken: str, record_format: RecordFormat) -> str | None:
    _, opened, rest = spoken.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    answer = _bare(content) if opened and closed else None
    if answer is None or record_format == "math":
        return answer or None
    amount = _AMOUNT.fullmatch(answer)
    if amount is None:
        return None
    sign, digits = amount.groups()
    return _in_format(digits if sign in (None, "+") else f"-{digits}", record_format)


def _bare(content: str) -> str | None:
    """The content of answer tags without box and math delimiters; None if a box is left open."""
    if _BOXED in content:
        boxed = _last_boxed(content)
        if boxed is None:
            return None
        content = boxed[0]
    delimited = _DELIMITED.fullmatch(content.strip())
    return (delimited.group(delimited.lastindex or 0) if delimited else content).strip()


def _in_format(answer: str, record_format: RecordFormat) -> str | None:
    if record_format == "aime":
        return answer if _AIME_ANSWER.fullmatch(answer) else None
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
def _same_expression(expected: str, answer: str) -> bool:
    if expected.strip() == answer:
        return True
    return len(answer) <= _LONGEST_EXPRESSION and expressions.equal(*(_ascii(text) for text in (expected, answer)))


def _ascii(text: str) -> str:
    return text.replace("\u2212", "-")
