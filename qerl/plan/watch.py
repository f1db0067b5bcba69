"""The state of a workflow, read from its stored plan, results, metrics, logs, processes and GPU leases."""

from __future__ import annotations

import csv
import json
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerl.host.gpu_lease import devices, lock_folder
from qerl.results.files import read, read_rows
from qerl.results.paths import BENCHMARKS, LOGS, METRICS, PLAN, TRAIN
from qerl.results.schema.plan import ListedJob, StoredPlan
from qerl.results.schema.stored import OK
from qerl.results.schema.training import RunResult, StepMetrics
from qerl.settings.base import ConfigError

State = Literal["running", "failed", "waits", "done"]
_HOUR = 3600.0


@dataclass(frozen=True)
class WatchedJob:
    """A job with its state. `where` is its machine and GPUs, or the reason why it failed."""

    job: ListedJob
    state: State
    where: str
    rows: Sequence[StepMetrics]
    #: GPU-hours; None where they weren't measured.
    spent: float | None

    @property
    def progress(self) -> str:
        """The steps of a run, and the reward of the last one."""
        if self.job.steps is None:
            return ""
        reward = f", reward {self.rows[-1].reward:.3f}" if self.rows else ""
        return f"step {len(self.rows)} of {self.job.steps}{reward}"


def watched_jobs(results: Path, running: Mapping[Path, int]) -> list[WatchedJob]:
    """The jobs of the plan in a folder of results; `running` is of `running_jobs`. Nothing is written."""
    if not (results / PLAN).is_file():
        raise ConfigError(
            f"{results} has no {PLAN}, which the workflow writes when it starts; give a folder of results"
        )
    return [_watched(results, job, running) for job in read(StoredPlan, results / PLAN).jobs]


def _watched(results: Path, job: ListedJob, running: Mapping[Path, int]) -> WatchedJob:
    rows = _rows(results, job)
    state, where = _state(results, job, running)
    return WatchedJob(job, state, where, rows, _spent(results, job, state, rows))


def _state(results: Path, job: ListedJob, running: Mapping[Path, int]) -> tuple[State, str]:
    file = (results / job.result).resolve()
    if file.is_file():
        status = read(RunResult, file).status if job.rule == TRAIN else OK
        return ("done", "") if status == OK else ("failed", status)
    for out in (file, file.parent):  # a job's output is the file or its folder
        if out in running:
            return "running", ", ".join([socket.gethostname(), *leased(running[out])])
    if host := _other_host(job):
        return "running", f"{host}, by its lock"
    last = _last_line(results / LOGS / job.rule / f"{job.id}.log")
    return ("failed", last) if last else ("waits", "")


def _other_host(job: ListedJob) -> str:
    """The other machine whose process has locked the state of a run, as the lock says."""
    lock = Path(job.work or "") / "lock"
    host = lock.read_text(encoding="utf-8").rpartition(" on ")[2] if job.work and lock.is_file() else ""
    return "" if host == socket.gethostname() else host


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace", encoding="utf-8").splitlines() if log_file.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def running_jobs() -> dict[Path, int]:
    """The process of each job that runs on this machine, by the job's output."""
    return dict(_running(Path("/proc")))


def _running(processes: Path) -> Iterator[tuple[Path, int]]:
    for process in processes.glob("[0-9]*"):
        try:
            command, folder = (process / "cmdline").read_bytes().split(b"\0"), (process / "cwd").resolve(strict=True)
        except OSError:  # it has ended, or is another user's
            continue
        flagless = [word for word in command[1:6] if word != b"-P"]
        if flagless[:3] == [b"-m", b"qerl", b"rule"] and flagless[3].startswith(b"{"):  # else it asks for help
            yield (folder / json.loads(flagless[3])["out"]).resolve(), int(process.name)


def leased(process: int) -> list[str]:
    """The GPUs whose lease a process has, by the lock files that it has open."""
    try:
        open_files = [file.resolve() for file in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:  # it has ended
        return []
    locked = [file.name for file in open_files if file.parent == lock_folder().resolve()]
    return [f"GPU {name}" for name, uuid in devices().items() if any(lock.startswith(uuid) for lock in locked)]


def _rows(results: Path, job: ListedJob) -> Sequence[StepMetrics]:
    """The steps of a run: of its result, or of its newest state."""
    if job.steps is None:
        return ()
    finished = (results / job.result).with_name(METRICS)
    files = [finished] if finished.is_file() else list(Path(job.work or "").glob(f"*/{METRICS}"))
    return list(read_rows(StepMetrics, max(files, key=lambda file: file.stat().st_mtime))) if files else ()


def _spent(results: Path, job: ListedJob, state: State, rows: Sequence[StepMetrics]) -> float | None:
    """GPU-hours of the steps of a run, or those of another finished job by Snakemake's own measurement."""
    if job.steps is not None:
        return job.gpus * sum(row.step_seconds for row in rows) / _HOUR
    if state != "done":
        return 0.0
    file = results / BENCHMARKS / job.rule / f"{job.id}.tsv"
    if not file.is_file():
        return None
    with file.open(encoding="utf-8") as table:
        return job.gpus * sum(float(row["s"]) for row in csv.DictReader(table, delimiter="\t")) / _HOUR


def hours_left(one: WatchedJob, jobs: Iterable[WatchedJob]) -> float | None:
    """The GPU-hours that a job still needs, if it is as fast as it was, or as the most similar jobs were.

    None if no similar job has run. A failed job counts as one that will be started again.
    """
    if one.state == "done":
        return 0.0
    if one.job.steps is None:
        done = [job.spent for job in jobs if job.job.rule == one.job.rule and job.state == "done"]
        known = [hours for hours in done if hours is not None]
        return statistics.fmean(known) if known else None
    seconds = _step_seconds(one, [job for job in jobs if job.rows])
    if seconds is None:
        return None
    return one.job.gpus * seconds * (one.job.steps - len(one.rows)) / _HOUR


def _step_seconds(one: WatchedJob, runs: Sequence[WatchedJob]) -> float | None:
    """The median time of a step of the run, else of its arm, its experiment, or all runs."""
    alike = (
        [one],
        [run for run in runs if run.job.group == one.job.group],
        [run for run in runs if run.job.group[:1] == one.job.group[:1]],
        runs,
    )
    samples = ([row.step_seconds for run in group for row in run.rows] for group in alike)
    return next((statistics.median(seconds) for seconds in samples if seconds), None)
