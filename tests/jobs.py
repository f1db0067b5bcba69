"""Jobs as tests need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.jobs.train import TrainJob
from qerl.settings.run import RunSettings


def train_job(settings: RunSettings, checkpoint: Path, data: Path, work: Path, out: Path, **changes: Any) -> TrainJob:
    """A run of the experiment `e`, by the name of its folder."""
    values = {
        "id": out.name,
        "experiment": "e",
        "arm": "a",
        "varied": {},
        "on_failure": "stop",
        "time_limit": None,
        "base": None,
    }
    paths = {"checkpoint": checkpoint, "data": data, "work": work, "out": out}
    return TrainJob(settings=settings, **{**values, **paths, **changes})
