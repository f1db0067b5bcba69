"""Seeded problems that are generated: arithmetic, countdown and the tasks of reasoning-gym."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from qerl.data import expressions
from qerl.data.grading import Goal
from qerl.data.records import DataError, Record
from qerl.host.provenance import installed_version
from qerl.settings.data import CountdownData, Generated, GeneratedSplits, ReasoningGymData, RecordFormat, Split

# Splits of generated problems, without repeated questions, and without a problem of another split in another guise.

#: The number of consecutive draws without a new question after which the generator gives up.
_PATIENCE = 1000


@dataclass(frozen=True)
class Draw:
    """A problem that a generator has drawn."""

    question: str
    """No two problems have the same."""
    core: object
    """What the problem is apart from the order of its numbers, its names or its nouns; no two splits share one."""
    record: Callable[[Split], Record]
    """Makes its record, once it is known to be new."""


def generate(settings: GeneratedSplits, record_format: RecordFormat) -> dict[Split, list[Record]]:
    """The splits' records.

    No two records share a question. No record of one split has the core of a record of another split, and no two
    records for testing or validation have one core. Training may have a core again, as it may in real data.
    """
    rng = random.Random(f"{settings.seed} {record_format}")
    seen: set[object] = set()
    held_out: set[object] = set()
    sizes: dict[Split, int] = {"test": settings.test, "validation": settings.validation, "train": settings.train}
    splits: dict[Split, list[Record]] = {split: [] for split in sizes}
    draws = _draws(settings, record_format, rng)
    for split, size in sizes.items():
        for _ in range(size):
            some = islice(draws, _PATIENCE)
            problem = next((one for one in some if one.question not in seen and one.core not in held_out), None)
            if problem is None:
                raise DataError("there are no more problems to generate; ask for fewer (train, validation, test)")
            seen.add(problem.question)
            if split != "train":
                held_out.add(problem.core)
            splits[split].append(problem.record(split))
    return splits


def fresh_records(
    settings: GeneratedSplits, record_format: RecordFormat, held_out: Collection[object], rng: random.Random
) -> Iterator[Record]:
    """Training records without end, none with a core of `held_out`. They may repeat."""
    return (draw.record("train") for draw in _draws(settings, record_format, rng) if draw.core not in held_out)


def _draws(settings: GeneratedSplits, record_format: RecordFormat, rng: random.Random) -> Iterator[Draw]:
    if isinstance(settings, ReasoningGymData):
        yield from _of_reasoning_gym(settings, rng)
    while True:
        if isinstance(settings, CountdownData):
            yield _countdown(settings, rng)
        else:
            assert isinstance(settings, Generated)
            yield _arithmetic(record_format, settings.terse, rng)


# Seeded arithmetic problems with worked solutions, in the three record formats.
#
# A problem of level k is a chain of k operations on small whole numbers. Its solution is written step by step ("Monday
# 3+4=7", one labelled step per line) or, for the share `terse` of the training split, states the final answer at once.
# Both are correct, but a small model can't compute several steps at once. A policy trained on the mixture is right far
# more often when it writes the steps, and reinforcement learning can find that.

#: Levels by format, drawn uniformly; a level is the number of operations.
LEVELS: dict[RecordFormat, tuple[int, ...]] = {"gsm8k": (2, 3, 4), "math": (1, 2, 3, 4, 5), "aime": (2, 3, 4)}
#: The largest intermediate result; a model of a million parameters learns two-digit arithmetic within minutes.
LARGEST_VALUE = 50

_NAMES = ["Mia", "Tom", "Ann", "Leo", "Eva", "Max", "Zoe", "Sam", "Ivy", "Ben", "Lea", "Dan"]
_OBJECTS = ["apples", "books", "coins", "cards", "shells", "pens", "marbles", "stamps", "eggs", "plums"]
_OBJECTS += ["stones", "beads"]
_GAIN = ["buys", "finds", "gets", "wins", "collects", "picks"]
_LOSS = ["loses", "sells", "gives", "uses", "drops", "breaks"]
_TIMES = {2: "doubles", 3: "triples"}
#: Labels of the operations in problem and solution, by which a small model finds the next step.
_LABELS: dict[RecordFormat, tuple[str, ...]] = {
    "gsm8k": ("Monday ", "Tuesday ", "Wednesday ", "Thursday "),
    "math": ("A:", "B:", "C:", "D:", "E:"),
    "aime": ("b=", "c=", "d=", "e="),
}


#: An operation: left, sign, right and result.
Step = tuple[int, str, int, int]


# A merely under-trained policy of a million parameters gains little in twenty RL steps. So solutions have two correct
# styles, of which the policy imitates both: nearly always right step by step, mostly wrong with the answer at once.
# GRPO finds the former. It imitates what RL does to a real model and is no evidence about real models.
def _arithmetic(record_format: RecordFormat, terse: float, rng: random.Random) -> Draw:
    length, steps = rng.choice(LEVELS[record_format]), list[Step]()
    value = rng.randint(2, 12)
    for _ in range(length):
        steps.append(_step(value, rng))
        value = steps[-1][-1]
    question = _QUESTIONS[record_format](steps, rng)

    def record(split: Split) -> Record:
        is_terse = rng.random() < (terse if split == "train" else 0.0)
        final = f"#### {value}" if record_format == "gsm8k" else f"\\boxed{{{value}}}"
        labels = _LABELS[record_format]
        lines = [f"{label}{a}{sign}{b}={c}" for label, (a, sign, b, c) in zip(labels, steps, strict=False)]
        solution = final if is_terse else "\n".join([*lines, final])
        if record_format == "gsm8k":
            return {"question": question, "answer": solution}
        if record_format == "math":
            return {"problem": question, "solution": solution, "level": f"Level {len(steps)}"}
        return {"problem": question, "solution": solution, "answer": str(value)}

    # Its core is the question: chains are few, so that splits share some in other words.
    return Draw(question, question, record)


def _step(value: int, rng: random.Random) -> Step:
    small = rng.randint(2, 9)
    signs = ["+"] * (value + small <= LARGEST_VALUE) + ["-"] * (value > small)
    if value >= 2 and 3 * value <= LARGEST_VALUE:
        signs.append("*")
    sign = rng.choice(signs)
    right = rng.choice(list(_TIMES)) if sign == "*" else small
    return value, sign, right, {"+": value + right, "-": value - right, "*": value * right}[sign]


def _story(steps: list[Step], rng: random.Random) -> str:
    """A diary: "Mia has 7 apples. Monday buys 5. Tuesday doubles them. How many apples has Mia now?"."""
    name, noun = rng.choice(_NAMES), rng.choice(_OBJECTS)
    parts = [f"{name} has {steps[0][0]} {noun}."]
    for label, (_, sign, right, _) in zip(_LABELS["gsm8k"], steps, strict=False):
        verb = {"+": rng.choice(_GAIN), "-": rng.choice(_LOSS), "*": _TIMES.get(right)}[sign]
        parts.append(f"{label}{verb} {'them' if sign == '*' else right}.")
    return " ".join([*parts, f"How many {noun} has {name} now?"])


def _number_game(steps: list[Step], rng: random.Random) -> str:
    """Instructions: "Start with 7. A: add 5. B: times 2. What is the result?"."""
    verbs = {"+": ("add", "plus"), "-": ("subtract", "minus"), "*": ("multiply by", "times")}
    parts = [f"{rng.choice(('Start with', 'Take'))} {steps[0][0]}."]
    for label, (_, sign, right, _) in zip(_LABELS["math"], steps, strict=False):
        parts.append(f"{label} {rng.choice(verbs[sign])} {right}.")
    return " ".join([*parts, rng.choice(("What is the result?", "What number is it?"))])


def _definitions(steps: list[Step], rng: random.Random) -> str:
    """Definitions: "Let a=7, b=a+5, c=b*2. Find c."."""
    names, parts = "abcde", [f"a={steps[0][0]}"]
    for label, old, (_, sign, right, _) in zip(_LABELS["aime"], names, steps, strict=False):
        parts.append(f"{label}{old}{sign}{right}")
    begin, end = rng.choice(("Let", "Suppose")), rng.choice(("Find", "Compute"))
    return f"{begin} {', '.join(parts)}. {end} {names[len(steps)]}."


_QUESTIONS: dict[RecordFormat, Callable[[list[Step], random.Random], str]] = {
    "gsm8k": _story,
    "math": _number_game,
    "aime": _definitions,
}


# Seeded countdown problems: reach a target from given numbers, which most targets allow in several ways.
#
# A training solution writes its steps and then the formula ("8-3=5", "5*4=20", "#### (8-3)*4"). For the share `missed`
# it computes correctly but misses the target. A policy that imitates such solutions writes formulas of the right form
# that seldom reach the target, so a single completion is mostly wrong, but one of many is right.


#: Draws of numbers for one problem. Of six numbers from 90 to 99, six draws in 10,000 reach a target up to 99.
_ATTEMPTS = 1_000_000


def _countdown(settings: CountdownData, rng: random.Random) -> Draw:
    for _ in range(_ATTEMPTS):
        numbers = [rng.randint(settings.smallest, settings.largest) for _ in range(rng.choice(settings.numbers))]
        if attempt := _attempt(numbers, settings, rng):
            break
    else:
        raise DataError(
            f"{_ATTEMPTS:,} draws of numbers from {settings.smallest} to {settings.largest} reach no target up to "
            f"largest_target={settings.largest_target}; raise it, or lower smallest"
        )
    goal = Goal(attempt.value, tuple(numbers), settings.use)

    def record(split: Split) -> Record:
        misses = split == "train" and rng.random() < settings.missed
        # A few draws may find no attempt on the same numbers with another value.
        others = (_attempt(numbers, settings, rng) for _ in range(50 if misses else 0))
        miss = next((other for other in filter(None, others) if other.value != goal.target), None)
        made = miss or attempt
        if settings.style == "search":
            lines = _search(made.steps, goal, settings.largest_target, rng)
        else:
            lines = [_line(step, []) for step in made.steps]
        solution = "\n".join([*lines, f"#### {made.formula}"])
        return {"numbers": numbers, "target": goal.target, "use": goal.use, "solution": solution}

    return Draw(goal.question, core_of(goal), record)


def core_of(goal: Goal) -> object:
    """The core (`Draw.core`) of a countdown problem."""
    return tuple(sorted(goal.numbers)), goal.target


@dataclass(frozen=True)
class _Attempt:
    """A value that numbers can make, with the steps and the formula that make it."""

    value: int
    steps: list[Step]
    formula: str


def _attempt(numbers: list[int], settings: CountdownData, rng: random.Random) -> _Attempt | None:
    """An attempt on the numbers; None if a step leaves the whole numbers in the range.

    Two results at a time are combined until one is left.
    """
    count = len(numbers) if settings.use == "all" else rng.randint(2, len(numbers))
    results = [(number, str(number)) for number in rng.sample(numbers, count)]
    steps: list[Step] = []
    while len(results) > 1:
        (left, one), (right, other) = (results.pop(rng.randrange(len(results))) for _ in range(2))
        sign = rng.choice("+-*/")
        value = _result(left, sign, right, settings.largest_target)
        if value is None:
            return None
        steps.append((left, sign, right, value))
        results.append((value, sign.join(part if part.isdigit() else f"({part})" for part in (one, other))))
    [(value, formula)] = results
    return _Attempt(value, steps, formula)


def _result(left: int, sign: str, right: int, largest: int) -> int | None:
    """The result of a step; None if it isn't a whole number from 1 to `largest`."""
    if sign == "/" and left % right:
        return None
    value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
    return value if 0 < value <= largest else None


