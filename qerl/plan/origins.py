"""What decides a job's result: its own settings, and what decides the results that it reads, in turn.

Snakemake compares this text with that of the result it has. So it needs no modification times, which copies of results
to another machine may lose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from qerl.jobs.base import Job, Part
from qerl.plan.files import FINISHED, PLANNED
from qerl.plan.jobs import Jobs
from qerl.plan.sheets import Plan
from qerl.results.paths import METRICS, POLICY, REPORT, RESULT, RUN
from qerl.settings.models import HubModel, LocalModel

#: A rule, and the name of one of its jobs if it has several.
Call = tuple[str, ...]


class Origins:
    """The origins of all results of a plan's jobs."""

    def __init__(self, plan: Plan, jobs: Jobs) -> None:
        self._plan = plan
        self._jobs = jobs
        self._version = cache(self._new_version)
        self._deciding = cache(self._all_deciding)

    def deciding(self, rule: str, *names: str) -> str:
        """All that decides a job's result, but the code that runs it and the user's files that it reads itself."""
        return self._deciding(rule, *names)

    def _all_deciding(self, rule: str, *names: str) -> str:
        job = self._jobs.of(rule, *names)
        made = self._made_by(job)
        return f"{job.deciding} {_hash(map(self._version, made))}" if made else job.deciding

    def _new_version(self, call: Call) -> str:
        """Hash of all that decides the result of a job."""
        rule = call[0]
        code = "" if rule == "fetch" else self._jobs.code(*call)  # a download has its commit
        content = self._jobs.content(*call) if rule in ("data", "quantize") else []
        return _hash([self.deciding(*call), code, *content])

    def _made_by(self, job: Job) -> list[Call]:
        """The jobs that make what a job reads: those of the paths in it."""
        read = {path for path in _paths(job) if path != job.out}
        return sorted({call for path in read for call in self._makers.get(path, ())})

    @cached_property
    def _makers(self) -> dict[Path, list[Call]]:
        """The jobs that make a file or folder, by its path; all results by that of their list."""
        files, plan = self._jobs.files, self._plan
        single: dict[Path, Call] = {files.data(name): ("data", name) for name in plan.config.datasets}
        for name, model in plan.config.models.items():
            if not isinstance(model, LocalModel):
                single[files.made_model(name)] = ("fetch" if isinstance(model, HubModel) else "pretrain", name)
        for id, checkpoint in plan.checkpoints.items():
            single |= dict.fromkeys((files.checkpoint(checkpoint), files.quantized(id) / REPORT), ("quantize", id))
        for id in plan.runs:
            single |= {files.run(id) / name: ("train", id) for name in (POLICY, METRICS, RUN)}
        single |= {files.evaluation(id) / RESULT: ("evaluate", id) for id in plan.evaluations}
        single |= {files.bench(bench): ("profile", bench) for bench in plan.config.benches}
        if plan.config.gates:
            single |= {files.stored_evaluation(name) / RESULT: ("stored", name) for name in files.stored_policies}
            single |= {files.numerics: ("numerics",), files.speed: ("speed",)}
        if plan.config.study:
            single |= {files.study_folder(scope): ("gather", scope) for scope in (PLANNED, FINISHED)}
        every = sorted({single[Path(file)] for file in files.stored})
        return {path: [call] for path, call in single.items()} | {files.listed: every}


def _paths(value: Any) -> Iterator[Path]:
    """All paths in a job, but those in settings, which no job makes."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Part | dict | list | tuple):
        parts = vars(value) if isinstance(value, Part) else value
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _paths(part)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
