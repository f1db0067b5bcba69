"""Countdown: problems to reach a target from given numbers with + - * /, graded by a formula's value and numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from qerl.data.formulas import Formula, canonical, leaves, parse_formula, value
from qerl.settings.data import CountdownUse

_GOAL = re.compile(r"([0-9]+) = (all|some) of ([0-9]+(?: [0-9]+)*)")
_STATED = re.compile(r"#### ([^\n]*)")


@dataclass(frozen=True)
class Goal:
    """The goal of a formula. As text, such as `20 = all of 3 4 8`, it is the answer of a problem."""

    target: int
    numbers: tuple[int, ...]
    use: CountdownUse = "all"

    @staticmethod
    def read(text: str) -> Goal:
        """The goal from its text. Raises ValueError for another text."""
        match = _GOAL.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no goal of a countdown problem, such as '20 = all of 3 4 8'")
        [use] = [word for word in get_args(CountdownUse) if word == match.group(2)]
        return Goal(int(match.group(1)), tuple(map(int, match.group(3).split())), use)

    def __str__(self) -> str:
        return f"{self.target} = {self.use} of {' '.join(map(str, self.numbers))}"

    @property
    def question(self) -> str:
        """The goal as a question."""
        return f"Use {self.use} of {', '.join(map(str, self.numbers))} to make {self.target}."

    def is_reached_by(self, formula: Formula) -> bool:
        """Whether the formula has the target as its value and uses the numbers as the goal says."""
        used, given = Counter(leaves(formula)), Counter(self.numbers)
        allowed = used == given if self.use == "all" else used <= given
        return allowed and value(formula) == self.target


def stated_formula(spoken: str) -> tuple[str, int] | None:
    """The formula after the first `#### `, to the end of its line, and the index after it."""
    match = _STATED.search(spoken)
    if match is None or parse_formula(match.group(1)) is None:
        return None
    return match.group(1).strip(), match.end()


def solves(formula: str, goal: str) -> bool:
    """Whether a formula, as text, reaches a goal, as text."""
    parsed = parse_formula(formula)
    return parsed is not None and Goal.read(goal).is_reached_by(parsed)


def solution_key(formula: str) -> str:
    """The canonical form of a formula, by which distinct solutions are counted."""
    parsed = parse_formula(formula)
    if parsed is None:
        raise ValueError(f"{formula!r} is no formula")
    return canonical(parsed)