# In the style `search` false starts precede each step. A line is a step with the numbers that are then left
# ("8-3=5: 4 6 5"). Two numbers are combined in some ways that miss the target ("6-5=1 no"), and the search then goes
# back to the numbers at which it started ("back: 3 4 6 8").

#: No further false start follows once they have as many characters as a number drawn from this range. Most characters
#: are tokens of their own.
_FALSE_STARTS = (100, 200)
#: The number of false starts that are drawn at most; of few numbers there are few different ones.
_DRAWN = 40


def _search(steps: list[Step], goal: Goal, largest: int, rng: random.Random) -> list[str]:
    """The lines of a search for the target that ends with these steps."""
    states = [list(goal.numbers)]
    for step in steps:
        states.append(_left_after(states[-1], step))
    starts: list[list[str]] = [[] for _ in steps]
    length, most = 0, rng.randint(*_FALSE_STARTS)
    for _ in range(_DRAWN):
        place = rng.randrange(len(steps))
        start = _false_start(states[place], goal.target, largest, rng)
        if start and start not in starts[place]:
            starts[place].append(start)
            length += len(start)
        if length >= most:
            break
    return [line for place, step in enumerate(steps) for line in (*starts[place], _line(step, states[place + 1]))]


def _false_start(state: list[int], target: int, largest: int, rng: random.Random) -> str:
    """Steps from the numbers of a state to results other than the target; empty if the draw has none."""
    start, lines = state, list[str]()
    while len(state) > 2:
        if not (steps := _steps(rng.sample(state, 2), largest)):
            return ""
        step = rng.choice(steps)
        state = _left_after(state, step)
        lines.append(_line(step, state))
    misses = [step for step in _steps(state, largest) if step[-1] != target]
    if not misses:
        return ""
    shown = rng.sample(misses, rng.randint(1, len(misses))) if lines else [rng.choice(misses)]
    lines += [f"{_line(step, [])} no" for step in shown]
    return "\n".join([*lines, f"back: {_text(start)}"] if len(start) > 2 else lines)


