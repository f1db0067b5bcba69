"""Seeded word problems in which the obvious short way is wrong: chains of comparisons, some of them turned around.

"Mia has 12 plums. Mia has 4 more than Tom. How many plums has Tom?" asks for 12-4, and its words suggest 12+4. A hasty
solution computes a turned comparison in the order of its words. A training solution does so at each turned comparison
with probability `hasty`, and is right only if it never does. A policy that imitates such solutions knows both ways at
each step, and reinforcement learning can find that the careful one is rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from qerl.data.generated_splits import make_splits
from qerl.data.records import Record
from qerl.settings.data import ComparisonData, Split

#: The largest number of a problem, on the careful and on the hasty way.
LARGEST = 60

_NAMES = ["Mia", "Tom", "Ann", "Leo", "Eva", "Max", "Zoe", "Sam", "Ivy", "Ben", "Lea", "Dan"]
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

    def way(self, hasty: Sequence[bool]) -> list[tuple[str, int]]:
        """Each step with its result. Raises `_OutOfRangeError` unless all are whole numbers from 1 to `LARGEST`."""
        steps, value = [], self.start
        for name, clause, is_hasty in zip(self.names[1:], self.clauses, hasty, strict=True):
            sign = clause.sign(is_hasty)
            result = _result(value, sign, clause.amount)
            if result is None or not 0 < result <= LARGEST:
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


def generate(settings: ComparisonData) -> dict[Split, list[Record]]:
    """Make the splits' records; no two records, of one split or of two, share a question."""
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
        problem = ComparisonProblem(names, rng.choice(_NOUNS), rng.randint(2, LARGEST), clauses)
        if problem.misleads:
            yield problem


def _clause(turned: float, rng: random.Random) -> Clause:
    word = rng.choice(list(_SIGNS))
    return Clause(word, 2 if word in ("twice", "half") else rng.randint(2, 9), rng.random() < turned)


def _result(value: int, sign: str, amount: int) -> int | None:
    if sign == "/":
        return value // amount if value % amount == 0 else None
    return {"+": value + amount, "-": value - amount, "*": value * amount}[sign]
