"""Seeded problems that are generated: arithmetic, word problems with comparisons, and countdown."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

from qerl.data.grading import Goal
from qerl.data.records import DataError, Record
from qerl.settings.data import ComparisonData, CountdownData, Generated, GeneratedSplits, RecordFormat, Split

# Splits of generated problems, without repeated questions, and without a problem of another split in another guise.

#: The number of consecutive draws without a new question after which the generator gives up.
_PATIENCE = 1000


class GeneratedProblem(Protocol):
    """A problem that a generator draws."""

    @property
    def question(self) -> str:
        """The question; no two problems have the same."""
        ...

    @property
    def core(self) -> object:
        """What the problem is apart from the order of its numbers, its names or its nouns; no two splits share one."""
        ...


D = TypeVar("D", bound=GeneratedProblem)


def make_splits(
    settings: GeneratedSplits, draw: Callable[[], D], record: Callable[[D, Split], Record]
) -> dict[Split, list[Record]]:
    """The splits' records. `draw` makes a problem, `record` its record once it is known to be new.

    No two records share a question. No record of one split has the core of a record of another split, and no two
    records for testing or validation have one core. Training may have a core again, as it may in real data.
    """
    seen: set[object] = set()
    held_out: set[object] = set()
    sizes: dict[Split, int] = {"test": settings.test, "validation": settings.validation, "train": settings.train}
    splits: dict[Split, list[Record]] = {}
    for split, size in sizes.items():
        splits[split] = []
        for _ in range(size):
            problem = _unseen(draw, seen, held_out)
            seen.add(problem.question)
            if split != "train":
                held_out.add(problem.core)
            splits[split].append(record(problem, split))
    return splits


def _unseen(draw: Callable[[], D], seen: set[object], held_out: set[object]) -> D:
    for _ in range(_PATIENCE):
        problem = draw()
        if problem.question not in seen and problem.core not in held_out:
            return problem
    raise DataError("there are no more problems to generate; ask for fewer (train, validation, test)")


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
_OBJECTS = [
    "apples",
    "books",
    "coins",
    "cards",
    "shells",
    "pens",
    "marbles",
    "stamps",
    "eggs",
    "plums",
    "stones",
    "beads",
]
_GAIN = ["buys", "finds", "gets", "wins", "collects", "picks"]
_LOSS = ["loses", "sells", "gives", "uses", "drops", "breaks"]
_TIMES = {2: "doubles", 3: "triples"}
#: Labels of the operations in problem and solution, by which a small model finds the next step.
_LABELS: dict[RecordFormat, tuple[str, ...]] = {
    "gsm8k": ("Monday ", "Tuesday ", "Wednesday ", "Thursday "),
    "math": ("A:", "B:", "C:", "D:", "E:"),
    "aime": ("b=", "c=", "d=", "e="),
}


@dataclass(frozen=True)
class Step:
    """One operation: `left` `sign` `right` = `result`."""

    left: int
    sign: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.result}"


@dataclass(frozen=True)
class WorkedChain:
    """A chain of operations with the question that asks for its result."""

    question: str
    steps: list[Step]

    @property
    def core(self) -> object:
        """The question: chains are few, so that splits share some in other words."""
        return self.question


# A merely under-trained policy of a million parameters gains little in twenty RL steps. So solutions have two correct
# styles, of which the policy imitates both: nearly always right step by step, mostly wrong with the answer at once.
# GRPO finds the former. It imitates what RL does to a real model and is no evidence about real models.
def generate_arithmetic(record_format: RecordFormat, settings: Generated) -> dict[Split, list[Record]]:
    """Make the splits' records; no two records, of one split or of two, share a question."""
    rng = random.Random(f"{settings.seed} {record_format}")

    def draw() -> WorkedChain:
        steps = _chain(rng.choice(LEVELS[record_format]), rng)
        return WorkedChain(_QUESTIONS[record_format](steps, rng), steps)

    def record(problem: WorkedChain, split: Split) -> Record:
        terse = settings.terse if split == "train" else 0.0
        return _record(record_format, problem.question, problem.steps, is_terse=rng.random() < terse)

    return make_splits(settings, draw, record)


