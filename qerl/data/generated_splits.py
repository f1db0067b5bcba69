"""Splits of generated problems, without repeated questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from qerl.data.records import DataError, Record
from qerl.settings.data import GeneratedSplits, Split

#: The number of consecutive draws without a new question after which the generator gives up.
_PATIENCE = 1000


class GeneratedProblem(Protocol):
    """A problem that a generator draws."""

    @property
    def question(self) -> str:
        """The question, which identifies the problem."""
        ...


D = TypeVar("D", bound=GeneratedProblem)


def make_splits(
    settings: GeneratedSplits, draw: Callable[[], D], record: Callable[[D, Split], Record]
) -> dict[Split, list[Record]]:
    """The splits' records. `draw` makes a problem, `record` its record once its question is known to be new."""
    seen: set[str] = set()
    sizes: dict[Split, int] = {"test": settings.test, "validation": settings.validation, "train": settings.train}
    return {split: [record(problem, split) for problem in _unseen(draw, size, seen)] for split, size in sizes.items()}


def _unseen(draw: Callable[[], D], count: int, seen: set[str]) -> Iterator[D]:
    for _ in range(count):
        problem = next((p for p in (draw() for _ in range(_PATIENCE)) if p.question not in seen), None)
        if problem is None:
            raise DataError("there are no more problems to generate; ask for fewer (train, validation, test)")
        seen.add(problem.question)
        yield problem