def _steps(pair: list[int], largest: int) -> list[Step]:
    """All steps that combine two numbers."""
    high, low = max(pair), min(pair)
    results = [(sign, _result(high, sign, low, largest)) for sign in "+-*/"]
    return [(high, sign, low, value) for sign, value in results if value is not None]


def _left_after(state: list[int], step: Step) -> list[int]:
    left, _, right, value = step
    rest = list(state)
    rest.remove(left)
    rest.remove(right)
    return [*rest, value]


def _line(step: Step, state: list[int]) -> str:
    left, sign, right, value = step
    return f"{left}{sign}{right}={value}" + (f": {_text(state)}" if len(state) > 1 else "")


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


# Problems of reasoning-gym, whose records have all that the task's scorer reads.

#: For some tasks the library precomputes as many problems at once; this number is its default.
_AT_ONCE = 500
#: Tasks whose problem is the same one with its numbers in another order, in any of the library's wordings.
_OF_NUMBERS = ("countdown", "puzzle24")


def _of_reasoning_gym(settings: ReasoningGymData, rng: random.Random) -> Iterator[Draw]:
    levels: list[int | None] = [*settings.levels] or [None]
    drawn = {level: _entries(settings, level, rng) for level in levels}
    while True:
        yield next(drawn[rng.choice(levels)])


