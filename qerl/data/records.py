"""The record formats of the data sets, the problem that each states, and records that a data set must not have."""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain, islice
from typing import Any, get_args

from qerl.data.grading import Goal, gold, is_correct, is_text, statement
from qerl.host.console import log
from qerl.host.provenance import installed_version
from qerl.settings.base import UserError, check_unicode
from qerl.settings.data import AnswerForm, CountdownUse, RecordFormat, Split

# The record formats of the data sets, and the problem that each record states.
#
# * gsm8k: `question`, `answer` (worked solution ending in `#### n`), as openai/gsm8k.
# * math: `problem` and `answer`, or `solution` (with `\boxed{}`), or both; `level` ("Level 3" or 3) optional, as
#   HuggingFaceH4/MATH-500, Big-Math and AMC.
# * aime: `problem`, `answer` (integer 0 to 999), `solution` optional, as HuggingFaceH4/aime_2024.
# * countdown: `numbers` and `target` (whole numbers), `use` ("all" or "some", by default "all"), `solution` optional.
# * reasoning_gym: `question`, `answer` and `metadata` of the library, and by which `task`, `arguments`, `level` and
#   `version` it made them.
# * prompt: `prompt` (a text, or a chat as a list of messages with `role` and `content`), as in data sets for TRL and
#   verl; `answer`, or verl's `reward_model` with `ground_truth`, or `solution` (with `\boxed{}`), all optional.
#
# In each format a column `system` is the system message.

Record = dict[str, Any]
#: A record with its place as text (file and line, or file and row), for errors.
Located = tuple[str, Record]


#: A number with an exponent, which no grader reads.
_EXPONENT = re.compile(r"-?[0-9.]+[eE][-+]?[0-9]+")
#: The beginning of a chat that was written as text: by JSON, or by Python, as tables write lists into CSV files.
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content)\1\s*:""")
_HASHES_RULE = (
    "`answer` must end in `#### n`, where n is one number such as `1,234.5`, with a known unit or nothing after it "
    "(`units` adds units; for other answers: `format: math`, and `columns` to name `problem` and `answer`)"
)
#: The most characters that an error quotes of a solution.
_QUOTED = 40


class DataError(UserError):
    """Problems that can't be used. The message is one sentence for the user."""


#: A message of a chat: its role and its text.
Message = tuple[str, str]


