"""The record formats of the data sets, the problem that each states, and records that a data set must not have."""

from __future__ import annotations

import hashlib
import operator
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast, get_args

from qerl.data.grading import Goal, gold, is_correct, is_text, stated
from qerl.host.console import log
from qerl.settings.base import UserError
from qerl.settings.data import AnswerForm, CountdownUse, RecordFormat, Split

# The four record formats of the data sets, and the problem that each record states.
#
# * gsm8k: `question`, `answer` (worked solution ending in `#### n`), as openai/gsm8k.
# * math: `problem` and `answer`, or `solution` (with `\boxed{}`), or both; `level` ("Level 3" or 3) optional, as
#   HuggingFaceH4/MATH-500, Big-Math and AMC.
# * aime: `problem`, `answer` (integer 0 to 999), `solution` optional, as HuggingFaceH4/aime_2024.
# * countdown: `numbers` and `target` (whole numbers), `use` ("all" or "some", by default "all"), `solution` optional.

Record = dict[str, Any]
#: A record with its place as text (file and line, or file and row), for errors.
Located = tuple[str, Record]


#: A number with an exponent, which no grader reads.
_EXPONENT = re.compile(r"-?[0-9.]+[eE][-+]?[0-9]+")
_HASHES_RULE = (
    "`answer` must end in `#### n`, where n is one number such as `1,234.5`, with a known unit or nothing after it "
    "(`units` adds units; for other answers: `format: math`, and `columns` to name `problem` and `answer`)"
)
#: The most characters that an error quotes of a solution.
_QUOTED = 40


class DataError(UserError):
    """Problems that can't be used. The message is one sentence for the user."""


@dataclass(frozen=True)
class Problem:
    """A question with its final answer; `id` is a hash of the question, `solution` the worked text if there is one."""

    id: str
    question: str
    solution: str | None
    answer: str
    level: int | None = None


def question_id(question: str) -> str:
    """Short hash of a question, equal for questions that differ in white space only."""
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


def detect_format(record: Mapping[str, Any], where: str = "the record") -> RecordFormat:
    """The format of a record, by its keys; `where` names the file and line in errors."""
    if "numbers" in record and "target" in record:
        return "countdown"
    if "question" in record:
        return "gsm8k"
    if _get(record, "problem") is not None:
        # MATH-500 has an `answer` beside its boxed solution; AIME's solution is optional and AIME has no level.
        is_math = "level" in record or _get(record, "answer") is None
        return "math" if is_math else "aime"
    raise DataError(f"{where} has no key `question` (gsm8k) and no key `problem` (math, aime); {_mapping(record)}")


#: Names of questions and answers in other data sets, such as those for TRL.
_QUESTIONS = ("prompt", "query", "input", "instruction", "text")
_ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "completion", "response", "output", "target", "label")


