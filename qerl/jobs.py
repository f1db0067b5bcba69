"""What a plan and a job are, and the jobs that make data, bases and policies, and evaluate them.

A class per kind of job is all that is said of it, besides its rule: the job's fields, its function, the files that it
writes and reads, what decides its result, and how it is made from a plan. The rules of the workflow take all of that
from here and from `qerl.report_jobs`, by `qerl.workflow.rules`, and `qerl rule` runs the job, which a rule passes on as
JSON. Neither module imports a large library, because every call of Snakemake reads them, and they decide no result:
what does is in the fields of the jobs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from qerl.host.imports import OPTIONAL, source_version
from qerl.host.lease import own_lock
from qerl.host.provenance import code_version, installed_version
from qerl.results import paths
from qerl.settings.base import Part
from qerl.settings.data import DatasetSettings, FunctionData, ReasoningGymData, Split
from qerl.settings.models import Base, HubModel, LocalModel, PretrainSettings
from qerl.settings.run import CHECKED, UNDECIDING, UNDECIDING_OF_ENGINE, RunSettings
from qerl.settings.workflow import Config, EvaluationSettings, TaskSettings
from qerl.settings.workloads import PointPart

# The plan: a configuration with its runs, evaluations and bases, from which all jobs are made.


@dataclass(frozen=True)
class PlannedRun:
    """One training run, which is a row of the run table."""

    id: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    """The values of the grid, by dotted key."""
    settings: RunSettings


@dataclass(frozen=True)
class PlannedEvaluation:
    """An evaluation of a base in one weight format or of a run's policy; `tasks` has the names of data sets."""

    id: str
    base: Base
    run: PlannedRun | None
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a configuration asks for, by `qerl.workflow.plan`."""

    config: Config
    runs: dict[str, PlannedRun]
    #: Runs of experiments with `train: false`.
    timed: dict[str, PlannedRun]
    #: The bases by their names.
    checkpoints: dict[str, Base]
    evaluations: dict[str, PlannedEvaluation]
    #: The jobs of the speed grid, each with its parts.
    points: dict[str, list[PointPart[Any, Any]]]
    #: The runs of each job that trains several side by side, which `qerl.workflow.rules` chooses.
    cohorts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder of all results of this configuration."""
        return f"results/{self.config.name}"

    @property
    def work(self) -> Path:
        """The folder of killed jobs' state, outside of the results."""
        return Path("work") / self.config.name

    @property
    def listed(self) -> Path:
        """The file that lists the paths of all results, one a line."""
        return Path(self.folder, paths.LISTED)

    def dense(self, model: str) -> Path:
        """An unquantized model: the user's folder, or the folder into which it is trained or downloaded."""
        settings = self.config.models[model]
        return settings.path if isinstance(settings, LocalModel) else Path(self.folder, paths.MODELS, model)

    @cached_property
    def own_models(self) -> set[Path]:
        """The models that are folders of the user."""
        return {model.path for model in self.config.models.values() if isinstance(model, LocalModel)}

    @cached_property
    def lock_file(self) -> Path | None:
        """The lock file, if it exists."""
        return self.config.lock if self.config.lock and self.config.lock.is_file() else None

    @cached_property
    def checks(self) -> dict[str, CheckJob]:
        """The checks of models with their problems, by id. The miniature, which is trained on these, needs none."""
        runs = (CheckJob.of_run(self, run) for run in self.runs.values())
        evaluations = (CheckJob.of_evaluation(self, evaluation) for evaluation in self.evaluations.values())
        return {check.out.name: check for check in (*runs, *evaluations) if check}

    @property
    def studied(self) -> list[Path]:
        """The results of runs and evaluations."""
        runs = [TrainJob.path(self, name, paths.RUN) for name in self.runs]
        return runs + [EvaluateJob.path(self, name, paths.RESULT) for name in self.evaluations]


# What all jobs have.

