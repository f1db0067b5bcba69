"""A calculator as a tool: the policy may write `2+3=` and reads the result in a message of the role `tool`.

    environment: {name: "calculator:Calculator", turns: 4}    # in a run file, with this folder as the working directory

The grader's part `correct` rewards the answer of the last turn (docs/runs.md, Turns and tools).
"""

from __future__ import annotations

import operator
import re

from qerl.data.records import Problem
from qerl.rl.environments import Turn

#: A call: two numbers with an operator, and an equals sign at the end of the turn.
CALL = re.compile(r"(-?\d+)\s*([-+*])\s*(-?\d+)\s*=\s*$")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Replies to a call with its result, and ends a conversation at a turn without one; `fee` is what a call costs."""

    def __init__(self, fee: float = 0.0) -> None:
        self.fee = fee

    def reset(self, problem: Problem) -> None:
        """Begin without a message: the problem's prompt says what there is to say."""

    def step(self, text: str) -> Turn:
        """Evaluate the call at the end of a turn."""
        call = CALL.search(text)
        if call is None:
            return Turn(done=True)
        first, sign, second = call.groups()
        result = OPERATORS[sign](int(first), int(second))
        return Turn([{"role": "tool", "content": str(result)}], reward=-self.fee)