def _record(record_format: RecordFormat, question: str, steps: list[Step], is_terse: bool) -> Record:
    answer = steps[-1].result
    final = f"#### {answer}" if record_format == "gsm8k" else f"\\boxed{{{answer}}}"
    lines = [f"{label}{step}" for label, step in zip(_LABELS[record_format], steps, strict=False)]
    solution = final if is_terse else "\n".join([*lines, final])
    if record_format == "gsm8k":
        return {"question": question, "answer": solution}
    if record_format == "math":
        return {"problem": question, "solution": solution, "level": f"Level {len(steps)}"}
    return {"problem": question, "solution": solution, "answer": str(answer)}


def _chain(length: int, rng: random.Random) -> list[Step]:
    steps: list[Step] = []
    value = rng.randint(2, 12)
    for _ in range(length):
        steps.append(_step(value, rng))
        value = steps[-1].result
    return steps


def _step(value: int, rng: random.Random) -> Step:
    small = rng.randint(2, 9)
    signs = ["+"] * (value + small <= LARGEST_VALUE) + ["-"] * (value > small)
    if value >= 2 and 3 * value <= LARGEST_VALUE:
        signs.append("*")
    sign = rng.choice(signs)
    right = rng.choice(list(_TIMES)) if sign == "*" else small
    return Step(value, sign, right, {"+": value + right, "-": value - right, "*": value * right}[sign])


def _story(steps: list[Step], rng: random.Random) -> str:
    """A diary: "Mia has 7 apples. Monday buys 5. Tuesday doubles them. How many apples has Mia now?"."""
    name, noun = rng.choice(_NAMES), rng.choice(_OBJECTS)
    parts = [f"{name} has {steps[0].left} {noun}."]
    for label, step in zip(_LABELS["gsm8k"], steps, strict=False):
        verb = {"+": rng.choice(_GAIN), "-": rng.choice(_LOSS), "*": _TIMES.get(step.right)}[step.sign]
        parts.append(f"{label}{verb} {'them' if step.sign == '*' else step.right}.")
    return " ".join([*parts, f"How many {noun} has {name} now?"])


def _number_game(steps: list[Step], rng: random.Random) -> str:
    """Instructions: "Start with 7. A: add 5. B: times 2. What is the result?"."""
    verbs = {"+": ("add", "plus"), "-": ("subtract", "minus"), "*": ("multiply by", "times")}
    parts = [f"{rng.choice(('Start with', 'Take'))} {steps[0].left}."]
    for label, step in zip(_LABELS["math"], steps, strict=False):
        parts.append(f"{label} {rng.choice(verbs[step.sign])} {step.right}.")
    return " ".join([*parts, rng.choice(("What is the result?", "What number is it?"))])


def _definitions(steps: list[Step], rng: random.Random) -> str:
    """Definitions: "Let a=7, b=a+5, c=b*2. Find c."."""
    names = "abcde"
    parts = [f"a={steps[0].left}"]
    for label, old, step in zip(_LABELS["aime"], names, steps, strict=False):
        parts.append(f"{label}{old}{step.sign}{step.right}")
    return (
        f"{rng.choice(('Let', 'Suppose'))} {', '.join(parts)}. {rng.choice(('Find', 'Compute'))} {names[len(steps)]}."
    )


_QUESTIONS: dict[RecordFormat, Callable[[list[Step], random.Random], str]] = {
    "gsm8k": _story,
    "math": _number_game,
    "aime": _definitions,
}


# Seeded word problems in which the obvious short way is wrong: chains of comparisons, some of them turned around.
#
# "Mia has 12 plums. Mia has 4 more than Tom. How many plums has Tom?" asks for 12-4, and its words suggest 12+4. A
# hasty solution computes a turned comparison in the order of its words. A training solution does so at each turned
# comparison with probability `hasty`, and is right only if it never does. A policy that imitates such solutions knows
# both ways at each step, and reinforcement learning can find that the careful one is rewarded.

#: The largest number of a problem, on the careful and on the hasty way.
LARGEST_COUNT = 60