#: The splits of a prepared data set.
SPLITS: tuple[Split, ...] = get_args(Split)
_WILDCARD = re.compile(r"\{(\w+)\}")


class KilledError(RuntimeError):
    """A process of a job was killed, perhaps for lack of memory. A new start continues from its state."""


class Job(Part):
    """The input of one call of `qerl rule`. A job has no default values."""

    #: The function that does the job, as `module:name`: planning doesn't import it. All code that the module imports
    #: decides the result.
    does: ClassVar[str]
    #: The place of the result in the folder of results: a file, or a folder of files. The jobs of one kind differ in
    #: the value of the wildcard.
    place: ClassVar[str]
    #: The files of such a folder on which other rules may depend; without them, on the place as a whole.
    writes: ClassVar[tuple[str, ...]] = ()
    #: The category of its result in Snakemake's report, which sorts them by name.
    heading: ClassVar[str] = ""
    #: Whether the job needs one GPU, if the machine has any.
    on_gpu: ClassVar[bool] = False
    #: Whether the process runs only on the CPU cores that belong to its GPUs.
    own_cores: ClassVar[bool] = False
    #: Optional libraries that the job doesn't need, and whose import, which takes seconds, is prevented.
    without: ClassVar[Collection[str]] = ()

    kind: str
    """The name by which rules and `qerl rule` find the class."""
    out: Path
    """The path of the result: a file, or a folder of files."""

    # --- in a plan

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        """The names of the jobs of this kind, which are the values of the wildcard; none for a kind without one."""
        return ()

    @classmethod
    def make(cls, plan: Plan, name: str) -> Job:
        """The job of that name; the name is empty for a kind without a wildcard."""
        raise NotImplementedError

    @classmethod
    def path(cls, plan: Plan, name: str = "", file: str = "") -> Path:
        """The path of a job's result, or of a file in it; without a name, with the wildcard."""
        pattern = f"{cls.place}/{file}" if file else cls.place
        return Path(plan.folder, _WILDCARD.sub(name, pattern) if name else pattern)

    @classmethod
    def wildcard(cls) -> str | None:
        """The wildcard by which the jobs of this kind differ, if it has several."""
        found = _WILDCARD.search("/".join((cls.place, *cls.writes)))
        return found and found[1]

    @classmethod
    def outputs(cls, plan: Plan, name: str = "") -> list[Path]:
        """The paths on which other rules may depend."""
        return [cls.path(plan, name, file) for file in cls.writes or ("",)]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        """The files and folders that the job reads, by what they are. Those of `checked` decide nothing."""
        return {}

    def contents(self, plan: Plan) -> list[Path]:
        """The files whose content decides the result: the user's, as copies have other times."""
        return self.own_files

    @property
    def category(self) -> str:
        """The category of this very job's result."""
        return self.heading

    # --- for one start

    @property
    def gpus(self) -> int:
        """The number of GPUs that the job needs."""
        return int(self.on_gpu)

    @property
    def joins_free_memory(self) -> bool:
        """Whether the job's process joins free parts of GPU memory (`qerl.host.lease`)."""
        return False

    @property
    def locks(self) -> list[tuple[Path, str]]:
        """The folders and names of the locks of a job that continues the state of a killed one; none for others."""
        return []

    @property
    def function(self) -> str:
        """The function of this very job."""
        return self.does

    # --- what decides the result

    @property
    def undeciding(self) -> Any:
        """Fields that don't decide the result, as pydantic's `exclude`."""
        return None

    @property
    def deciding(self) -> str:
        """The fields that decide the result, as JSON. If they don't change, the result is kept."""
        return self.model_dump_json(exclude=self.undeciding)

    @property
    def own_functions(self) -> set[str]:
        """The user's functions that the job calls, whose code decides the result too."""
        return set()

    @property
    def own_files(self) -> list[Path]:
        """The user's files that the job reads, besides models."""
        return []

    @property
    def code(self) -> str:
        """The version of the code that the job runs."""
        versions = map(source_version, sorted(self.own_functions))
        return " ".join([code_version(self.function.partition(":")[0]), *versions])


