"""A game of several turns: the policy guesses a number, and hears whether the number is higher or lower.

    environment: {name: "guess:Guess", turns: 4}    # in a run file, with this folder as the working directory

The number is the answer of the problem, so that all completions of a group play the same game.
"""

from __future__ import annotations

import re

from qerl.data.records import Problem
from qerl.rl.environments import Turn


class Guess:
    """Rewards the right guess with 1, and one that contradicts what was heard, or is no number, with -0.5."""

    def __init__(self, higher: str = "higher", lower: str = "lower") -> None:
        self.higher, self.lower = higher, lower

    def reset(self, problem: Problem) -> None:
        """Begin a game without a message."""
        self.number, self.least, self.most = int(problem.answer), float("-inf"), float("inf")

    def step(self, text: str) -> Turn:
        """Say where the number is, as seen from the first number of a turn."""
        found = re.search(r"\d+", text)
        if found is None:
            return Turn(reward=-0.5, done=True)
        guess = int(found[0])
        if guess == self.number:
            return Turn(reward=1.0, done=True)
        penalty = 0.0 if self.least < guess < self.most else -0.5
        if guess < self.number:
            self.least, word = max(self.least, guess), self.higher
        else:
            self.most, word = min(self.most, guess), self.lower
        return Turn([{"role": "user", "content": word}], reward=penalty)
