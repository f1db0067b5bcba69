"""The jobs of a plan as the workflow's rules take them: their files, their parameters, and all that decides them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from qerl import jobs, report_jobs
from qerl.data.hub import content_of
from qerl.jobs import CohortJob, Job, Plan, TrainJob, refused_engine
from qerl.results.paths import VERSION
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings

Function = TypeVar("Function", bound=Callable[..., Any])

#: The class of each kind of job.
KINDS: dict[str, type[Job]] = {
    one.model_fields["kind"].default: one
    for one in (*vars(jobs).values(), *vars(report_jobs).values())
    if isinstance(one, type) and issubclass(one, Job) and not one.model_fields["kind"].is_required()
}
#: The kinds with a rule. Those of a bench share one.
RULES: dict[str, type[Job]] = {kind: one for kind, one in KINDS.items() if "place" in vars(one)}
#: A kind of job, and the name of one of its jobs if it has several.
Call = tuple[str, ...]

#: Resources of a training on several machines. The plugin calls a launcher that the rule itself calls `mpi`, and
#: GPUs of each machine `gres`. `tasks_per_gpu: 0` keeps the plugin from asking for as many tasks on each GPU.
_MACHINES: dict[str, Callable[[RunSettings], int | str]] = {
    "nodes": lambda settings: settings.nodes,
    "tasks": lambda settings: settings.nodes,
    "mpi": lambda settings: "srun",
    "gres": lambda settings: f"gpu:{settings.gpus_of_node}",
    "tasks_per_gpu": lambda settings: 0,
}


def parse_job(text: str) -> Job:
    """The job in a rule's parameter. Raises `ConfigError` for a text that is none."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"a job is a mapping in JSON, and this is no JSON: {error}") from None
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is no job; use one of {', '.join(KINDS)}")
    return parse(KINDS[kind], values, f"job {kind}")


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """A context in which a mistake in the configuration is an error that Snakemake prints as a sentence."""
    from snakemake.exceptions import WorkflowError

    try:
        yield
    except ValueError as error:
        raise WorkflowError(str(error)) from None


def with_signature(function: Function) -> Function:
    """The function with its signature. Snakemake asks for that at each call, which is a tenth of planning."""
    function.__signature__ = signature(function)  # type: ignore[attr-defined]
    return function


