"""The job of every rule, by the value of the rule's wildcard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, TypeVar

from qerl.data.inputs import content_of, hash_of
from qerl.data.sources import SPLITS
from qerl.host.plugins import source_version
from qerl.jobs.base import Job
from qerl.jobs.dispatch import function_of
from qerl.jobs.evaluate import EvaluateJob, PlannedPolicy, StoredPolicy
from qerl.jobs.gates import NumericsJob, SpeedJob, VerdictJob
from qerl.jobs.prepare import CalibratedOn, CheckJob, DataJob, FetchJob, PretrainJob, QuantizeJob
from qerl.jobs.profile import RolloutJob, StepJob, TimedRun
from qerl.jobs.report import FigureJob, ReportJob, SamplesJob, ShapesJob, TableJob
from qerl.jobs.shapes import PointJob, RolloutMixJob
from qerl.jobs.study import GatherJob, PageJob
from qerl.jobs.train import TrainJob
from qerl.plan.checked import ModelCheck, checks, evaluation_check, run_check
from qerl.plan.files import FINISHED, PUBLISHED, Files
from qerl.plan.shapes import measured_files, point_jobs
from qerl.plan.sheets import Plan, PlannedEvaluation
from qerl.plan.workload import workload_key
from qerl.provenance.code_version import code_version
from qerl.results.paths import SAMPLES_PAGE, VERDICT
from qerl.settings.base import ConfigError
from qerl.settings.benches import GateSettings, RolloutBench
from qerl.settings.evaluation import EvaluationSettings
from qerl.settings.models import HubModel, PretrainSettings

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
            model=base.model,
            weights=base.weights,
            source=self.files.dense(base.model),
            calibration=CalibratedOn(settings=made, data=self.files.data(str(made.dataset))) if made else None,
            error=base.error,
            pack_delta_nets=base.pack_delta_nets,
            out=self.files.quantized(base.id),
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
            checkpoint=self.files.checkpoint(run.checkpoint),
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
            checkpoint=self.files.checkpoint(evaluation.checkpoint),
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
            bases = {base.weights: self.files.checkpoint(base) for base in self._plan.bench_checkpoints(bench)}
            return RolloutJob(bench=bench, settings=settings, checkpoints=bases, out=out)
        runs = [
            TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=self.files.checkpoint(run.checkpoint),
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
        from qerl.plan.study import gather_job  # which imports pandas, for studies alone

        return gather_job(self._plan, self.files, scope)

    def page(self, scope: str) -> PageJob:
        """Make the page of a study's data."""
        from qerl.plan.study import page_job

        return page_job(self._plan, [self.files.study_folder(scope)], self.files.study(scope))

    def published(self) -> PageJob:
        """Make the page of a study's committed data."""
        from qerl.plan.study import page_job

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
    base, run = evaluation.checkpoint, evaluation.run
    return PlannedPolicy(
        eval=evaluation.id,
        model=base.model,
        weights=base.weights,
        recipe=base.recipe,
        pack_delta_nets=base.pack_delta_nets,
        run=run.id if run else None,
        arm=run.arm if run else None,
        experiment=run.experiment if run else None,
        varied=run.varied if run else {},
    )
