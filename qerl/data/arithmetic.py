"""Seeded arithmetic problems with worked solutions, in the three record formats.

A problem of level k is a chain of k operations on small whole numbers. Its solution is written step by step
("Monday 3+4=7", one labelled step per line) or, for the share `terse` of the training split, states the final answer at
once. Both are correct, but a small model can't compute several steps at once. A policy trained on the mixture is right
far more often when it writes the steps, and reinforcement learning can find that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from qerl.data.generated_splits import make_splits
from qerl.data.records import Record
from qerl.settings.data import Generated, RecordFormat, Split

#: Levels by format, drawn uniformly; a level is the number of operations.
LEVELS: dict[RecordFormat, tuple[int, ...]] = {"gsm8k": (2, 3, 4), "math": (1, 2, 3, 4, 5), "aime": (2, 3, 4)}
#: The largest intermediate result; a model of a million parameters learns two-digit arithmetic within minutes.
LARGEST = 50

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


def generate(record_format: RecordFormat, settings: Generated) -> dict[Split, list[Record]]:
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
    signs = ["+"] * (value + small <= LARGEST) + ["-"] * (value > small)
    if value >= 2 and 3 * value <= LARGEST:
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
