"""The record of a run in a tracker, and what every tracker can do."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qerl.provenance.files import write_text

#: The file, in the folder of a run's state, that keeps the id of its record.
ID = "record"


@dataclass(frozen=True)
class Record:
    """The record of one run. Its id is kept in the run's state, so that a killed run goes on in the same record."""

    #: Groups runs: the experiment of a workflow, or the name of a run by hand.
    project: str
    run: str
    id: str
    #: The folder for all that trackers write by default; runs of one workflow share it.
    folder: Path
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A name that no other record has, for trackers that know runs by name."""
        return f"{self.run}-{self.id}"


def record_id(state: Path) -> str:
    """The id of the record of the run whose state is in the folder `state`; a new one for a new run."""
    file = state / ID
    if not file.is_file():
        write_text(file, uuid.uuid4().hex[:8])
    return file.read_text(encoding="utf-8")


class Tracker(Protocol):
    """An open record. The constructor opens it, and continues one that a killed run left."""

    def last(self) -> int:
        """The last step that is in the record as a whole; 0 if there is none."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step. Steps come in order."""
        ...

    def close(self, failed: bool) -> None:
        """End the record for now, and mark a run that `failed`."""
        ...
