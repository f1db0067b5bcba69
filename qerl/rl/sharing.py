"""The sharing of a step's groups among the processes of a run, by the expected length of their completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qerl.rollout.sampler import BatchPart


@dataclass
class ExpectedLengths:
    """The length of completions that a problem is expected to get.

    It is the mean of the problem's latest group. A problem without one counts as its prompt's length, times the ratio
    of completions to prompts so far.
    """

    _of_problem: dict[str, float] = field(default_factory=dict)
    _prompts: int = 0
    _completions: float = 0

    def see(self, problem: str, prompt: int, completions: Sequence[int]) -> None:
        """Take note of a group: the tokens of its prompt and of its completions."""
        mean = sum(completions) / len(completions)
        self._of_problem[problem] = mean
        self._prompts += prompt
        self._completions += mean

    def of(self, problem: str, prompt: int) -> float:
        """The expected tokens of a completion of the problem, whose prompt has `prompt` tokens."""
        ratio = self._completions / self._prompts if self._prompts else 1.0
        return self._of_problem.get(problem, prompt * ratio)


def shares(lengths: Sequence[float], processes: int, most: int) -> tuple[list[list[int]], list[int]]:
    """The groups with which each process begins, at most `most` of them, and those that wait for any; by their indices.

    The longest goes first, to the process with the least expected length among those with room. Each process has room
    for an equal share of all groups, rounded up.
    """
    order = sorted(range(len(lengths)), key=lambda group: -lengths[group])
    each = min(most, math.ceil(len(lengths) / processes))
    begun, waiting = order[: each * processes], order[each * processes :]
    initial: list[list[int]] = [[] for _ in range(processes)]
    expected = [0.0] * processes
    for group in begun:
        process = min((p for p in range(processes) if len(initial[p]) < each), key=expected.__getitem__)
        initial[process].append(group)
        expected[process] += lengths[group]
    return initial, waiting


@dataclass(frozen=True)
class WaitingGroups:
    """Groups that no process has begun. Each process takes the next ones when it has room, by a count that all share.

    A process that is lost after it took groups is missed where completions are exchanged, as any lost process is.
    """

    waiting: Sequence[int]
    processes: int
    #: Adds to the number of groups that are taken, and returns the sum.
    take: Callable[[int], int]

    def more(self, most: int) -> Sequence[int]:
        """At most `most` groups, and at most this process's share of what is left; none if all are taken."""
        size = 1
        if most > 1:
            left = len(self.waiting) - self.take(0)
            size = min(most, max(1, math.ceil(left / self.processes)))
        end = self.take(size)
        return self.waiting[end - size : end]


def part_of(
    rank: int, processes: int, lengths: Sequence[float], most: int, counter: Callable[[], Callable[[int], int]]
) -> BatchPart:
    """The groups that a process draws, by their expected lengths; at most `most` fit its sampler at a time.

    `counter` makes the count that all processes share, if groups wait.
    """
    initial, waiting = shares(lengths, processes, most)
    if not waiting:
        return BatchPart(initial[rank], lambda _: ())
    return BatchPart(initial[rank], WaitingGroups(waiting, processes, counter()).more)