# Jobs that make data sets and bases, and that check them before any long work.


class DataJob(Job):
    """Prepare a data set: generated, from a local file or from the hub."""

    does: ClassVar[str] = "qerl.data.sources:prepare_data"
    place: ClassVar[str] = "data/{dataset}"
    writes: ClassVar[tuple[str, ...]] = (paths.DATASET, *(f"{split}.jsonl" for split in SPLITS))
    kind: str = "data"
    settings: DatasetSettings
    lock_file: Path | None
    """Compare the hub's files with this lock file."""

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.config.datasets

    @classmethod
    def make(cls, plan: Plan, name: str) -> DataJob:
        return cls(settings=plan.config.datasets[name], lock_file=plan.lock_file, out=cls.path(plan, name))

    @classmethod
    def folders(cls, plan: Plan, names: Iterable[str]) -> dict[str, Path]:
        """The folders of data sets, by name."""
        return {name: cls.path(plan, name) for name in names}

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"records": self.own_files}

    @property
    def own_functions(self) -> set[str]:
        origin = self.settings.origin
        return {origin.function} if isinstance(origin, FunctionData) else set()

    @property
    def code(self) -> str:
        of_gym = isinstance(self.settings.origin, ReasoningGymData)
        return f"{super().code} {installed_version('reasoning-gym')}" if of_gym else super().code

    @property
    def own_files(self) -> list[Path]:
        return [self.settings.own_file] if self.settings.own_file else []


def data_files(folders: Iterable[Path], splits: Collection[Split] = SPLITS) -> list[Path]:
    """The files of prepared data sets with these splits."""
    return [folder / file for folder in folders for file in (paths.DATASET, *(f"{split}.jsonl" for split in splits))]


class PretrainJob(Job):
    """Train the miniature base policy from scratch."""

    does: ClassVar[str] = "qerl.rl.pretrain:pretrain_base"
    without: ClassVar[Collection[str]] = OPTIONAL
    place: ClassVar[str] = "models/{pretrained}"
    on_gpu: ClassVar[bool] = True
    kind: str = "pretrain"
    settings: PretrainSettings
    data: dict[str, Path]
    """The folder of each prepared data set."""
    work: Path

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return [name for name, model in plan.config.models.items() if isinstance(model, PretrainSettings)]

    @classmethod
    def make(cls, plan: Plan, name: str) -> PretrainJob:
        settings = plan.config.models[name]
        assert isinstance(settings, PretrainSettings)
        data, work = DataJob.folders(plan, settings.all_datasets), plan.work / paths.MODELS / name
        return cls(settings=settings, data=data, work=work, out=plan.dense(name))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"data": data_files(self.data.values())}

    @property
    def gpus(self) -> int:
        return self.settings.processes

    @property
    def locks(self) -> list[tuple[Path, str]]:
        """A lock of the work folder, as of a training, if it has checkpoints."""
        return [(self.work, own_lock(1))] if self.settings.checkpoint_seconds else []

    @property
    def undeciding(self) -> Any:
        return {"work": True, "settings": {"processes", "checkpoint_seconds"}}


class FetchJob(Job):
    """Download a model of the hub at a pinned revision."""

    does: ClassVar[str] = "qerl.workflow.bases:fetch_base"
    place: ClassVar[str] = "models/{fetched}"
    kind: str = "fetch"
    repo: str
    revision: str
    lock_file: Path | None

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return [name for name, model in plan.config.models.items() if isinstance(model, HubModel)]

    @classmethod
    def make(cls, plan: Plan, name: str) -> FetchJob:
        model = plan.config.models[name]
        assert isinstance(model, HubModel)
        return cls(repo=model.repo, revision=model.revision, lock_file=plan.lock_file, out=plan.dense(name))

    @property
    def code(self) -> str:
        """None: a download is decided by its commit."""
        return ""