@dataclass(frozen=True)
class Problem:
    """A question with its final answer; `id` is a hash of the question, `solution` the worked text if there is one.

    `context` has the messages of the chat before the question, which is the last one. `answer` is empty if the record
    states none, so that only a function of the user can reward completions.
    """

    id: str
    question: str
    solution: str | None
    answer: str
    level: int | None = None
    context: tuple[Message, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All columns of the record."""

    def under(self, system: str) -> Problem:
        """The problem with a system message, unless the text is empty or the chat has its own."""
        own = any(role == "system" for role, _ in self.context)
        return self if own or not system else replace(self, context=(("system", system), *self.context))

    def copy(self) -> Problem:
        """The problem with a record of its own, which code of the user may change without changing later steps."""
        return replace(self, record=deepcopy(self.record))


@dataclass(frozen=True)
class Row:
    """A record under its format's own names, its place as text, and the problem that it states."""

    where: str
    record: Record
    problem: Problem


def question_id(question: str) -> str:
    """Short hash of a question, equal for questions that differ in white space only."""
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


def as_record(value: Any, where: str) -> Record:
    """The record at the place `where`. Raises `DataError` if it isn't a mapping with keys."""
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is not a record: expected an object with keys, found {type(value).__name__}")
    return dict(value)


def parse_records(
    located: Iterable[Located],
    record_format: RecordFormat | None = None,
    columns: Mapping[str, str] | None = None,
    units: Collection[str] = (),
) -> tuple[RecordFormat, list[Row]]:
    """The format of records, which the first one decides without `record_format`, and all records with their problems.

    `columns` maps the format's names to the records' own, and `units` are those besides `qerl.data.grading.UNITS`.
    """
    rows = []
    for where, own in located:
        record = {key: value for key, value in own.items() if key not in (columns or {}).values()}
        for name, column in (columns or {}).items():
            outer, _, inner = column.partition(".")
            if column not in own and not (inner and isinstance(own.get(outer), Mapping) and inner in own[outer]):
                names = ", ".join(map(str, own)) or "none"
                raise DataError(f"{where} has no `{column}`, which `columns` names for `{name}`; its columns: {names}")
            record[name] = own[column] if column in own else own[outer][inner]
        record_format = record_format or detect_format(record, where)
        rows.append(Row(where, record, parse_record(record, record_format, where, units)))
    assert record_format is not None  # no source is without records
    return record_format, rows


def detect_format(record: Mapping[str, Any], where: str = "the record") -> RecordFormat:
    """The format of a record, by its keys; `where` names the file and line in errors."""
    # Scripts for TRL often add a chat to the records of gsm8k.
    if isinstance(_list(record.get("prompt")), list):
        return "prompt"
    if "numbers" in record and "target" in record:
        return "countdown"
    if "question" in record:
        return "gsm8k"
    if _get(record, "problem") is not None:
        # MATH-500 has an `answer` beside its boxed solution; AIME's solution is optional and AIME has no level.
        is_math = "level" in record or _get(record, "answer") is None
        return "math" if is_math else "aime"
    if "prompt" in record:
        return "prompt"
    raise DataError(
        f"{where} has no key `question` (gsm8k), `problem` (math, aime) or `prompt`; its keys are "
        f"{', '.join(map(str, record)) or 'none'}; name those of question and answer, which are text, as `dataset: "
        "{format: math, columns: {problem: NAME, answer: NAME}, origin: ...}`"
    )


def parse_record(
    record: Mapping[str, Any], record_format: RecordFormat, where: str, units: Collection[str] = ()
) -> Problem:
    """Return the problem that `record` states. A `DataError` names `where` (file and line) and the missing key.

    `units` may follow a gsm8k answer besides `qerl.data.grading.UNITS`.
    """
    record = as_record(record, where)
    solution: str | None
    context: list[Message] = []
    if record_format == "prompt":
        *context, (_, question) = _chat(record, where)
        solution = _optional(record, "solution", where)
        answer = _stated_answer(record, solution, where)
    elif record_format == "countdown":
        goal = _goal(record, where)
        question, solution, answer = goal.question, _optional(record, "solution", where), str(goal)
    elif record_format == "reasoning_gym":
        question, solution, answer = _text(record, "question", where), None, _entry(record, where)
    elif record_format == "gsm8k":
        question, solution = _text(record, "question", where), _text(record, "answer", where)
        answer = _solution_answer(solution, record_format, _HASHES_RULE, where, units)
    elif record_format == "math":
        question, answer = _text(record, "problem", where), (_optional(record, "answer", where) or "").strip()
        solution = _optional(record, "solution", where)
        if "####" in answer:
            raise DataError(f"{where} has `answer` with `####`, as gsm8k: set `format: gsm8k`, or give the bare answer")
        if not answer and solution is None:
            names = ", ".join(map(str, record))
            raise DataError(
                f"{where} has neither `answer` nor `solution`; fill one, or name its column in `columns`: {names}"
            )
        rule = "`solution` must hold the answer in \\boxed{}"
        answer = answer or _solution_answer(str(solution), record_format, rule, where)
    else:
        question, solution = _text(record, "problem", where), _optional(record, "solution", where)
        text = _text(record, "answer", where)
        # Tables written by pandas turn integers into floats when a row is missing.
        number = re.fullmatch(r"0*([0-9]{1,3})(?:\.0)?", text.strip())
        if number is None:
            raise DataError(
                f"{where} has `answer` {text!r}: an AIME answer is an integer from 0 to 999 (others: `format: math`)"
            )
        answer = number.group(1)
    if (system := _optional(record, "system", where)) is not None:
        if any(role == "system" for role, _ in context):
            raise DataError(f"{where} has a system message both in `prompt` and in `system`; keep one")
        context.insert(0, ("system", system))
    # A question without context has the identifier of its text alone, as in earlier data sets.
    id = question_id("\0".join([*chain.from_iterable(context), question]))
    return Problem(id, question, solution, answer, _level(record, where), tuple(context), record)


def _chat(record: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of `prompt`, ending with a message of the user; a text is the user's message."""
    prompt = _list(_get(record, "prompt"))
    if not isinstance(prompt, list):
        text = _text(record, "prompt", where)
        if _CHAT_AS_TEXT.match(text):
            raise DataError(
                f"{where} has a chat as text in `prompt`, as CSV files hold lists; save the records as .jsonl or "
                ".parquet, in which it is a list of messages"
            )
        return [("user", text)]
    chat: list[Message] = []
    for number, message in enumerate(prompt, start=1):
        place = f"{where}, message {number} of `prompt`,"
        # Tables fill the keys that a message lacks with None.
        given = {key: value for key, value in as_record(message, place).items() if value is not None}
        if given.keys() != {"role", "content"} or not all(isinstance(value, str) for value in given.values()):
            has = ", ".join(f"{key} ({type(value).__name__})" for key, value in given.items()) or "neither"
            raise DataError(f"{place} must have `role` and `content`, both text, and nothing else; it has {has}")
        check_unicode(given["content"], f"{place} `content`")
        chat.append((given["role"], given["content"]))
    if not chat or chat[-1][0] != "user" or not chat[-1][1].strip():
        raise DataError(f"{where} has a `prompt` that doesn't end in a user's message, which the policy answers")
    return chat


def _list(value: Any) -> Any:
    """An array, as pandas holds lists, as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _stated_answer(record: Mapping[str, Any], solution: str | None, where: str) -> str:
    """The answer of a record of the format prompt, empty if it states none."""
    if (answer := _optional(record, "answer", where)) is not None:
        return answer.rpartition("####")[2].strip()  # of a worked solution of GSM8K
    verl = record.get("reward_model")
    if isinstance(verl, Mapping) and isinstance(verl.get("ground_truth"), (str, int, float)):
        return (_optional(verl, "ground_truth", where) or "").strip()
    return (gold(solution, "prompt") if solution else None) or ""


def _get(record: Mapping[str, Any], key: str) -> Any:
    value = record.get(key, record.get(key.capitalize()))
    # A missing number of a table is NaN.
    return None if isinstance(value, float) and value != value else value


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = _get(record, key)
    if (key in record or key.capitalize() in record) and (value is None or not str(value).strip()):
        raise DataError(f"{where} has an empty `{key}`; fill it, or leave the record out")
    if value is None:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(f"{where} has no `{key}`; its columns: {names} (`columns: {{{key}: NAME}}` names another one)")
    if hasattr(value, "__len__") and not isinstance(value, str):
        raise DataError(f"{where} has a {type(value).__name__} in `{key}`; give it as text")
    text = str(value)
    if not isinstance(value, str) and _EXPONENT.fullmatch(text):
        text = f"{Decimal(text):f}"  # 0.00001 and not 1e-05
    check_unicode(text, f"{where} `{key}`")
    return text


def _optional(record: Mapping[str, Any], key: str, where: str) -> str | None:
    value = _get(record, key)
    return None if value is None or not str(value).strip() else _text(record, key, where)


def _solution_answer(
    solution: str, record_format: RecordFormat, rule: str, where: str, units: Collection[str] = ()
) -> str:
    answer = gold(solution, record_format, units)
    if answer is None:
        raise DataError(f"{where} states no answer: {rule}; it ends in {solution.strip()[-_QUOTED:]!r}")
    return answer


def _goal(record: Mapping[str, Any], where: str) -> Goal:
    numbers, target = _get(record, "numbers"), _get(record, "target")
    use: CountdownUse = _get(record, "use") or "all"
    try:
        if any(isinstance(value, bool) or operator.index(value) < 0 for value in (target, *numbers)):
            raise TypeError
        goal = Goal(operator.index(target), tuple(map(operator.index, numbers)), use)
    except TypeError:
        raise DataError(
            f"{where} has `numbers` {numbers!r} and `target` {target!r}: expected a list of whole numbers and a whole "
            "number, from 0"
        ) from None
    if not goal.numbers or use not in get_args(CountdownUse):
        raise DataError(f"{where} has `numbers` {numbers!r} and `use` {use!r}: expected numbers, and all or some")
    return goal


def _entry(record: Mapping[str, Any], where: str) -> str:
    """What the scorer of a task of reasoning-gym reads, as JSON. No other version of the library may score it."""
    keys = ("answer", "task", "arguments", "level", "metadata", "version")
    if lacking := [key for key in keys if key not in record]:
        raise DataError(f"{where} has no `{lacking[0]}`: records of format reasoning_gym have {', '.join(keys)}")
    if (installed := installed_version("reasoning-gym")) != record["version"]:
        raise DataError(
            f"{where} was made by reasoning-gym {record['version']}, and {installed or 'none'} is installed here; "
            "install that version, or delete the prepared data set to have it made again"
        )
    return json.dumps({key: record[key] for key in keys}, ensure_ascii=False)


def _level(record: Mapping[str, Any], where: str) -> int | None:
    # Tables fill gaps with None, NaN or an empty text. "Level ?" marks the few ungraded problems of MATH.
    if (level := str(record.get("level")).strip()) in ("None", "nan", "", "Level ?"):
        return None
    number = re.search(r"(?<![0-9.])[0-9]{1,9}(?![0-9]|\.0*[1-9])", level)
    if number is None:
        raise DataError(f"{where} has `level` {level!r}: expected a number or `Level 3`")
    return int(number.group())


# Removal of repeated questions: within a split, across splits, and those with contradictory answers.

#: A question belongs to the first split that has it, so that held-out questions aren't trained on.
_ORDER: tuple[Split, ...] = ("test", "validation", "train")
#: The most questions, or answers, that a warning quotes.
_NAMED = 3


def distinct(splits: Mapping[Split, Sequence[Row]], record_format: RecordFormat) -> dict[Split, list[Row]]:
    """The splits with the first record of each question; the log says how many were dropped.

    If the answers to a question contradict each other within a split, all its records are dropped.
    """
    seen: set[str] = set()
    rest: dict[Split, list[Row]] = {}
    for split in _ORDER:
        questions: dict[str, list[Row]] = defaultdict(list)
        for row in splits.get(split, []):
            questions[row.problem.id].append(row)
        rest[split], contradictory, unlike = [], [], list[str]()
        repeated = held_out = 0
        for id, same in questions.items():
            first, *others = dict.fromkeys(row.problem.answer for row in same)
            if id in seen:
                held_out += len(same)
            elif all(is_correct(statement(other, record_format), first, record_format) for other in others):
                rest[split].append(same[0])
                repeated += len(same) - 1
                # Columns that a reward or an environment may read. Answers in another notation differ too.
                differing = (row for row in same if record_format == "prompt" and row.record != same[0].record)
                unlike += [f"{same[0].where} and {row.where}" for row in islice(differing, 1)]
            else:  # with the place of the first record of each answer
                places = {row.problem.answer: row.where for row in reversed(same)}
                shown = [f"{places[answer]} ({answer[:40]})" for answer in (first, *others)]
                contradictory.append(" and ".join(shown))
        seen |= questions.keys()
        if repeated:
            log.info("split %s: dropped %d records that repeat a question", split, repeated)
        if unlike:
            log.warning(
                "split %s: %d of these questions were repeated with other columns. The first record of each stays; to "
                "keep all of them, have their `prompt` differ: %s",
                *(split, len(unlike), "; ".join(unlike[:_NAMED])),
            )
        if held_out:
            log.info("split %s: dropped %d records whose question is in another split, held out there", split, held_out)
        if contradictory:
            more = [f"{len(contradictory) - _NAMED} more"] * (len(contradictory) > _NAMED)
            log.warning(
                "split %s: dropped %d questions whose answers contradict each other; correct them: %s",
                *(split, len(contradictory), "; ".join([*contradictory[:_NAMED], *more])),
            )
    return {split: rest[split] for split in splits}


# Expected answers in a notation that completions don't use, so that none of them is graded as right.
#
# math-verify reads LaTeX. It takes `1e3` for a product, and `√2`, `x**2` and `٣٤` equal their own characters alone. A
# policy can't solve such problems, which the preparation of a data set must say.

#: Characters of Unicode, and numbers, operators, functions and names as programs or people write them.
_UNUSUAL = re.compile(
    r"[^\x00-\x7f\u2212]|[0-9][eE][-+]?[0-9]|\*\*|(?<![A-Za-z\\])(?:sqrt\s*\(|(?:pi|theta|oo)(?![A-Za-z]))"
    r"|[0-9][ '_][0-9]{3}(?![0-9])|thousand|million|billion|trillion"
)


def warn_of_notation(
    split: Split,
    problems: Iterable[Problem],
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> None:
    """Warn of the problems whose answer no usual completion equals, with their number and examples."""
    # The answer is a goal, which formulas reach, or the library's own.
    if record_format in ("countdown", "reasoning_gym"):
        return

    def is_refused(answer: str) -> bool:
        if _UNUSUAL.search(answer) and not is_text(answer):
            return True
        return not is_correct(statement(answer, record_format, form), answer, record_format, form, units)

    counts = Counter(problem.answer for problem in problems if problem.answer)
    refused = {answer: count for answer, count in counts.items() if is_refused(answer)}
    if refused:
        log.warning(
            "split %s: the answers of %d problems are in a notation that the grader doesn't read; write them as "
            "completions do, in LaTeX or digits: %s",
            *(split, sum(refused.values()), ", ".join(repr(answer[:40]) for answer in list(refused)[:_NAMED])),
        )
