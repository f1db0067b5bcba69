"""The shared parts of all jobs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict


class KilledError(RuntimeError):
    """A process of a job was killed, perhaps for lack of memory. A new start continues from its state."""


class Lock(NamedTuple):
    """A file that only one process at a time can lock."""

    folder: Path
    name: str


class Part(BaseModel):
    """A part of a job: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Job(Part):
    """The input of one call of `qerl rule`. A job has no default values."""

    #: Whether the process runs only on the CPU cores that belong to its GPUs.
    own_cores: ClassVar[bool] = False
    #: Optional libraries that the job doesn't need, and whose import, which takes seconds, is prevented.
    without: ClassVar[Collection[str]] = ()

    out: Path
    """The path of the result: a file, or a folder of files."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that the job needs."""
        return 0

    @property
    def joins_free_memory(self) -> bool:
        """Whether the job's process joins free parts of GPU memory (`qerl.host.allocator`)."""
        return False

    @property
    def lock(self) -> Lock | None:
        """The lock that the job must hold, because it continues the state of a killed job; None if it has none."""
        return None

    @property
    def undeciding(self) -> Any:
        """Fields that don't decide the result, as pydantic's `exclude`."""
        return None

    @property
    def deciding(self) -> str:
        """The fields that decide the result, as JSON. If they don't change, the result is kept."""
        return self.model_dump_json(exclude=self.undeciding)