class CheckJob(Job):
    """Check settings, tokenizer and problems with the model, before any long work; `out` marks a passed check."""

    does: ClassVar[str] = "qerl.workflow.preflight:check_problems"
    place: ClassVar[str] = "checked/{check}"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: str = "check"
    model: Path
    runs: list[RunSettings]
    """With the values of `CHECKED`, and otherwise default values."""
    evaluation: EvaluationSettings
    data: dict[str, Path]

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.checks

    @classmethod
    def make(cls, plan: Plan, name: str) -> CheckJob:
        return plan.checks[name]

    @classmethod
    def of_run(cls, plan: Plan, run: PlannedRun) -> CheckJob | None:
        """The check that precedes a run, if its base needs one."""
        return cls._of(plan, run.settings.model, [run.settings], [])

    @classmethod
    def of_evaluation(cls, plan: Plan, evaluation: PlannedEvaluation) -> CheckJob | None:
        """The check that precedes an evaluation, if its base needs one."""
        return cls._of(plan, evaluation.base.model, [], tasks_of(plan, evaluation))

    @classmethod
    def _of(cls, plan: Plan, model: str, runs: list[RunSettings], tasks: list[TaskSettings]) -> CheckJob | None:
        if isinstance(plan.config.models[model], PretrainSettings):
            return None
        evaluation = plan.config.evaluation.model_copy(update={"tasks": tasks})
        datasets = sorted({run.dataset for run in runs} | {task.dataset for task in tasks})
        # The id is of the content, so that a changed setting is a new check and leaves other runs' checks valid.
        content = {
            "model": model,
            "runs": json.dumps([run.model_dump(mode="json", include=CHECKED) for run in runs]),
            "evaluation": tasks and evaluation.model_dump_json(exclude=UNDECIDING_OF_ENGINE),
            "datasets": datasets,
        }
        return cls(
            model=plan.dense(model),
            runs=[RunSettings.model_validate(run.model_dump(include=CHECKED)) for run in runs],
            evaluation=evaluation,
            data=DataJob.folders(plan, datasets),
            out=cls.path(plan, f"{model}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"model": [self.model], "data": data_files(self.data.values())}


class QuantizeJob(Job):
    """Make a base in one weight format, with a report on size and error; `out` is the folder of the checkpoint."""

    does: ClassVar[str] = "qerl.workflow.bases:quantize_base"
    place: ClassVar[str] = "quantize/{checkpoint}"
    writes: ClassVar[tuple[str, ...]] = (paths.CHECKPOINT, paths.REPORT)
    on_gpu: ClassVar[bool] = True
    kind: str = "quantize"
    base: Base
    source: Path
    data: Path | None
    """The data set on whose texts AWQ measures activations; None for other recipes."""
    report: Path | None
    """None links a source that has the format already."""

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.checkpoints

    @classmethod
    def make(cls, plan: Plan, name: str) -> QuantizeJob:
        base = plan.checkpoints[name]
        return cls(
            base=base,
            source=plan.dense(base.model),
            data=DataJob.path(plan, str(base.calibration.dataset)) if base.calibration else None,
            report=cls.path(plan, name, paths.REPORT),
            out=cls.checkpoint(plan, base),
        )

    @classmethod
    def checkpoint(cls, plan: Plan, base: Base) -> Path:
        """The folder of a base's checkpoint."""
        return cls.path(plan, base.name, paths.CHECKPOINT)

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"base": [self.source], "data": data_files([self.data] if self.data else [])}


# The job of a training run.


class HubBase(Part):
    """A base of the hub: its repository and commit."""

    name: str
    revision: str


class TrainJob(Job):
    """Train one run. A killed run continues from its last checkpoint in `work`."""

    does: ClassVar[str] = "qerl.rl.cohort:deliver_run"
    without: ClassVar[Collection[str]] = OPTIONAL
    place: ClassVar[str] = "train/{run}"
    writes: ClassVar[tuple[str, ...]] = (paths.POLICY, paths.METRICS, paths.ROLLOUTS, paths.RUN)
    kind: str = "train"
    id: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    """The values of the grid, by dotted key."""
    settings: RunSettings
    on_failure: Literal["stop", "row"]
    """With `row`, running out of memory or over the time limit is a result."""
    time_limit: float | None
    """Hours."""
    base: HubBase | None
    """The repository of a base that is used unchanged from the hub; None for a base that a job made."""
    checkpoint: Path
    data: Path
    work: Path
    tracked: Path
    """The folder in which trackers keep their records."""
    version: str
    """What a job of the workflow writes beside its results, by which later plans know them (`qerl.workflow.rules`)."""

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.runs

    @classmethod
    def make(cls, plan: Plan, name: str) -> TrainJob:
        run = plan.runs[name]
        experiment = plan.config.experiments[run.experiment]
        return cls(
            **vars(run),
            on_failure=experiment.on_failure,
            time_limit=experiment.time_limit,
            base=None,
            checkpoint=QuantizeJob.checkpoint(plan, run.settings.base),
            data=DataJob.path(plan, run.settings.dataset),
            work=plan.work / name,
            tracked=Path(plan.folder, paths.TRACKED),
            version="",
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        check = CheckJob.of_run(plan, plan.runs[self.id])
        return {
            "data": data_files([self.data], ["train", "validation"] if self.settings.validation.every else ["train"]),
            "checked": [check.out] if check else [],
            "checkpoint": [self.checkpoint],
        }

    @property
    def finished(self) -> Path:
        """The folder in which a cohort of the workflow leaves the run's results, by all that decides them."""
        return self.work.parent / "finished" / self.work.name / self.version.partition(" ")[0]

    @property
    def taken(self) -> bool:
        """Whether the job takes results that a cohort has left, and trains nothing."""
        return any(self.finished.glob(f"*/{paths.RUN}"))

    @property
    def gpus(self) -> int:
        """The number of GPUs of its processes on this machine or of its engine."""
        return 0 if self.taken else self.settings.gpus_of_node

    @property
    def joins_free_memory(self) -> bool:
        return self.settings.joins_free_memory

    @property
    def locks(self) -> list[tuple[Path, str]]:
        """A lock of the work folder: a training survives a killed Snakemake, and a second would write the same
        files. Of several machines, which may share the folder, each has its own; so has each process of torchrun.
        """
        return [(self.work, own_lock(self.settings.nodes))]

    @property
    def undeciding(self) -> Any:
        """Settings that decide no result. A time limit decides one only if exceeding it is a result."""
        fields: dict[str, Any] = {"settings": UNDECIDING, "on_failure": True, "tracked": True, "version": True}
        return fields if self.on_failure == "row" else fields | {"time_limit": True}

    @property
    def own_functions(self) -> set[str]:
        return self.settings.own_functions


class CohortJob(Job):
    """Train runs side by side, as far as they have no results. Each run's own job takes them, or trains it alone.

    `out` is a mark for these jobs. It decides nothing: what a run is made of is in its own job.
    """

    does: ClassVar[str] = "qerl.workflow.cohorts:train_side_by_side"
    without: ClassVar[Collection[str]] = OPTIONAL
    place: ClassVar[str] = "cohorts/{cohort}"
    on_gpu: ClassVar[bool] = True
    kind: str = "cohort"
    runs: list[TrainJob]

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.cohorts

    @classmethod
    def make(cls, plan: Plan, name: str) -> CohortJob:
        return cls(runs=[TrainJob.make(plan, run) for run in plan.cohorts[name]], out=cls.path(plan, name))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        each = [run.inputs(plan) for run in self.runs]
        return {name: list(dict.fromkeys(path for one in each for path in one[name])) for name in each[0]}

    @property
    def joins_free_memory(self) -> bool:
        return all(run.joins_free_memory for run in self.runs)

    @property
    def locks(self) -> list[tuple[Path, str]]:
        """The locks of its runs."""
        return [lock for run in self.runs for lock in run.locks]

    @property
    def deciding(self) -> str:
        return ""

    @property
    def code(self) -> str:
        return ""


#: Settings that runs of a cohort share, beside the base, since one process with one engine serves all.
_SHARED = ("weights", "dtype", "method", "gradient_checkpointing", "processes", "nodes")


def refused_engine(jobs: Sequence[TrainJob]) -> str | None:
    """A sentence that says why one engine can't serve these runs, by their settings; None if it can."""
    first = jobs[0]
    for job in jobs:
        for key in _SHARED:
            if getattr(job.settings, key) != getattr(first.settings, key):
                return f"{first.id} and {job.id} differ in {key}, and runs side by side share it"
        if job.settings.rollout.native != first.settings.rollout.native:
            return f"{first.id} and {job.id} differ in rollout.native, and runs side by side share it"
    for settings in (job.settings for job in jobs):
        one_process = settings.processes == settings.nodes == 1
        if settings.method != "lora" or settings.rollout.engine != "native" or not one_process:
            return "runs side by side need method=lora, the native engine and one process"
        if settings.adapter.of_experts:
            return "runs side by side have no adapters of experts (adapter.targets)"
        if "mlflow" in settings.track:
            return "runs side by side can't be tracked by mlflow (track), since a process has one database of it"
    return None


# Jobs of evaluations.


def tasks_of(plan: Plan, evaluation: PlannedEvaluation) -> list[TaskSettings]:
    """The tasks of an evaluation."""
    return [task for task in plan.config.evaluation.tasks if task.dataset in evaluation.tasks]


class EvaluateJob(Job):
    """Score a base or a trained policy on every task."""

    does: ClassVar[str] = "qerl.evals.evaluate:evaluate_policy"
    without: ClassVar[Collection[str]] = OPTIONAL
    place: ClassVar[str] = "evaluate/{evaluation}"
    writes: ClassVar[tuple[str, ...]] = (paths.RESULT, paths.SAMPLES, paths.OUTCOMES)
    kind: str = "evaluate"
    policy: dict[str, Any]
    """The fields that describe the policy in its result."""
    settings: EvaluationSettings
    checkpoint: Path
    trained: Path | None
    """The folder of a run's policy; None for a base."""
    data: dict[str, Path]

    @classmethod
    def names(cls, plan: Plan) -> Collection[str]:
        return plan.evaluations

    @classmethod
    def make(cls, plan: Plan, name: str) -> EvaluateJob:
        evaluation = plan.evaluations[name]
        run = evaluation.run
        about = (run.id, run.arm, run.experiment, run.varied) if run else (None, None, None, {})
        described = dict(zip(("eval", "run", "arm", "experiment", "varied"), (name, *about), strict=True))
        return cls(
            policy=described | evaluation.base.stored,
            settings=plan.config.evaluation.model_copy(update={"tasks": tasks_of(plan, evaluation)}),
            checkpoint=QuantizeJob.checkpoint(plan, evaluation.base),
            trained=TrainJob.path(plan, run.id, paths.POLICY) if run else None,
            data=DataJob.folders(plan, sorted(evaluation.tasks)),
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        check = CheckJob.of_evaluation(plan, plan.evaluations[self.out.name])
        return {
            "data": data_files(self.data.values(), self.splits),
            "checked": [check.out] if check else [],
            "checkpoint": [self.checkpoint],
            "trained": [self.trained] if self.trained else [],
        }

    @property
    def splits(self) -> list[Split]:
        """The splits that its tasks read. A stock task takes its examples from the training split."""
        read = {split for task in self.settings.tasks for split in (task.split, *(("train",) * bool(task.task)))}
        return [split for split in SPLITS if split in read]

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus

    @property
    def undeciding(self) -> Any:
        """Settings of the engine's memory."""
        return {"settings": UNDECIDING_OF_ENGINE}
