"""Runs that end early, out of memory, over their time limit or diverged; an experiment may count these as results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from qerl.results.paths import RUN
from qerl.results.schema import DIVERGED, NO_MEMORY, OK, RunResult
from qerl.results.store import read
from qerl.rollout.sampler import NotFiniteError

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


# No failure but memory, time and divergence is caught (on_failure: row). A job can't know that a machine was repaired,
# so delete the folder to try again; a higher time_limit tries again by itself. The limit counts the seconds of steps
# over all attempts.
class TimeLimitError(RuntimeError):
    """A run has exceeded its time limit. The message is one sentence for the user."""


class DivergedError(ValueError):
    """A gradient or the policy's entropy isn't finite. The message is one sentence for the user."""


@dataclass(frozen=True)
class Failure:
    """A failure: its kind, as tables show it, and its message."""

    kind: str
    reason: str


_KINDS: dict[type[Exception], str] = {
    TimeLimitError: "timeout",
    DivergedError: DIVERGED,
    NotFiniteError: DIVERGED,
}


@contextmanager
def noted(work: Path, time_limit: float | None) -> Iterator[None]:
    """Write a failure that can be a result to a note in `work`, and re-raise it. Each process writes its own note."""
    try:
        yield
    except (*OUT_OF_MEMORY, TimeLimitError, DivergedError, NotFiniteError) as error:
        # By a note, because the process that started this one sees no exception of it, only its exit status.
        kind = _KINDS.get(type(error), NO_MEMORY)
        kind += f" of {time_limit:g} h" if isinstance(error, TimeLimitError) else ""
        work.mkdir(parents=True, exist_ok=True)
        (work / f"failure-{os.getpid()}.json").write_text(
            json.dumps(asdict(Failure(kind, str(error)))), encoding="utf-8"
        )
        raise


def forget(work: Path) -> None:
    """Remove the notes of earlier attempts."""
    for note in work.glob("failure-*.json"):
        note.unlink()


def failure(work: Path) -> Failure | None:
    """The failure that the processes noted for this attempt, if any."""
    # Several processes may have noted one; the first note tells enough.
    notes = sorted(work.glob("failure-*.json"))
    return Failure(**json.loads(notes[0].read_text(encoding="utf-8"))) if notes else None


def failed(policy: Path) -> str | None:
    """The reason in run.json why a run left no trained policy. None if there is a policy."""
    file = policy.parent / RUN
    status = read(RunResult, file).status if file.is_file() else OK
    return None if status == OK else status
