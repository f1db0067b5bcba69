"""The one home of answer extraction and grading: pure functions of the completion's text.

gsm8k states its answer as `#### n` (the first one counts, as in the data set's own grader and in lm-eval's
strict match); math and aime as `\\boxed{}` (the last one counts).
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify

from qerl.config import RecordFormat

_NUMBER = r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_HASHES = re.compile(rf"####\s?({_NUMBER})")
_PLAIN_NUMBER = re.compile(_NUMBER)
_INTEGER = re.compile(r"[0-9]+")
_BOXED = "\\boxed{"
_AFTER_BOX = re.compile(r"[\s.$]*")
#: A longer expression is no answer; the bound keeps the symbolic comparison's time bounded.
_LONGEST_EXPRESSION = 512
_AIME_ANSWERS = range(1000)


def extract(text: str, record_format: RecordFormat) -> str | None:
    """Return the final answer that `text` states in its format, as written; None if it states none."""
    if record_format == "gsm8k":
        match = _HASHES.search(text)
        return match.group(1) if match else None
    boxed = _last_boxed(text)
    if boxed is None:
        return None
    answer = boxed[0].strip()
    if record_format == "aime":
        return answer if _is_aime_answer(answer) else None
    return answer or None


def is_correct(text: str, problem_answer: str, record_format: RecordFormat) -> bool:
    """Whether the final answer of `text` equals `problem_answer`: as a number, or as an expression (math)."""
    answer = extract(text, record_format)
    if answer is None:
        return False
    if _PLAIN_NUMBER.fullmatch(answer) and _PLAIN_NUMBER.fullmatch(problem_answer):
        return _number(answer) == _number(problem_answer)
    return record_format == "math" and _same_expression(problem_answer, answer)


def well_formed(text: str, record_format: RecordFormat) -> bool:
    """Whether `text` states exactly one final answer and nothing after it."""
    if record_format == "gsm8k":
        match = _HASHES.search(text)
        return match is not None and text.count("####") == 1 and not text[match.end() :].strip()
    boxed = _last_boxed(text)
    if boxed is None or text.count(_BOXED) != 1 or extract(text, record_format) is None:
        return False
    return _AFTER_BOX.fullmatch(text, boxed[1]) is not None


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


def _is_aime_answer(answer: str) -> bool:
    return len(answer) <= 3 and _INTEGER.fullmatch(answer) is not None and int(answer) in _AIME_ANSWERS


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


@lru_cache(maxsize=4096)
def _same_expression(expected: str, answer: str) -> bool:
    if expected.strip() == answer:
        return True
    if len(answer) > _LONGEST_EXPRESSION:
        return False
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, target = (parse(f"${_BOXED}{content}}}$", extraction_config=latex) for content in (expected, answer))
    return bool(verify(gold, target))
