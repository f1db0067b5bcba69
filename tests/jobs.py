"""Jobs for tests."""

from __future__ import annotations

import json
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
        "followed": None,
    }
    paths = {"checkpoint": checkpoint, "data": data, "work": work, "out": out}
    return TrainJob(settings=settings, **{**values, **paths, **changes})


def processes_of(kind: str, folder: Path) -> list[int]:
    """Process numbers of the jobs of a kind that run in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, place = (process / "cmdline").read_bytes().split(b"\0"), (process / "cwd").resolve(strict=True)
        except OSError:  # it ended meanwhile, or is another user's
            continue
        called = place == folder and command[1:4] == [b"-m", b"qerl", b"rule"]
        if called and json.loads(command[4])["kind"] == kind:
            found.append(int(process.name))
    return found
