"""The stage of every rule, by the values of the rule's wildcards, and all that decides its result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from qerl.data.inputs import content_of, hash_of
from qerl.jobs import Part
from qerl.results.paths import METRICS, POLICY, REPORT, RESULT, RUN, VERDICT
from qerl.settings.models import HubModel, LocalModel
from qerl.workflow import stages
from qerl.workflow.checks import ModelCheck
from qerl.workflow.grid import measured_files, point_jobs
from qerl.workflow.outputs import FINISHED, PLANNED, PUBLISHED, Files
from qerl.workflow.runs import Plan
from qerl.workflow.stage import Stage

#: The stages that need the plan's files alone, by their rule.
_OF_RULE: dict[str, Callable[..., Stage]] = {
    "data": stages.PrepareData.of,
    "pretrain": stages.Pretrain.of,
    "fetch": stages.Fetch.of,
    "check": stages.CheckModel.of,
    "quantize": stages.Quantize.of,
    "train": stages.Train.of,
    "evaluate": stages.Evaluate.of,
    "profile": stages.profile,
    "table": stages.Table.of,
    "figure": stages.Figure.of,
    "report": stages.Report.of,
    "samples": stages.Samples.of,
    "stored": stages.Evaluate.of_stored,
    "numerics": stages.Numerics.of,
    "speed": stages.Speed.of,
    "verdict": stages.Verdict.of,
}


class Jobs:
    """The stages of one plan."""

    #: The rules whose stages may read the user's own files, or results that are no input.
    with_content = ("data", "check", "quantize", "point", "shapes", "gather")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self.files = Files(plan)
        self._stage = cache(self._new)

    def of(self, rule: str, *names: str) -> Stage:
        """The stage of a rule. Snakemake asks for each a dozen times."""
        return self._stage(rule, *names)

    def _new(self, rule: str, *names: str) -> Stage:
        if rule == "point":
            return self.points[names[0]]
        if rule == "shapes":
            assert self._config.shapes is not None
            files = measured_files(self._config.shapes, self.files.points)
            return stages.Shapes(files=files, out=self.files.tables)
        if rule in ("gather", "page", "published"):
            return self._of_study(rule, *names)
        return _OF_RULE[rule](self.files, *names)

    def _of_study(self, rule: str, scope: str = PLANNED) -> Stage:
        from qerl.workflow.study_jobs import gather_job, page_job  # which import pandas, for studies alone

        if rule == "gather":
            return gather_job(self._plan, self.files, scope)
        if rule == "published":
            return page_job(self._plan, self.files.committed_parts, PUBLISHED)
        return page_job(self._plan, [self.files.study_folder(scope)], self.files.study(scope))

    @cached_property
    def points(self) -> dict[str, stages.Point]:
        """The stages of the speed grid."""
        return point_jobs(self._config.shapes, self.files.work) if self._config.shapes else {}

    @property
    def checks(self) -> dict[str, ModelCheck]:
        """The checks of models with their problems, by id."""
        return self.files.checks

    def inputs(self, rule: str, id: str) -> dict[str, list[str]]:
        """The files that a run or an evaluation reads, by name."""
        stage = self.of(rule, id)
        assert isinstance(stage, stages.Train | stages.Evaluate)
        return stage.inputs(self.files)

    @property
    def listed(self) -> list[str]:
        """All results, of which tables, figures and the report are made."""
        if self._config.shapes:
            return list(map(str, self.of("shapes").own_files))
        return [*self.files.stored, *([str(self.files.gates / VERDICT)] if self._config.gates else [])]

    def json(self, rule: str, *names: str) -> str:
        """The stage of a rule as JSON, which the rule passes to `qerl rule`."""
        return self.of(rule, *names).model_dump_json()

    # --- code and content that decide results besides a stage's values

    def code(self, rule: str, *names: str) -> str:
        """The version of the code that a stage runs, including functions of the user."""
        return self.of(rule, *names).code

    def content(self, rule: str, *names: str) -> list[str]:
        """Hashes of the user's files that a stage reads, because modification times change with copies.

        For the data of finished runs these are their results, which are no input, as they would start runs.
        """
        if rule == "gather":
            finished = filter(Path.is_file, map(Path, self.files.studied if names[0] == FINISHED else ()))
            return [f"{file} {hash_of(file)}" for file in finished]
        if rule in ("check", "quantize"):
            name = names[0]
            model = self.checks[name].model if rule == "check" else self._plan.checkpoints[name].model
            return [content_of(self.files.dense(model))] if self.files.is_own(model) else []
        return list(map(content_of, self.of(rule, *names).own_files))


# What decides a job's result: its own settings, and what decides the results that it reads, in turn.
#
# Snakemake compares this text with that of the result it has. So it needs no modification times, which copies of
# results to another machine may lose.

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
        content = self._jobs.content(*call) if rule in ("data", "quantize") else []
        return _hash([self.deciding(*call), self._jobs.code(*call), *content])

    def _made_by(self, job: Stage) -> list[Call]:
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
        for name, base in plan.checkpoints.items():
            single |= dict.fromkeys((files.checkpoint(base), files.quantized(name) / REPORT), ("quantize", name))
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