def _mapping(record: Mapping[str, Any]) -> str:
    """The hint that `columns` can map a record's own names to those of a format."""
    # Alpaca's records have an `input` that is mostly empty beside their `instruction`.
    question = next((name for name in _QUESTIONS if name in record and str(record[name]).strip()), None)
    chat = next((name for name, value in record.items() if _is_chat(value)), None)
    if chat is not None and question in (None, chat):
        return f"its `{chat}` is a list, such as a chat: give the question as text, in a column of its own"
    answer = next((name for name in _ANSWERS if name in record and str(record[name]).strip()), None)
    if question is None or answer is None:
        return f"name its own in `columns`; they are {', '.join(map(str, record)) or 'none'}"
    if not isinstance(record[question], str):
        return f"its `{question}` is a {type(record[question]).__name__}: give the question as text"
    stated = str(record[answer])
    if gold(stated, "gsm8k") is not None:
        record_format, columns = "gsm8k", {"question": question, "answer": answer}
    else:
        record_format, columns = "math", {"problem": question, "solution" if "\\boxed" in stated else "answer": answer}
    named = ", ".join(f"{name}: {column}" for name, column in columns.items() if name != column)
    return f"write its own names as `dataset: {{format: {record_format}, columns: {{{named}}}, origin: ...}}`"


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def parse_record(
    record: Mapping[str, Any], record_format: RecordFormat, where: str, units: Collection[str] = ()
) -> Problem:
    """Return the problem that `record` states. A `DataError` names `where` (file and line) and the missing key.

    `units` may follow a gsm8k answer besides `qerl.data.grading.UNITS`.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is not a record: expected an object with keys, found {type(record).__name__}")
    solution: str | None
    if record_format == "countdown":
        goal = _goal(record, where)
        question, solution, answer = goal.question, _optional(record, "solution", where), str(goal)
    elif record_format == "gsm8k":
        question, solution = _text(record, "question", where), _text(record, "answer", where)
        answer = _stated(solution, record_format, _HASHES_RULE, where, units)
    elif record_format == "math":
        question, given = _text(record, "problem", where), _given(record, where)
        if not given and _optional(record, "solution", where) is None:
            names = ", ".join(map(str, record))
            raise DataError(
                f"{where} has neither `answer` nor `solution`; fill one, or name its column in `columns`: {names}"
            )
        solution = _optional(record, "solution", where) if given else _text(record, "solution", where)
        answer = given or _stated(str(solution), record_format, "`solution` must hold the answer in \\boxed{}", where)
    else:
        question, solution = _text(record, "problem", where), _optional(record, "solution", where)
        answer = _aime_answer(_text(record, "answer", where), where)
    return Problem(question_id(question), question, solution, answer, _level(record, where))


def _get(record: Mapping[str, Any], key: str) -> Any:
    value = record.get(key, record.get(key.capitalize()))
    # A missing number of a table is NaN.
    return None if isinstance(value, float) and value != value else value


def _given(record: Mapping[str, Any], where: str) -> str:
    """The bare answer of a record of math, empty without one."""
    answer = (_optional(record, "answer", where) or "").strip()
    if "####" in answer:
        raise DataError(f"{where} has `answer` with `####`, as gsm8k: set `format: gsm8k`, or give the bare answer")
    return answer


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value, given = _get(record, key), key in record or key.capitalize() in record
    if given and (value is None or not str(value).strip()):
        raise DataError(f"{where} has an empty `{key}`; fill it, or leave the record out")
    if value is None:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(f"{where} has no `{key}`; its columns: {names} (`columns: {{{key}: NAME}}` names another one)")
    if hasattr(value, "__len__") and not isinstance(value, str):
        raise DataError(f"{where} has a {type(value).__name__} in `{key}`; give it as text")
    if not _is_unicode(text := _as_written(value)):
        raise DataError(f"{where} has half of a surrogate pair in `{key}`, which is no character; correct the text")
    return text


def _optional(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = _get(record, key)
    return None if value is None or not str(value).strip() else _text(record, key, where)


def _as_written(value: Any) -> str:
    """A value as text. A number has no exponent: 0.00001 and not 1e-05."""
    text = str(value)
    return f"{Decimal(text):f}" if not isinstance(value, str) and _EXPONENT.fullmatch(text) else text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stated(solution: str, record_format: RecordFormat, rule: str, where: str, units: Collection[str] = ()) -> str:
    answer = gold(solution, record_format, units)
    if answer is None:
        raise DataError(f"{where} states no answer: {rule}; it ends in {solution.strip()[-_QUOTED:]!r}")
    return answer


def _aime_answer(text: str, where: str) -> str:
    # Tables written by pandas turn integers into floats when a row is missing.
    number = re.fullmatch(r"0*([0-9]{1,3})(?:\.0)?", text.strip())
    if number is None:
        raise DataError(
            f"{where} has `answer` {text!r}: an AIME answer is an integer from 0 to 999 (others: `format: math`)"
        )
    return number.group(1)


def _goal(record: Mapping[str, Any], where: str) -> Goal:
    numbers, target, use = (
        _get(record, "numbers"),
        _get(record, "target"),
        cast(CountdownUse, _get(record, "use") or "all"),
    )
    try:
        goal = Goal(_whole(target), tuple(map(_whole, numbers)), use)
    except TypeError:
        raise DataError(
            f"{where} has `numbers` {numbers!r} and `target` {target!r}: expected a list of whole numbers and a whole "
            "number, from 0"
        ) from None
    if not goal.numbers or use not in get_args(CountdownUse):
        raise DataError(f"{where} has `numbers` {numbers!r} and `use` {use!r}: expected numbers, and all or some")
    return goal


def _whole(value: Any) -> int:
    """A whole number from 0, as JSON or parquet have it; a `TypeError` for another value."""
    number = operator.index(value)
    if isinstance(value, bool) or number < 0:
        raise TypeError
    return number


def _level(record: Mapping[str, Any], where: str) -> int | None:
    level = record.get("level")
    if level is None:
        return None
    number = re.search(r"(?<![0-9])[0-9]{1,9}(?![0-9])", str(level))
    # "Level ?" marks the few ungraded problems of MATH.
    if number is None and str(level) != "Level ?":
        raise DataError(f"{where} has `level` {level!r}: expected a number or `Level 3`")
    return int(number.group()) if number else None


# Removal of repeated questions: within a split, across splits, and those with contradictory answers.

#: A question belongs to the first split that has it, so that held-out questions aren't trained on.
_ORDER: tuple[Split, ...] = ("test", "validation", "train")
#: The most questions that a warning quotes.
_NAMED = 3


def distinct(
    splits: dict[Split, list[Located]], record_format: RecordFormat, units: Collection[str] = ()
) -> dict[Split, list[Located]]:
    """The splits with the first record of each question; the log says how many were dropped.

    If the answers to a question contradict each other within a split, all its records are dropped.
    """
    seen: set[str] = set()
    kept: dict[Split, list[Located]] = {}
    for split in _ORDER:
        asked = _by_question(splits.get(split, []), record_format, units)
        unseen = {id: same for id, same in asked.items() if id not in seen}
        agreeing = {id: same for id, same in unseen.items() if _agree(same, record_format)}
        kept[split] = [same[0][0] for same in agreeing.values()]
        repeated, elsewhere = _surplus(agreeing.values()), _surplus(asked.values()) - _surplus(unseen.values())
        _tell(split, repeated, elsewhere + len(asked) - len(unseen))
        _warn(split, [same for id, same in unseen.items() if id not in agreeing])
        seen |= asked.keys()
    return {split: kept[split] for split in splits}


_Same = list[tuple[Located, Problem]]


def _by_question(records: list[Located], record_format: RecordFormat, units: Collection[str]) -> dict[str, _Same]:
    by_question: dict[str, _Same] = defaultdict(list)
    for where, record in records:
        problem = parse_record(record, record_format, where, units)
        by_question[problem.id].append(((where, record), problem))
    return by_question


def _agree(same: _Same, record_format: RecordFormat) -> bool:
    """Whether the grader accepts each record's answer for the first one's."""
    stated = "#### {}" if record_format == "gsm8k" else "\\boxed{{{}}}"
    first, *others = dict.fromkeys(problem.answer for _, problem in same)
    return all(is_correct(stated.format(other), first, record_format) for other in others)


def _surplus(questions: Iterable[_Same]) -> int:
    """Records beyond the first of each question."""
    return sum(len(same) - 1 for same in questions)


def _tell(split: Split, repeated: int, held_out: int) -> None:
    if repeated:
        log.info("split %s: dropped %d records that repeat a question", split, repeated)
    if held_out:
        log.info("split %s: dropped %d records whose question is in another split, held out there", split, held_out)


def _warn(split: Split, contradictory: list[_Same]) -> None:
    if not contradictory:
        return
    named = [" and ".join(_places(same)) for same in contradictory[:_NAMED]]
    more = [f"{len(contradictory) - _NAMED} more"] * (len(contradictory) > _NAMED)
    log.warning(
        "split %s: dropped %d questions whose answers contradict each other; correct them: %s",
        split,
        len(contradictory),
        "; ".join([*named, *more]),
    )


def _places(same: _Same) -> list[str]:
    """The index of the first record with each answer."""
    places: dict[str, str] = {}
    for (where, _), problem in same:
        places.setdefault(problem.answer, f"{where} ({problem.answer[:40]})")
    return list(places.values())


# Expected answers in a notation that completions don't use, so that none of them is graded as right.
#
# math-verify reads LaTeX. It takes `1e3` for a product, and `√2`, `x**2` and `٣٤` equal their own characters alone. A
# policy can't solve such problems, which the preparation of a data set must say.

#: The most answers that a warning quotes.
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
