"""The shared parts of all stored results: strictness, stamp, numbers that keep their digits, and statuses.

A model writes the keys that it was given and no others, so that a file has only its job's content. Reading refuses keys
that the model lacks.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SerializationInfo, model_validator

from qerl.provenance.stamp import stamp

#: The status of a point that was measured; any other text is its error.
OK = "ok"
#: The status of a point for which memory ran out.
NO_MEMORY = "out of memory"
#: The beginning of the status of a run that diverged.
DIVERGED = "diverged"


def _number(value: float, info: SerializationInfo) -> float:
    return value if info.mode_is_json() else float(value)


#: An integer or a float: a file keeps what it is, tables see a float.
Number = Annotated[int | float, PlainSerializer(_number, return_type=Any)]


def whole(settings: BaseModel) -> dict[str, Any]:
    """Every key of settings, those at their defaults too."""
    return settings.model_dump(mode="json")


class Stored(BaseModel):
    """Base of all results."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="constants")

    def content(self) -> dict[str, Any]:
        """The content of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Machine(Stored):
    """The machine of a result. `label` is one line for captions."""

    cpu: str = ""
    cores: int = 0
    memory_gib: Number | None = None
    gpu: list[str] | None = None
    label: str


class Provenance(Stored):
    """A result's stamp: code, machine, versions of libraries, seed and time (UTC); `dirty` is none where not known.

    Code outside a git checkout has no `commit`, but a `version` and a hash of its `files`.
    """

    commit: str | None
    dirty: bool | None
    version: str = ""
    files: str = ""
    machine: Machine
    versions: dict[str, str] = Field({})
    seed: int | None = None
    time: str = ""

    @classmethod
    def of_now(cls, seed: int | None = None) -> Self:
        """The stamp of this code on this machine."""
        return cls.model_validate(stamp(seed))

    @property
    def columns(self) -> dict[str, str]:
        """The stamp as columns `machine` and `commit`."""
        return {"machine": self.machine.label, "commit": self._code}

    @property
    def _code(self) -> str:
        if self.commit is None:
            return f"version {self.version} (files {self.files})"
        return self.commit[:12] + (" (modified)" if self.dirty else "")


class Quartiles(Stored):
    """Median and quartiles of samples, in their unit."""

    p25: float
    median: float
    p75: float


class MeasuredPoint(Stored):
    """The fields that all points share. A failed point has its error as `status` and no samples."""

    samples: list[float] = Field([])
    weight_bytes: Number | None = None
    sampler: str | None = None
    peak_memory_bytes: Number | None = None
    status: str

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Self:
        if self.status == OK and not self.samples:
            raise ValueError("a point with status ok needs samples")
        return self