class Jobs:
    """The jobs of one plan, by their kind and name. Snakemake asks for each a dozen times."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: The names of the jobs of each kind with a wildcard.
        self.names: dict[str, Collection[str]] = {
            kind: job_class.names(plan) for kind, job_class in RULES.items() if job_class.wildcard()
        }
        self.of, self.job = cache(self._made), cache(self._with_version)
        self.inputs = cache(self._inputs)
        self.deciding, self._version = cache(self._all_deciding), cache(self._new_version)
        if plan.config.side_by_side > 1:
            plan.cohorts.update(self._cohorts())
            self.names["cohort"] = plan.cohorts
        self._cohort_of = {run: name for name, runs in plan.cohorts.items() for run in runs}

    def calls(self, kind: str) -> list[Call]:
        """All jobs of a kind; those without a wildcard have one."""
        return [(kind, name) for name in self.names[kind]] if kind in self.names else [(kind,)]

    def _made(self, kind: str, name: str = "") -> Any:
        job_class = RULES[kind]
        if kind in self.names and name not in self.names[kind]:
            raise ConfigError(
                f"{self.plan.config.name} has no {job_class.wildcard()} {name!r}; `qerl plan` lists its runs"
            )
        return job_class.make(self.plan, name)

    def _inputs(self, *call: str) -> dict[str, list[Path]]:
        """The files that a job reads, by what they are."""
        job: Job = self.of(*call)
        return job.inputs(self.plan)

    # --- what a rule takes from its jobs

    @property
    def wildcards(self) -> dict[str, str]:
        """The regular expression of each wildcard. Snakemake reads it at each use of a file's pattern, so that those
        of thousands of names don't list them.
        """
        return {
            str(RULES[kind].wildcard()): "[^/]+" if len(found) > 1000 else "|".join(map(re.escape, found)) or "(?!)"
            for kind, found in self.names.items()
        }

    def input(self, kind: str, *names: str) -> dict[str, Callable[[Any], list[str]]]:
        """Files that a rule's job reads, by what they are. The user's own are compared by content, not by time, and a
        check that is made again decides nothing.
        """
        from snakemake.io import ancient

        def files(name: str, wildcards: Any) -> list[str]:
            own = {*self.plan.own_models, *self.of(kind, *wildcards).own_files}
            found = self.inputs(kind, *wildcards)[name]
            return [ancient(str(path)) if path in own or name == "checked" else str(path) for path in found]

        return {name: with_signature(partial(files, name)) for name in names}

    def output(self, kind: str, file: str = "") -> list[Path]:
        """A file that a rule's job writes, or all, with the rule's wildcard."""
        job_class = RULES[kind]
        return [job_class.path(self.plan, file=file)] if file else job_class.outputs(self.plan)

    def shown(self, kind: str) -> dict[str, Any]:
        """The caption and category in Snakemake's report of what a rule's job writes."""
        return {"caption": f"../report/{kind}.rst", "category": self.value(kind, lambda job: job.category)}

    def value(self, kind: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A value of a rule's job, by the rule's wildcards."""
        return with_signature(lambda wildcards: value(self.job(kind, *wildcards)))

    def gpus(self, kind: str) -> Callable[[Any], Any]:
        """The number of GPUs of a job."""
        return self.value(kind, lambda job: job.gpus)

    def params(self, kind: str = "") -> dict[str, Callable[..., Any]]:
        """The parameters of a rule: its job as JSON, and what decides the job's result.

        The job is of a kind, or of the one kind that has the rule's wildcard.
        Snakemake reruns a job when a parameter changes, unless its function asks for `input`, as the JSON's does.
        So a job reruns for its settings and those of what it reads, its code, and the content of the user's files.
        """
        kinds = {RULES[one].wildcard(): one for one in self.names}

        def call(wildcards: Any) -> Call:
            return kind or kinds[next(iter(wildcards.keys()))], *wildcards

        return {
            "job": with_signature(lambda wildcards, input: self.job(*call(wildcards)).model_dump_json()),
            "decides": with_signature(lambda wildcards: self.deciding(*call(wildcards))),
            "code": with_signature(lambda wildcards: self.job(*call(wildcards)).code),
            "content": with_signature(lambda wildcards: self.content(*call(wildcards))),
        }

    @property
    def machines(self) -> dict[str, Callable[[Any], Any]]:
        """The resources of a run on several machines, by Snakemake's plugin for SLURM; none without such a run.

        A resource is None for a run on one machine, which Snakemake leaves out.
        """
        if all(run.settings.nodes == 1 for run in self.plan.runs.values()):
            return {}

        def resource(value: Callable[[RunSettings], int | str]) -> Callable[[Any], Any]:
            return self.value("train", lambda job: value(job.settings) if job.settings.nodes > 1 else None)

        return {name: resource(value) for name, value in _MACHINES.items()}

    @property
    def launcher(self) -> Callable[..., str]:
        """The start of a training's command, which starts it on all of its machines; empty on one.

        SLURM's variables tell the processes where they meet (`qerl.host.lease.meeting`).
        """

        def command(wildcards: Any, input: Any) -> str:
            settings = self.plan.runs[wildcards.run].settings
            nodes, each = settings.nodes, settings.processes_of_node
            srun = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={each}"
            return srun if nodes > 1 else ""

        return with_signature(command)

    # --- runs side by side: the job of a cohort precedes the jobs of its runs, which take what it has finished
    #
    # It decides nothing: what decides a run, and so what reruns it, is in the run's own job. Snakemake plans anew on
    # each machine of a cluster, so that the choice of cohorts mustn't depend on which runs are finished. It compares
    # the names of inputs, too, so that a finished run keeps the mark that it was made with. A mark's name has a hash of
    # what its runs are made of, so that changed runs have another one, and this one stays.

    def _cohorts(self) -> dict[str, list[str]]:
        """The runs of each cohort, by its name: those of one base, data set and engine, in the order of the plan."""
        found, begun = list[list[TrainJob]](), list[list[TrainJob]]()
        for job in (self.of("train", run) for run in self.plan.runs):
            if refused_engine([job]):
                continue
            place = job.checkpoint, job.data
            alike = (one for one in begun if (one[0].checkpoint, one[0].data) == place)
            group = next((one for one in alike if not refused_engine([one[0], job])), None)
            if group is None:
                begun.append(group := [])
                found.append(group)
            group.append(job)
            if len(group) == self.plan.config.side_by_side:
                begun.remove(group)
        cohorts = {}
        for first, *others in ([job.id for job in group] for group in found if len(group) > 1):
            versions = _hash(self._version(("train", run)) for run in (first, *others))
            cohorts[f"{first}-and-{len(others)}-more-{versions[:8]}"] = [first, *others]
        return cohorts

    def mark(self, run: str) -> list[str]:
        """The mark of a run's cohort, if it has one."""
        from snakemake.io import ancient

        file = TrainJob.path(self.plan, run, VERSION)
        version, _, cohort = file.read_text(encoding="utf-8").partition(" ") if file.is_file() else ("", "", "")
        if version != self._version(("train", run)):
            cohort = self._cohort_of.get(run, "")
        mark = CohortJob.path(self.plan, cohort)
        return [ancient(str(mark))] if cohort and (cohort in self.plan.cohorts or mark.is_file()) else []

    def _with_version(self, *call: str) -> Any:
        """A job, in which a run has the hash of all that decides it, and the name of its cohort."""
        job = self.of(*call)
        if isinstance(job, CohortJob):
            return job.model_copy(update={"runs": [self.job("train", run.id) for run in job.runs]})
        if isinstance(job, TrainJob):
            version = f"{self._version(('train', job.id))} {self._cohort_of.get(job.id, '')}"
            return job.model_copy(update={"version": version})
        return job

    # --- what decides a result: the job's own settings and the user's files, and what decides the results that it reads
    #
    # Snakemake compares these texts with the texts by which a result was made. So it needs no modification times, which
    # a copy of the results on another machine may lose.

    def content(self, *call: str) -> list[str]:
        """Hashes of the user's files that a job reads."""
        models = (path for paths in self.inputs(*call).values() for path in paths if path in self.plan.own_models)
        return list(map(content_of, (*self.of(*call).contents(self.plan), *models)))

    def _all_deciding(self, *call: str) -> str:
        """All that decides a job's result, but the code that runs it and the user's files that it reads itself."""
        deciding: str = self.of(*call).deciding
        makers = self.makers_of(*call)
        return f"{deciding} {_hash(map(self._version, makers))}" if makers else deciding

    def _new_version(self, call: Call) -> str:
        """Hash of all that decides the result of a job."""
        return _hash([self.deciding(*call), self.of(*call).code, *self.content(*call)])

    def makers_of(self, *call: str) -> list[Call]:
        """The jobs that make what a job reads."""
        read = {path for name, paths in self.inputs(*call).items() if name != "checked" for path in paths}
        return sorted({self._makers[path] for path in read if path in self._makers})

    @cached_property
    def _makers(self) -> dict[Path, Call]:
        """The job that makes a file or folder, by its path."""
        calls = (call for kind in RULES for call in self.calls(kind))
        return {path: call for call in calls for path in RULES[call[0]].outputs(self.plan, *call[1:])}


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