_NOUNS = ["plums", "books", "coins", "cards", "shells", "pens", "beads", "stamps"]
#: The operation that the words of a comparison suggest.
_SIGNS = {"more": "+", "fewer": "-", "twice": "*", "half": "/"}
_UNDONE = {"+": "-", "-": "+", "*": "/", "/": "*"}


class _OutOfRangeError(ArithmeticError):
    """A result that no problem may have."""


@dataclass(frozen=True)
class Clause:
    """A comparison of a person with the previous one, by `word` and `amount`; if `turned`, the previous is named
    first.
    """

    word: str
    amount: int
    turned: bool

    def text(self, before: str, after: str) -> str:
        """The sentence, from the person whose number is known to the one whose number is asked."""
        first, second = (before, after) if self.turned else (after, before)
        if self.word in ("more", "fewer"):
            return f"{first} has {self.amount} {self.word} than {second}."
        return f"{first} has {self.word} as many as {second}."

    def sign(self, hasty: bool) -> str:
        """The operation on the known number: the right one, or the one that the order of words suggests."""
        sign = _SIGNS[self.word]
        return _UNDONE[sign] if self.turned and not hasty else sign


@dataclass(frozen=True)
class ComparisonProblem:
    """A chain of comparisons that begins with a known number."""

    names: list[str]
    noun: str
    start: int
    clauses: list[Clause]

    @property
    def question(self) -> str:
        """The problem in words."""
        pairs = zip(self.names, self.names[1:], self.clauses, strict=False)
        sentences = [clause.text(before, after) for before, after, clause in pairs]
        asked = f"How many {self.noun} has {self.names[-1]}?"
        return " ".join([f"{self.names[0]} has {self.start} {self.noun}.", *sentences, asked])

    @property
    def core(self) -> object:
        """Its numbers and comparisons, without names and nouns."""
        return self.start, tuple(self.clauses)

    def way(self, hasty: Sequence[bool]) -> list[tuple[str, int]]:
        """Each step with its result. Raises `_OutOfRangeError` unless all are whole numbers from 1 to
        `LARGEST_COUNT`.
        """
        steps, value = [], self.start
        for name, clause, is_hasty in zip(self.names[1:], self.clauses, hasty, strict=True):
            sign = clause.sign(is_hasty)
            result = _result(value, sign, clause.amount)
            if result is None or not 0 < result <= LARGEST_COUNT:
                raise _OutOfRangeError
            steps.append((f"{name} {value}{sign}{clause.amount}={result}", result))
            value = result
        return steps

    @property
    def misleads(self) -> bool:
        """Whether every way can be computed, and the short one ends elsewhere than the careful one."""
        try:
            careful, *_, short = (self.way(hasty) for hasty in product((False, True), repeat=len(self.clauses)))
        except _OutOfRangeError:
            return False
        return careful[-1][1] != short[-1][1]


def generate_comparisons(settings: ComparisonData) -> dict[Split, list[Record]]:
    """Make the splits' records (`make_splits`)."""
    rng = random.Random(f"{settings.seed} comparisons")
    problems = _problems(settings, rng)

    def record(problem: ComparisonProblem, split: Split) -> Record:
        share = settings.hasty if split == "train" else 0.0
        careful, taken = (problem.way([rng.random() < p for _ in problem.clauses]) for p in (0.0, share))
        solution = "\n".join([*(step for step, _ in taken), f"\\boxed{{{taken[-1][1]}}}"])
        level = f"Level {len(problem.clauses)}"
        return {"problem": problem.question, "answer": str(careful[-1][1]), "solution": solution, "level": level}

    return make_splits(settings, lambda: next(problems), record)


def _problems(settings: ComparisonData, rng: random.Random) -> Iterator[ComparisonProblem]:
    while True:
        count = rng.choice(settings.clauses)
        clauses = [_clause(settings.turned, rng) for _ in range(count)]
        names = rng.sample(_NAMES, count + 1)
        problem = ComparisonProblem(names, rng.choice(_NOUNS), rng.randint(2, LARGEST_COUNT), clauses)
        if problem.misleads:
            yield problem


