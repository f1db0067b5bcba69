"""Jobs for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from qerl.data.sources import prepare
from qerl.jobs import TrainJob
from qerl.report_jobs import PointJob
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.run import RunSettings
from qerl.settings.workloads import PointPart, Workload
from qerl.workflow.rules import KINDS
from tests.tiny import tiny_qwen2, write_template

#: The functions of all jobs, as `module:name`.
FUNCTIONS = [kind.does for kind in KINDS.values() if hasattr(kind, "does")]
FUNCTIONS += [path for work in Workload.__subclasses__() for path in work.does.values()]
#: A run of a tiny policy with a checkpoint after each step, without a reward that its random completions differ in.
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "dataset": "arithmetic",
    "weights": "bf16",
    "dtype": "float32",
    "steps": 4,
    "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 6}},
    "adapter": {"rank": 4},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2},
    "checkpoint_every": 1,
}


def write_inputs(folder: Path, **config: Any) -> Path:
    """A tiny checkpoint in `base`, and problems in `data`."""
    write_template(tiny_qwen2(folder / "base", **config))
    prepare(DatasetSettings(format="gsm8k", origin=Generated(train=40, validation=4, test=4)), folder / "data")
    return folder


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
        "version": "",
    }
    paths = {"checkpoint": checkpoint, "data": data, "work": work, "tracked": out / "tracked", "out": out}
    return TrainJob(settings=settings, **{**values, **paths, **changes})


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder, one mapping a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those that differ from one time to the next."""
    timing = ("seconds/", "tokens_per_second/", "memory_bytes")
    return [{key: value for key, value in row.items() if not key.startswith(timing)} for row in rows]


def part_of(out: Path, work: Workload, points: Sequence[Any] = (None,), settings: Any = None) -> PointPart:
    """The part of a job of the speed grid that writes the file `out`."""
    return PointPart(file=out.name, work=work, points=list(points), settings=settings)


def measured(out: Path, work: Workload, points: Sequence[Any] = (None,), settings: Any = None) -> dict[str, Any]:
    """The content of `out` after the job of this file."""
    job = PointJob(parts=[part_of(out, work, points, settings)], out=out.parent)
    module, _, name = job.function.partition(":")
    getattr(import_module(module), name)(job)
    return json.loads(out.read_text())


def processes_of(kind: str, folder: Path) -> list[int]:
    """The process numbers of the jobs of one kind that run in `folder`, of those that are forks (`tests.job_forks`)."""
    return [number for number, name, _ in _processes(folder) if name == f"qerl {kind}\n"]


def shells_of(kind: str, folder: Path) -> list[int]:
    """The process numbers of the shells in which Snakemake started such jobs, and which wait for them."""
    found = [(number, command) for number, name, command in _processes(folder) if name == "bash\n"]
    return [number for number, command in found if f'"kind":"{kind}"' in command]


def _processes(folder: Path) -> Iterator[tuple[int, str, str]]:
    """The number, name and command of each process that works in `folder`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                yield int(process.name), (process / "comm").read_text(), (process / "cmdline").read_text()
        except OSError:  # it ended meanwhile, or is another user's
            continue
