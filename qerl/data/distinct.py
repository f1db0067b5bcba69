"""Removal of repeated questions: within a split, across splits, and those with contradictory answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from qerl.data.answers import is_correct
from qerl.data.records import Located, Problem, parse_record
from qerl.host.progress import log
from qerl.settings.data import RecordFormat, Split

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