def _clause(turned: float, rng: random.Random) -> Clause:
    word = rng.choice(list(_SIGNS))
    return Clause(word, 2 if word in ("twice", "half") else rng.randint(2, 9), rng.random() < turned)


def _result(value: int, sign: str, amount: int) -> int | None:
    if sign == "/":
        return value // amount if value % amount == 0 else None
    return {"+": value + amount, "-": value - amount, "*": value * amount}[sign]


# Seeded countdown problems: reach a target from given numbers, which most targets allow in several ways.
#
# A training solution writes its steps and then the formula ("8-3=5", "5*4=20", "#### (8-3)*4"). For the share `missed`
# it computes correctly but misses the target. A policy that imitates such solutions writes formulas of the right form
# that seldom reach the target, so a single completion is mostly wrong, but one of many is right.


@dataclass(frozen=True)
class _Result:
    """An intermediate result, with the formula that gives it."""

    value: int
    formula: str

    @property
    def operand(self) -> str:
        """The formula as a part of another one."""
        return self.formula if self.formula.isdigit() else f"({self.formula})"


@dataclass(frozen=True)
class Attempt:
    """A way to combine numbers: its steps and the formula of all of them together."""

    steps: list[str]
    result: _Result

    @property
    def text(self) -> str:
        """The attempt as a worked solution."""
        return "\n".join([*self.steps, f"#### {self.result.formula}"])


@dataclass(frozen=True)
class CountdownProblem:
    """A goal with an attempt that reaches it."""

    goal: Goal
    attempt: Attempt

    @property
    def question(self) -> str:
        """The goal as a question."""
        return self.goal.question

    @property
    def core(self) -> object:
        """Its numbers in order of size, and its target."""
        return tuple(sorted(self.goal.numbers)), self.goal.target


def generate_countdown(settings: CountdownData) -> dict[Split, list[Record]]:
    """Make the splits' records (`make_splits`)."""
    rng = random.Random(f"{settings.seed} countdown")

    def record(problem: CountdownProblem, split: Split) -> Record:
        misses = split == "train" and rng.random() < settings.missed
        attempt = (_miss(problem, settings, rng) if misses else None) or problem.attempt
        goal = problem.goal
        return {"numbers": list(goal.numbers), "target": goal.target, "use": goal.use, "solution": attempt.text}

    return make_splits(settings, lambda: _problem(settings, rng), record)


def _problem(settings: CountdownData, rng: random.Random) -> CountdownProblem:
    while True:
        numbers = [rng.randint(1, settings.largest) for _ in range(rng.choice(settings.numbers))]
        attempt = _attempt(numbers, settings, rng)
        if attempt is not None:
            return CountdownProblem(Goal(attempt.result.value, tuple(numbers), settings.use), attempt)


def _miss(problem: CountdownProblem, settings: CountdownData, rng: random.Random) -> Attempt | None:
    """An attempt on the same numbers with another value; None if a few draws find none."""
    numbers = list(problem.goal.numbers)
    drawn = (_attempt(numbers, settings, rng) for _ in range(50))
    return next((a for a in drawn if a is not None and a.result.value != problem.goal.target), None)


def _attempt(numbers: list[int], settings: CountdownData, rng: random.Random) -> Attempt | None:
    """Combine two results at a time until one is left; None if a step leaves the whole numbers in the range."""
    kept = len(numbers) if settings.use == "all" else rng.randint(2, len(numbers))
    results = [_Result(number, str(number)) for number in rng.sample(numbers, kept)]
    steps: list[str] = []
    while len(results) > 1:
        left, right = (results.pop(rng.randrange(len(results))) for _ in range(2))
        sign = rng.choice("+-*/")
        value = _combined(left.value, sign, right.value)
        if value is None or not 0 < value <= settings.largest_target:
            return None
        steps.append(f"{left.value}{sign}{right.value}={value}")
        results.append(_Result(value, f"{left.operand}{sign}{right.operand}"))
    return Attempt(steps, results[0])


def _combined(left: int, sign: str, right: int) -> int | None:
    if sign == "/":
        return left // right if left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[sign]
