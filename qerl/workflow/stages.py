"""The job of every rule, by the value of the rule's wildcard, and all that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from qerl.data.inputs import content_of, hash_of
from qerl.data.sources import SPLITS
from qerl.host.imports import source_version
from qerl.host.provenance import code_version
from qerl.jobs import (
    CheckJob,
    DataJob,
    EvaluateJob,
    FetchJob,
    FigureJob,
    GatherJob,
    Job,
    NumericsJob,
    PageJob,
    Part,
    PlannedPolicy,
    PointJob,
    PretrainJob,
    QuantizeJob,
    ReportJob,
    RolloutJob,
    RolloutMixJob,
    SamplesJob,
    ShapesJob,
    SpeedJob,
    StepJob,
    StoredPolicy,
    TableJob,
    TimedRun,
    TrainJob,
    VerdictJob,
)
from qerl.results.paths import METRICS, POLICY, REPORT, RESULT, RUN, SAMPLES_PAGE, VERDICT
from qerl.settings.base import ConfigError
from qerl.settings.models import HubModel, LocalModel, PretrainSettings
from qerl.settings.workflow import Config, EvaluationSettings, GateSettings, RolloutBench
from qerl.workflow.checks import ModelCheck, checks, evaluation_check, run_check
from qerl.workflow.dispatch import function_of
from qerl.workflow.grid import measured_files, point_jobs
from qerl.workflow.outputs import FINISHED, PLANNED, PUBLISHED, Files
from qerl.workflow.runs import Plan, PlannedEvaluation

# The key of a workload; gates compare only results with the same key.

#: The path that `workload_key` uses for every local model, because only its content counts. Changing it would change
#: the key of all committed baselines.
_ANY_FOLDER = "config/gates/policy"


def workload_key(config: Config) -> str:
    """A hash of everything that makes results comparable.

    It includes the files of the base and of the stored policies, but not settings of timing or paths. Defaults are left
    out: a key that is added later, or a default that changes, leaves a baseline valid, and the gates compare with it.
    """
    assert config.gates is not None
    values = config.model_dump(mode="json", include={"models", "datasets", "evaluation"}, exclude_defaults=True)
    for model in values["models"].values():
        model |= {"path": _ANY_FOLDER} if "path" in model else {}
    values["experiment"] = config.experiments[config.gates.experiment].model_dump(mode="json", exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for folder in [getattr(model, "path", None) for model in config.models.values()] + [config.gates.stored]:
        for file in sorted(folder.rglob("*")) if folder else ():
            if file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


# The job of every rule, by the value of the rule's wildcard.

T = TypeVar("T")


class Jobs:
    """The jobs of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self.files = Files(plan)
        self._job = cache(self._new_job)

    # --- data and bases

    @property
    def _lock_file(self) -> Path | None:
        lock = self._config.lock
        return lock if lock and lock.is_file() else None

    def data(self, dataset: str) -> DataJob:
        """Prepare a data set."""
        settings = self._config.datasets[dataset]
        return DataJob(settings=settings, lock_file=self._lock_file, out=self.files.data(dataset))

    def pretrain(self, model: str) -> PretrainJob:
        """Train the miniature."""
        settings = self._config.models[model]
        assert isinstance(settings, PretrainSettings)
        data = self.files.data_folders(settings.datasets)
        return PretrainJob(settings=settings, data=data, out=self.files.dense(model))

    def fetch(self, model: str) -> FetchJob:
        """Download a model."""
        settings = self._config.models[model]
        assert isinstance(settings, HubModel)
        repo, revision = settings.repo, settings.revision
        return FetchJob(repo=repo, revision=revision, lock_file=self._lock_file, out=self.files.dense(model))

    @cached_property
    def checks(self) -> dict[str, ModelCheck]:
        """The checks of models with their problems, by id."""
        return checks(self._plan)

    def check(self, id: str) -> CheckJob:
        """Check a model with problems."""
        check = self.checks[id]
        return CheckJob(
            model=self.files.dense(check.model),
            runs=list(check.runs),
            evaluation=check.evaluation,
            data=self.files.data_folders(check.datasets),
            out=self.files.checked(id),
        )

    def checked_run(self, run: str) -> list[str]:
        """The files that mark the check of a run's base with its problems as passed; none if it needs no check."""
        return self._checked(run_check(self._plan, self._plan.runs[run])) if self.checks else []

    def checked_evaluation(self, evaluation: str) -> list[str]:
        """The files that mark the check of an evaluation as passed."""
        return self._checked(evaluation_check(self._plan, self._plan.evaluations[evaluation])) if self.checks else []

    def _checked(self, check: ModelCheck) -> list[str]:
        return [str(self.check(check.id).out)] if check.id in self.checks else []

    def quantize(self, checkpoint: str) -> QuantizeJob:
        """Make a base in one weight format."""
        base = self._plan.checkpoints[checkpoint]
        made = base.calibration
        return QuantizeJob(
            base=base,
            source=self.files.dense(base.model),
            data=self.files.data(str(made.dataset)) if made else None,
            out=self.files.quantized(base.name),
        )

    # --- runs and evaluations

    def train(self, id: str) -> TrainJob:
        """Train a run."""
        run = self._planned(self._plan.runs, "run", id)
        experiment = self._config.experiments[run.experiment]
        return TrainJob(
            id=run.id,
            experiment=run.experiment,
            arm=run.arm,
            varied=run.varied,
            settings=run.settings,
            on_failure=experiment.on_failure,
            time_limit=experiment.time_limit,
            base=None,
            checkpoint=self.files.checkpoint(run.settings.base),
            data=self.files.data(run.settings.dataset),
            work=self.files.work / id,
            tracked=self.files.tracked,
            followed=self.files.followed(id),
            out=self.files.run(id),
        )

    def evaluate(self, id: str) -> EvaluateJob:
        """Evaluate a base or a run's policy."""
        evaluation = self._planned(self._plan.evaluations, "evaluation", id)
        tasks = [task for task in self._config.evaluation.tasks if task.dataset in evaluation.tasks]
        return EvaluateJob(
            policy=_planned(evaluation),
            settings=self._config.evaluation.model_copy(update={"tasks": tasks}),
            checkpoint=self.files.checkpoint(evaluation.base),
            trained=self.files.policy(evaluation.run.id) if evaluation.run else None,
            data=self.files.data_folders(sorted(evaluation.tasks)),
            out=self.files.evaluation(id),
        )

    def _planned(self, planned: Mapping[str, T], what: str, id: str) -> T:
        if id not in planned:
            raise ConfigError(f"{self._config.name} has no {what} {id!r}; `qerl plan` lists its runs")
        return planned[id]

    def inputs(self, rule: Literal["train", "evaluate"], id: str) -> dict[str, list[str]]:
        """The files that a run or an evaluation reads, by name."""
        job = self.of(rule, id)
        if isinstance(job, TrainJob):
            read = {"data": self.files.data_files([job.settings.dataset], ["train"]), "checked": self.checked_run(id)}
            other = job.followed
        else:
            assert isinstance(job, EvaluateJob)
            # A stock task takes its examples from the training split.
            asked = {split for task in job.settings.tasks for split in (task.split, *(("train",) * bool(task.task)))}
            splits = [split for split in SPLITS if split in asked]
            read = {"data": self.files.data_files(job.data, splits), "checked": self.checked_evaluation(id)}
            other = job.trained
        return read | {"checkpoint": [str(job.checkpoint)], "other": [str(other)] if other else []}

    def profile(self, bench: str) -> RolloutJob | StepJob:
        """Run a bench of rollouts or steps."""
        settings, out = self._config.benches[bench], self.files.bench(bench)
        if isinstance(settings, RolloutBench):
            bases = self._plan.bench_bases(bench)
            folders: dict[str, Path] = {base.weights: self.files.checkpoint(base) for base in bases}
            return RolloutJob(bench=bench, settings=settings, checkpoints=folders, out=out)
        runs = [
            TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=self.files.checkpoint(run.settings.base),
                data=self.files.data(run.settings.dataset),
            )
            for run in self._plan.step_bench_runs(bench)
        ]
        return StepJob(bench=bench, settings=settings, runs=runs, out=out)

    # --- report

    def table(self, name: str) -> TableJob:
        """Make a table."""
        return TableJob(name=name, results=self.files.listed, out=self.files.tables)

    def figure(self, name: str) -> FigureJob:
        """Make a figure."""
        return FigureJob(name=name, results=self.files.listed, out=self.files.figures)

    def report(self) -> ReportJob:
        """Make the report."""
        files = self.files
        return ReportJob(
            name=self._config.name,
            results=files.listed,
            main=files.tables / "accuracy.csv" if files.scored else None,
            tables=files.table_pages,
            figures=files.figure_stems,
            samples=SAMPLES_PAGE if files.scored else "",
            omitted=self._omitted,
            out=files.report,
        )

    @property
    def _omitted(self) -> dict[str, str]:
        experiments = self._config.experiments.items()
        return {f"{name}: {arm}": why for name, settings in experiments for arm, why in settings.omitted.items()}

    @property
    def listed(self) -> list[str]:
        """All results, of which tables, figures and the report are made."""
        if self._config.shapes:
            return list(map(str, self.shapes().files))
        return [*self.files.stored, *([str(self.files.gates / VERDICT)] if self._config.gates else [])]

    def samples(self) -> SamplesJob:
        """Make the page of samples."""
        return SamplesJob(name=self._config.name, results=self.files.listed, out=self.files.samples_page)

    # --- the speed grid

    @cached_property
    def points(self) -> dict[str, PointJob]:
        """The jobs of the speed grid."""
        return point_jobs(self._config.shapes, self.files.work) if self._config.shapes else {}

    def point(self, id: str) -> PointJob:
        """Measure a file of points."""
        return self.points[id]

    def shapes(self) -> ShapesJob:
        """Make tables and figures of the points that are measured, on this machine or elsewhere."""
        assert self._config.shapes is not None
        files = measured_files(self._config.shapes, self.files.points)
        return ShapesJob(files=files, out=self.files.tables)

    # --- the study

    def gather(self, scope: str) -> GatherJob:
        """Gather the data of a study's runs."""
        from qerl.workflow.study_jobs import gather_job  # which imports pandas, for studies alone

        return gather_job(self._plan, self.files, scope)

    def page(self, scope: str) -> PageJob:
        """Make the page of a study's data."""
        from qerl.workflow.study_jobs import page_job

        return page_job(self._plan, [self.files.study_folder(scope)], self.files.study(scope))

    def published(self) -> PageJob:
        """Make the page of a study's committed data."""
        from qerl.workflow.study_jobs import page_job

        return page_job(self._plan, self.files.committed_parts, PUBLISHED)

    # --- gates

    @property
    def _gates(self) -> GateSettings:
        assert self._config.gates is not None
        return self._config.gates

    def stored(self, name: str) -> EvaluateJob:
        """Evaluate a committed adapter."""
        settings: EvaluationSettings = self._config.evaluation
        return EvaluateJob(
            policy=StoredPolicy(stored=name),
            settings=settings,
            checkpoint=self.files.gate_checkpoint,
            trained=self._gates.stored / name,
            data=self.files.data_folders(self.files.gate_tasks),
            out=self.files.stored_evaluation(name),
        )

    def numerics(self) -> NumericsJob:
        """Compare with stored vectors."""
        return NumericsJob(vectors=self._gates.vectors, out=self.files.numerics)

    def speed(self) -> SpeedJob:
        """Time this code alternately with the baseline's."""
        return SpeedJob(
            checkpoint=self.files.gate_checkpoint,
            baselines=self._gates.baselines,
            key=workload_key(self._config),
            rounds=self._gates.rounds,
            out=self.files.speed,
        )

    def verdict(self) -> VerdictJob:
        """Judge the gates."""
        return VerdictJob(
            settings=self._gates,
            key=workload_key(self._config),
            results=[Path(file) for file in self.files.judged],
            out=self.files.gates,
        )

    def of(self, rule: str, *names: str) -> Job:
        """The job of a rule. Snakemake asks for each a dozen times."""
        return self._job(rule, *names)

    def json(self, rule: str, *names: str) -> str:
        """The job of a rule as JSON, which the rule passes to `qerl rule`."""
        return self.of(rule, *names).model_dump_json()

    def _new_job(self, rule: str, *names: str) -> Job:
        job: Job = getattr(self, rule)(*names)
        return job

    # --- code and content that decide results besides a job's values

    def code(self, rule: str, *names: str) -> str:
        """The version of the code that a job runs, including functions of the user."""
        job = self.of(rule, *names)
        versions = map(source_version, sorted(user_functions(job)))
        return " ".join([code_version(function_of(job)[0]), *versions])

    def content(self, rule: str, *names: str) -> list[str]:
        """Hashes of the user's files that a job reads, because modification times change with copies.

        For the data of finished runs these are their results, which are no input, as they would start runs.
        """
        job = self.of(rule, *names)
        if isinstance(job, DataJob):
            return [content_of(source)] if (source := job.settings.own_file) else []
        if isinstance(job, ShapesJob):
            return [content_of(file) for file in job.files]
        if isinstance(job, GatherJob):
            finished = filter(Path.is_file, map(Path, self.files.studied if names[0] == FINISHED else ()))
            return [f"{file} {hash_of(file)}" for file in finished]
        if isinstance(job, PointJob):
            return [content_of(job.work.trace)] if isinstance(job, RolloutMixJob) and job.work.trace else []
        model = self.checks[names[0]].model if isinstance(job, CheckJob) else self._plan.checkpoints[names[0]].model
        return [content_of(self.files.dense(model))] if self.files.is_own(model) else []


def user_functions(job: Job) -> set[str]:
    """The user's functions that a job calls."""
    if isinstance(job, DataJob):
        named = [getattr(job.settings.origin, "function", None)]
    elif isinstance(job, TrainJob):
        named = [job.settings.reward.function]
    elif isinstance(job, StepJob):
        named = [run.settings.reward.function for run in job.runs]
    else:
        named = []
    return {function for function in named if function}


def _planned(evaluation: PlannedEvaluation) -> PlannedPolicy:
    run = evaluation.run
    return PlannedPolicy(
        eval=evaluation.id,
        base=evaluation.base,
        run=run.id if run else None,
        arm=run.arm if run else None,
        experiment=run.experiment if run else None,
        varied=run.varied if run else {},
    )


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