def _entries(settings: ReasoningGymData, level: int | None, rng: random.Random) -> Iterator[Draw]:
    """The problems of one level, without end."""
    name, arguments, task, place = settings.task, settings.arguments, None, 0
    about = {"task": name, "arguments": arguments, "level": level, "version": installed_version("reasoning-gym")}
    while True:
        try:
            task = task or expressions.task_of(name, arguments, level, rng.randrange(2**31), _AT_ONCE)
            entry = task[place]
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"origin: reasoning-gym can't make problems of the task {name}: {error}") from None
        task, place = (task, place + 1) if place + 1 < _AT_ONCE else (None, 0)
        question, metadata = " ".join(entry["question"].split()), entry["metadata"]
        numbers = (*sorted(metadata["numbers"]), metadata.get("target")) if name in _OF_NUMBERS else None
        yield Draw(question, numbers or question, partial(_gym_record, entry, about))


def _gym_record(entry: Mapping[str, Any], about: Mapping[str, Any], split: Split) -> Record:
    given = {key: entry[key] for key in ("question", "answer", "metadata")}
    record: Record = json.loads(json.dumps({**given, **about}, default=str))
    answer = record["answer"]
    if answer is not None and expressions.points_of(answer, record) != 1:
        raise DataError(
            f"origin: the scorer of the task {about['task']} doesn't give its own answer {answer[:40]!r} one point "
            "after its problem was written as JSON; choose another task"
        )
    return record
