"""The shared parts of all jobs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict


class KilledError(RuntimeError):
    """The kernel ended a process of a job, perhaps for its memory. A new start continues from what it kept."""


class Lock(NamedTuple):
    """A file that one process at a time holds."""

    folder: Path
    name: str


class Part(BaseModel):
    """A part of a job: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Job(Part):
    """One call of `qerl rule`. Every value is given: a job has no defaults."""

    #: Whether the process keeps to the cores that belong to its GPUs.
    own_cores: ClassVar[bool] = False
    #: Libraries that the job's function looks for and does without: to import them takes seconds.
    without: ClassVar[Collection[str]] = ()

    out: Path
    """Where the result goes: a file, or a folder of files."""

    @property
    def gpus(self) -> int:
        """GPUs that the job takes."""
        return 0

    @property
    def lock(self) -> Lock | None:
        """The lock that the job must hold, because it continues what a killed job left."""
        return None

    @property
    def undeciding(self) -> Any:
        """Fields that don't decide the result, as pydantic's `exclude`."""
        return None

    @property
    def deciding(self) -> str:
        """The fields that decide the result, as JSON. If they don't change, the result is kept."""
        return self.model_dump_json(exclude=self.undeciding)
