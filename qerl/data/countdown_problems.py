"""Seeded countdown problems: reach a target from given numbers, which most targets allow in several ways.

A training solution writes its steps and then the formula ("8-3=5", "5*4=20", "#### (8-3)*4"). For the share `missed` it
computes correctly but misses the target. A policy that imitates such solutions writes formulas of the right form that
seldom reach the target, so a single completion is mostly wrong, but one of many is right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from qerl.data.countdown import Goal
from qerl.data.generated_splits import make_splits
from qerl.data.records import Record
from qerl.settings.data import CountdownData, Split


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


def generate(settings: CountdownData) -> dict[Split, list[Record]]:
    """Make the splits' records; no two records, of one split or of two, share a question."""
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
