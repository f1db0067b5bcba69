"""The plan of a configuration and its jobs: a class per kind of job is all that is said of it, besides its rule.

A class has the job's fields, its function, the files that it writes and reads, what decides its result, and how it is
made from a plan. The rules of the workflow take all of that from here (`qerl.workflow.rules`), and `qerl rule` runs
the job, which a rule passes on as JSON. This module imports no large library, because every call of Snakemake reads
it, and it decides no result: what does is in the fields of the jobs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from qerl.host.imports import OPTIONAL, source_version
from qerl.host.lease import own_lock
from qerl.host.provenance import code_version
from qerl.results import paths, printed
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, FunctionData, Split
from qerl.settings.models import Base, HubModel, LocalModel, PretrainSettings
from qerl.settings.run import CHECKED, UNDECIDING, UNDECIDING_OF_ENGINE, UNDECIDING_OF_STEPS, RunSettings
from qerl.settings.workflow import (
    Config,
    EvaluationSettings,
    GateSettings,
    RolloutBench,
    StepBench,
    StudySettings,
    TaskSettings,
)
from qerl.settings.workloads import Decoding, EngineStep, Mix, Prompting, StepWork, TrlStep

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

    @cached_property
    def names(self) -> dict[str, Collection[str]]:
        """The values of each wildcard, which are the names of the jobs of one kind."""
        config, models = self.config, self.config.models.items()
        return {
            "dataset": config.datasets,
            "pretrained": [name for name, model in models if isinstance(model, PretrainSettings)],
            "fetched": [name for name, model in models if isinstance(model, HubModel)],
            "check": self.checks,
            "checkpoint": self.checkpoints,
            "run": self.runs,
            "evaluation": self.evaluations,
            "bench": config.benches,
            "table": self.tables,
            "figure": self.figures,
            "point": self.points,
            "scope": (PLANNED, FINISHED) if config.study else (),
            "model": config.models if config.study else (),
            "stored": sorted(folder.name for folder in config.gates.stored.glob("*/")) if config.gates else (),
        }

    @property
    def tables(self) -> list[str]:
        """The names of the tables for which this configuration has results."""
        kinds = {bench.kind for bench in self.config.benches.values()}
        measured = {"memory_speed": "step" in kinds, "throughput": "rollout" in kinds, "drift": self.config.drift}
        made = {"accuracy": True, "quantization": True, **measured}
        return [*(name for name, exists in made.items() if exists), *printed.tables_fed(self._covered)]

    @property
    def figures(self) -> list[str]:
        """The names of the figures for which this configuration has results."""
        noisy = any(run.settings.noise.schedule != "off" for run in self.runs.values())
        drawn = any(isinstance(bench, RolloutBench) for bench in self.config.benches.values())
        made = dict.fromkeys(("accuracy", "reward", "entropy", "completion_length"), True)
        made |= {"noise": noisy, "drift": self.config.drift, "throughput": drawn}
        return [*(name for name, exists in made.items() if exists), *printed.figures_fed(self._covered)]

    @property
    def _covered(self) -> set[tuple[str, str]]:
        """(kind, model) of the results that are compared with the paper's (`qerl.results.printed`)."""
        models = {base.model for base in self.checkpoints.values()}
        evaluated = {(task.dataset, model) for task in self.config.evaluation.tasks for model in models}
        settings = [run.settings for run in self.runs.values()]
        trained = {(kind, one.model) for one in settings for kind in ("run", f"data={one.dataset}")}
        measured = {
            (bench.kind, model)
            for bench in self.config.benches.values()
            for model in (
                [bench.model]
                if isinstance(bench, RolloutBench)
                else [run.settings.model for run in self.timed_by(bench)]
            )
        }
        return evaluated | trained | measured

    def timed_by(self, bench: StepBench) -> list[PlannedRun]:
        """The runs that a step bench times: the first seed of each arm and point of its experiment's grid."""
        first: dict[str, PlannedRun] = {}
        for run in (*self.runs.values(), *self.timed.values()):
            if run.experiment == bench.experiment:
                point = {key: value for key, value in run.varied.items() if key != "seed"}
                first.setdefault(json.dumps([run.arm, point]), run)
        return list(first.values())

    @property
    def results(self) -> list[Path]:
        """All results from which tables, figures and the report are made, but the points of the speed grid."""
        if self.config.gates:
            return VerdictJob.judged(self)
        reports = [QuantizeJob.path(self, name, paths.REPORT) for name in self.checkpoints]
        return [*reports, *self.studied, *(ProfileJob.path(self, name) for name in self.config.benches)]

    @property
    def studied(self) -> list[Path]:
        """The results of runs and evaluations."""
        runs = [TrainJob.path(self, name, paths.RUN) for name in self.runs]
        return runs + [EvaluateJob.path(self, name, paths.RESULT) for name in self.evaluations]

    @property
    def outcome(self) -> list[Path]:
        """The final files of a configuration: its report and its study's page, or the mark that every gate passes."""
        if self.config.gates:
            return [VerdictJob.path(self, file="passed")]
        return [ReportJob.path(self), *([PageJob.path(self, PLANNED, paths.STUDY_PAGE)] if self.config.study else [])]


# What all jobs have.

#: The splits of a prepared data set.
SPLITS: tuple[Split, ...] = get_args(Split)
_WILDCARD = re.compile(r"\{(\w+)\}")


class KilledError(RuntimeError):
    """A process of a job was killed, perhaps for lack of memory. A new start continues from its state."""


class Part(BaseModel):
    """A part of a job: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    def lock(self) -> tuple[Path, str] | None:
        """The folder and name of the lock of a job that continues the state of a killed one; None for others."""
        return None

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

    @classmethod
    def make(cls, plan: Plan, name: str) -> PretrainJob:
        settings = plan.config.models[name]
        assert isinstance(settings, PretrainSettings)
        return cls(settings=settings, data=DataJob.folders(plan, settings.datasets), out=plan.dense(name))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"data": data_files(self.data.values())}


class FetchJob(Job):
    """Download a model of the hub at a pinned revision."""

    does: ClassVar[str] = "qerl.workflow.bases:fetch_base"
    place: ClassVar[str] = "models/{fetched}"
    kind: str = "fetch"
    repo: str
    revision: str
    lock_file: Path | None

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
    def make(cls, plan: Plan, name: str) -> CheckJob:
        return plan.checks[name]

    @classmethod
    def of_run(cls, plan: Plan, run: PlannedRun) -> CheckJob | None:
        """The check that precedes a run, if its base needs one."""
        return cls._of(plan, run.settings.model, [run.settings], [])

    @classmethod
    def of_evaluation(cls, plan: Plan, evaluation: PlannedEvaluation) -> CheckJob | None:
        """The check that precedes an evaluation, if its base needs one."""
        return cls._of(plan, evaluation.base.model, [], asked_tasks(plan, evaluation))

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
            "evaluation": evaluation.model_dump_json(),
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

    does: ClassVar[str] = "qerl.rl.train:train_run"
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
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        check = CheckJob.of_run(plan, plan.runs[self.id])
        return {
            "data": data_files([self.data], ["train"]),
            "checked": [check.out] if check else [],
            "checkpoint": [self.checkpoint],
        }

    @property
    def gpus(self) -> int:
        """The number of GPUs of its processes on this machine or of its engine."""
        return self.settings.gpus_of_node

    @property
    def joins_free_memory(self) -> bool:
        return self.settings.joins_free_memory

    @property
    def lock(self) -> tuple[Path, str]:
        """A lock of the work folder: a training survives a killed Snakemake, and a second would write the same
        files. Of several machines, which may share the folder, each has its own; so has each process of torchrun.
        """
        return self.work, own_lock(self.settings.nodes)

    @property
    def undeciding(self) -> Any:
        """Settings that decide no result. A time limit decides one only if exceeding it is a result."""
        fields: dict[str, Any] = {"settings": UNDECIDING, "on_failure": True, "tracked": True}
        return fields if self.on_failure == "row" else fields | {"time_limit": True}

    @property
    def own_functions(self) -> set[str]:
        return self.settings.reward.own_functions


# Jobs of evaluations.


def asked_tasks(plan: Plan, evaluation: PlannedEvaluation) -> list[TaskSettings]:
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
    def make(cls, plan: Plan, name: str) -> EvaluateJob:
        evaluation = plan.evaluations[name]
        run = evaluation.run
        about = (run.id, run.arm, run.experiment, run.varied) if run else (None, None, None, {})
        described = dict(zip(("eval", "run", "arm", "experiment", "varied"), (name, *about), strict=True))
        return cls(
            policy=described | evaluation.base.stored,
            settings=plan.config.evaluation.model_copy(update={"tasks": asked_tasks(plan, evaluation)}),
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


class StoredJob(EvaluateJob):
    """Score a committed adapter for the gates, without training."""

    place: ClassVar[str] = "gates/stored/{stored}"
    kind: str = "stored"

    @classmethod
    def make(cls, plan: Plan, name: str) -> StoredJob:
        return cls(
            policy={"stored": name},
            settings=plan.config.evaluation,
            checkpoint=gated_checkpoint(plan),
            trained=gates_of(plan).stored / name,
            data=DataJob.folders(plan, sorted({task.dataset for task in plan.config.evaluation.tasks})),
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        trained = [self.trained] if self.trained else []
        return {"data": data_files(self.data.values()), "checkpoint": [self.checkpoint], "trained": trained}


# Jobs of a configuration's benches of time and memory.


class ProfileJob(Job):
    """A bench of rollouts or of steps."""

    place: ClassVar[str] = "profile/{bench}.json"
    kind: str = "profile"
    bench: str

    @classmethod
    def make(cls, plan: Plan, name: str) -> RolloutJob | StepJob:
        settings, out = plan.config.benches[name], cls.path(plan, name)
        if isinstance(settings, RolloutBench):
            bases = [Base(settings.model, weights) for weights in settings.weights]
            folders: dict[str, Path] = {base.weights: QuantizeJob.checkpoint(plan, base) for base in bases}
            return RolloutJob(bench=name, settings=settings, checkpoints=folders, out=out)
        runs = [
            TimedRun(
                id=run.id,
                arm=run.arm,
                varied={key: value for key, value in run.varied.items() if key != "seed"},
                settings=run.settings,
                checkpoint=QuantizeJob.checkpoint(plan, run.settings.base),
                data=DataJob.path(plan, run.settings.dataset),
            )
            for run in plan.timed_by(settings)
        ]
        return StepJob(bench=name, settings=settings, runs=runs, out=out)


class RolloutJob(ProfileJob):
    """Measure rollout throughput by weight format and LoRA rank."""

    does: ClassVar[str] = "qerl.bench.native:bench_rollout"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: str = "rollout"
    settings: RolloutBench
    checkpoints: dict[str, Path]
    """By weight format."""

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"checkpoints": sorted(self.checkpoints.values(), key=str), "data": []}

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus


class TimedRun(Part):
    """A run whose single steps are timed."""

    id: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings
    checkpoint: Path
    data: Path


class StepJob(ProfileJob):
    """Measure the time of a training step of several runs."""

    does: ClassVar[str] = "qerl.bench.steps:bench_step"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: str = "step"
    settings: StepBench
    runs: list[TimedRun]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        checkpoints, data = ({getattr(run, name) for run in self.runs} for name in ("checkpoint", "data"))
        return {"checkpoints": sorted(checkpoints, key=str), "data": data_files(sorted(data))}

    @property
    def gpus(self) -> int:
        """The most GPUs of any run's engine; each run is timed in one process, even if it trains in several."""
        return max(run.settings.rollout.engine_gpus for run in self.runs)

    @property
    def undeciding(self) -> Any:
        """Settings that decide neither a run nor the cost of its steps."""
        return {"runs": {"__all__": {"settings": UNDECIDING_OF_STEPS}}}

    @property
    def own_functions(self) -> set[str]:
        return {function for run in self.runs for function in run.settings.reward.own_functions}


# Jobs of the speed grid (`shapes` of a configuration): each writes files of points on random weights.

W = TypeVar("W", Decoding, Prompting, Mix, StepWork)
P = TypeVar("P", int, tuple[int, int], None)


class PointPart(Part, Generic[W, P]):
    """A file of a job of the speed grid: a workload, and what tells the file's points apart."""

    file: str
    work: W
    points: list[P]
    """Numbers of sequences, or pairs of prompts and tokens of each; [None] in a file of one point."""
    settings: EngineStep | TrlStep | None
    """The system's settings of a GRPO step; None for other workloads."""


class PointJob(Job, Generic[W, P]):
    """A job with a GPU and its share of the cores to itself. It continues the files of a killed job.

    `out` is the folder of the parts' files, from which the rule copies them. All parts share a set-up.
    """

    place: ClassVar[str] = "points/{point}"
    on_gpu: ClassVar[bool] = True
    own_cores: ClassVar[bool] = True
    kind: str = "point"
    parts: list[PointPart[W, P]]

    @classmethod
    def make(cls, plan: Plan, name: str) -> PointJob[Any, Any]:
        return PointJob(parts=plan.points[name], out=plan.work / name)

    @property
    def function(self) -> str:
        """The function of the engine or system of all parts."""
        first = self.parts[0]
        system = "trl" if isinstance(first.settings, TrlStep) else getattr(first.work, "engine", "native")
        return first.work.does[system]

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]

    @property
    def lock(self) -> tuple[Path, str]:
        """A lock of the job's folder."""
        return self.out.parent, f".{self.out.name}.lock"

    @property
    def joins_free_memory(self) -> bool:
        """Steps of this project do, as a training does."""
        return isinstance(self.parts[0].settings, EngineStep)

    @property
    def own_files(self) -> list[Path]:
        """The traces of rollouts."""
        works: list[Any] = [part.work for part in self.parts]
        return [work.trace for work in works if isinstance(work, Mix) and work.trace]


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    does: ClassVar[str] = "qerl.report.speed_tables:write_shapes"
    place: ClassVar[str] = "tables"
    kind: str = "shapes"
    files: list[Path]
    """Files of points that are measured, here or elsewhere. They are no input, as they would start measurements."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> ShapesJob:
        assert plan.config.shapes is not None
        files = [PointJob.path(plan, id, part.file) for id, parts in plan.points.items() for part in parts]
        return cls(files=measured_files(plan.config.shapes.samples, files), out=cls.path(plan))

    @property
    def own_files(self) -> list[Path]:
        return self.files


def measured_files(samples: Sequence[Path], files: Sequence[Path]) -> list[Path]:
    """Those of these files of this machine's points that exist, or else the committed ones of the same names.

    They are followed by other committed files, whose jobs are no longer in the grid.
    """
    existing = (measured_file(samples, file) for file in files)
    names = {file.name for file in files}
    return [*filter(None, existing), *(file for file in committed_files(samples) if file.name not in names)]


def measured_file(samples: Sequence[Path], file: Path) -> Path | None:
    """A file of points, if it is measured on this machine, or else the committed one."""
    places = (file, *(folder / file.name for folder in samples))
    return next((one for one in places if one.is_file()), None)


# The first folder with a file counts; ratios are of points of one kind of GPU, and tables name the GPU where it
# differs.
def committed_files(folders: Sequence[Path]) -> list[Path]:
    """The result files of the folders, sorted by name. Of files with the same name, the first folder's counts."""
    named = {file.name: file for folder in reversed(folders) for file in folder.glob("*.json")}
    return [named[name] for name in sorted(named)]


# Jobs that make tables and figures of stored results.


class ReportedJob(Job):
    """A job that reads all stored results."""

    name: str
    """The name of the table or figure, or else of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> Job:
        return cls(name=name or plan.config.name, results=plan.listed, out=cls.path(plan))  # type: ignore[call-arg]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"results": plan.results, "printed": printed_files(self.name)}


class TableJob(ReportedJob):
    """Make one table in the folder `out`."""

    does: ClassVar[str] = "qerl.report.tables:make_table"
    place: ClassVar[str] = "tables"
    writes: ClassVar[tuple[str, ...]] = tuple(f"{{table}}.{end}" for end in ("csv", "md", "tex", "html", "txt"))
    kind: str = "table"


class FigureJob(ReportedJob):
    """Make one figure in the folder `out`."""

    does: ClassVar[str] = "qerl.report.figures:make_figure"
    place: ClassVar[str] = "figures"
    writes: ClassVar[tuple[str, ...]] = tuple(f"{{figure}}{end}" for end in (".png", ".svg", paths.NARROW, ".txt"))
    kind: str = "figure"


class SamplesJob(ReportedJob):
    """Make the page of samples."""

    does: ClassVar[str] = "qerl.report.samples:write_page"
    place: ClassVar[str] = paths.SAMPLES_PAGE
    kind: str = "samples"


class ReportJob(ReportedJob):
    """Make the report, one page of all results."""

    does: ClassVar[str] = "qerl.report.page:write_report"
    place: ClassVar[str] = paths.REPORT_PAGE
    kind: str = "report"
    main: Path | None
    """The accuracy table (.csv), with which the report begins; none without evaluations."""
    tables: list[Path]
    """Pages of tables, or folders of them."""
    figures: list[Path]
    """Paths of figures without their endings, or folders of them. The first two stand beside the main table."""
    samples: str
    """The address of the page of samples, from that of the report; empty without one."""
    omitted: dict[str, str]
    """The arms that the configuration leaves out, and why."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> ReportJob:
        config, speed = plan.config, ShapesJob.path(plan)
        tables = [TableJob.path(plan, table, "{table}.html") for table in plan.tables]
        figures = [FigureJob.path(plan, figure, "{figure}") for figure in plan.figures]
        if config.shapes:
            tables, figures = [speed], [speed]
        if config.gates:
            tables, figures = [VerdictJob.path(plan, file=paths.VERDICT_TABLE)], []
        scored = bool(plan.evaluations) and not (config.gates or config.shapes)
        return cls(
            name=config.name,
            results=plan.listed,
            main=TableJob.path(plan, "accuracy", "{table}.csv") if scored else None,
            tables=tables,
            figures=figures,
            samples=paths.SAMPLES_PAGE if scored else "",
            omitted={f"{name}: {arm}": why for name, e in config.experiments.items() for arm, why in e.omitted.items()},
            out=cls.path(plan),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        figures = [Path(f"{stem}{paths.NARROW}") for stem in self.figures if stem not in self.tables]
        samples = [SamplesJob.path(plan)] if self.samples else []
        return {"results": plan.results, "shown": [*self.tables, *figures, *samples]}


def printed_files(name: str | None = None) -> list[Path]:
    """The files of printed numbers; none for a table or figure that isn't compared with the paper."""
    if name is not None and name not in printed.NAMES:
        return []
    here = Path.cwd()  # Snakemake compares paths, and those of a clone are the same in any folder
    folder = printed.FOLDER.relative_to(here) if printed.FOLDER.is_relative_to(here) else printed.FOLDER
    return sorted(folder.glob("*.csv"))


def listed_results(plan: Plan) -> list[Path]:
    """The content of `plan.listed`: all results that tables, figures and the report show."""
    if plan.config.shapes:
        return [*ShapesJob.make(plan, "").files, *printed_files()]
    verdict = [VerdictJob.path(plan, file=paths.VERDICT)] if plan.config.gates else []
    return [*plan.results, *verdict, *printed_files()]


# Jobs of a study: gather the data of its runs, measure the doses of its bases, and make the page.

#: The scopes of a study's data: all planned runs, or those that are finished.
PLANNED, FINISHED = "planned", "finished"
#: Problems and completions of each on which the doses of a study are measured.
DOSE_PROBLEMS, DOSE_COMPLETIONS = 128, 4


def study_of(plan: Plan) -> StudySettings:
    """The study of a plan that has one."""
    assert plan.config.study is not None
    return plan.config.study


def compared_runs(plan: Plan) -> list[PlannedRun]:
    """The runs that the study compares."""
    named = {studied.experiment for studied in study_of(plan).experiments}
    return [run for run in plan.runs.values() if run.experiment in named]


class GatherJob(Job):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    does: ClassVar[str] = "qerl.study.data:gather_study"
    place: ClassVar[str] = "study/{scope}/data"
    writes: ClassVar[tuple[str, ...]] = paths.STUDY_FILES
    kind: str = "gather"
    study: str
    """The name of the configuration."""
    decides: bool
    experiments: dict[str, str]
    """The size of the bases of each experiment that is compared."""
    sizes: dict[str, str]
    """The size of each base that runs train, by the name of its model."""
    protocol: Path
    """The file that says what is compared."""
    pretrained: dict[str, Path]
    """The report of each base that is trained from scratch, by the name of its model."""
    tasks: dict[str, tuple[str, str, float]]
    """Data set, split and temperature of each task of the evaluation."""
    results: Path
    """A file with the path of a stored result a line."""
    only_finished: bool
    """Leave out runs without a result. False refuses them."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> GatherJob:
        study, evaluation = study_of(plan), plan.config.evaluation
        sizes = {studied.experiment: studied.size for studied in study.experiments}
        models = {run.settings.model: sizes[run.experiment] for run in compared_runs(plan)}
        trained_here = sorted(models.keys() & set(plan.names["pretrained"]))
        sampled = {task.label: (task, evaluation.sampling_of(task)) for task in evaluation.tasks}
        return cls(
            study=plan.config.name,
            decides=study.decides,
            experiments=sizes,
            sizes=models,
            protocol=study.protocol,
            pretrained={model: plan.dense(model) / paths.PRETRAIN for model in trained_here},
            tasks={label: (task.dataset, task.split, one.temperature) for label, (task, one) in sampled.items()},
            results=plan.listed,
            only_finished=name == FINISHED,
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        """The results of planned runs; those of finished ones would start runs, so that their content decides."""
        results = [] if self.only_finished else plan.studied
        return {"results": results, "names": [self.results], "protocol": [self.protocol]}

    def contents(self, plan: Plan) -> list[Path]:
        return [file for file in plan.studied if file.is_file()] if self.only_finished else []


class DosedArm(Part):
    """An arm's error of the weights: its base, and the σ with which the noise on its norms starts."""

    checkpoint: Path
    sigma: float


class DoseJob(Job):
    """Measure how far each arm's error moves an untrained base."""

    does: ClassVar[str] = "qerl.evals.divergence:measure_doses"
    place: ClassVar[str] = f"study/{paths.DOSES}/{paths.dose_file('{model}')}"
    on_gpu: ClassVar[bool] = True
    kind: str = "dose"
    model: str
    checkpoint: Path
    """The base in BF16."""
    arms: dict[str, DosedArm]
    data: Path
    settings: EvaluationSettings
    """The number and the length of completions. The one task names the split of the problems."""
    problems: int

    @classmethod
    def make(cls, plan: Plan, name: str) -> DoseJob:
        """The doses of arms with another base than BF16, or with noise, as their run of the least seed begins."""
        exact = Base(name, "bf16")
        arms: dict[str, DosedArm] = {}
        for run in sorted(compared_runs(plan), key=lambda run: run.settings.seed):
            noise = run.settings.noise
            sigma = 0.0 if noise.schedule == "off" else noise.sigma_start
            if run.settings.model == name and (sigma or run.settings.base.name != exact.name):
                checkpoint = QuantizeJob.checkpoint(plan, run.settings.base)
                arms.setdefault(run.arm, DosedArm(checkpoint=checkpoint, sigma=sigma))
        task = plan.config.evaluation.tasks[0]
        changes = {"tasks": [task], "repeats": DOSE_COMPLETIONS, "dtype": "float32"}
        return cls(
            model=name,
            checkpoint=QuantizeJob.checkpoint(plan, exact),
            arms=arms,
            data=DataJob.path(plan, task.dataset),
            settings=plan.config.evaluation.model_copy(update=changes),
            problems=DOSE_PROBLEMS,
            out=cls.path(plan, name),
        )

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        checkpoints = sorted({self.checkpoint, *(arm.checkpoint for arm in self.arms.values())}, key=str)
        return {"data": data_files([self.data], ["test"]), "checkpoints": checkpoints}


class PageJob(Job):
    """Make tables, the figure and the page of a study's data."""

    does: ClassVar[str] = "qerl.study.dose:write_page"
    place: ClassVar[str] = "study/{scope}"
    writes: ClassVar[tuple[str, ...]] = (paths.STUDY_PAGE, paths.STUDY_PARTS)
    kind: str = "page"
    data: list[Path]
    """The folders of the Parquet files. Each has some of the runs."""
    doses: list[Path]
    """The doses of the bases."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> PageJob:
        """The page of all planned runs, or of the finished ones with the doses that exist."""
        models = sorted({run.settings.model for run in compared_runs(plan)})
        doses = [DoseJob.path(plan, model) for model in models]
        doses = [file for file in doses if name == PLANNED or file.is_file()]
        return cls(data=[GatherJob.path(plan, name)], doses=doses, out=cls.path(plan, name))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        data = [folder / file for folder in self.data for file in paths.STUDY_FILES]
        return {"data": data, "doses": self.doses, "printed": printed_files()}


class PublishedJob(PageJob):
    """Make the page of a study's committed data, beside the other pages of results."""

    place: ClassVar[str] = "docs/results"
    kind: str = "published"

    @classmethod
    def path(cls, plan: Plan, name: str = "", file: str = "") -> Path:
        return Path(cls.place, file)

    @classmethod
    def make(cls, plan: Plan, name: str) -> PublishedJob:
        committed = plan.config.study.committed if plan.config.study else None
        parts = sorted({file.parent for file in committed.glob("*/*.parquet")}) if committed else []
        doses = [file for part in parts for file in sorted(part.glob(paths.dose_file("*")))]
        return cls(data=parts, doses=doses, out=cls.path(plan))


# Jobs of the regression gates.


def gates_of(plan: Plan) -> GateSettings:
    """The gates of a plan that has some."""
    assert plan.config.gates is not None
    return plan.config.gates


def compared_with_baseline(plan: Plan) -> list[PlannedRun]:
    """The runs that gates compare with the baseline's."""
    name = gates_of(plan).experiment
    return [e.run for e in plan.evaluations.values() if e.run and e.run.experiment == name]


def gated_checkpoint(plan: Plan) -> Path:
    """The base with which sampling and updates are timed, and of the committed policies."""
    return QuantizeJob.checkpoint(plan, compared_with_baseline(plan)[0].settings.base)


class NumericsJob(Job):
    """Compare codecs and graders with stored vectors."""

    does: ClassVar[str] = "qerl.gates.measure:measure_numerics"
    place: ClassVar[str] = f"gates/{paths.NUMERICS}"
    kind: str = "numerics"
    vectors: Path

    @classmethod
    def make(cls, plan: Plan, name: str) -> NumericsJob:
        return cls(vectors=gates_of(plan).vectors, out=cls.path(plan))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"vectors": [self.vectors / "vectors.safetensors"], "answers": [self.vectors / "answers.jsonl"]}


class SpeedJob(Job):
    """Time this code alternately with that of the machine's baseline."""

    does: ClassVar[str] = "qerl.gates.measure:measure_speed"
    place: ClassVar[str] = f"gates/{paths.SPEED}"
    on_gpu: ClassVar[bool] = True
    kind: str = "speed"
    checkpoint: Path
    baselines: Path
    key: str
    """A hash of the workload."""
    rounds: int
    """The number of rounds, in each of which both are timed."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> SpeedJob:
        gates, key = gates_of(plan), workload_key(plan.config)
        timed = gated_checkpoint(plan)
        return cls(checkpoint=timed, baselines=gates.baselines, key=key, rounds=gates.rounds, out=cls.path(plan))

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        return {"baselines": sorted(self.baselines.glob("*.json")), "checkpoint": [self.checkpoint]}


class VerdictJob(Job):
    """Judge all gates."""

    does: ClassVar[str] = "qerl.gates.compare:judge_results"
    place: ClassVar[str] = paths.GATES
    writes: ClassVar[tuple[str, ...]] = (paths.MEASURED, paths.VERDICT, paths.VERDICT_TABLE)
    kind: str = "verdict"
    settings: GateSettings
    key: str
    """A hash of the workload."""
    results: list[Path]
    """Results of the workload's rules."""

    @classmethod
    def make(cls, plan: Plan, name: str) -> VerdictJob:
        key = workload_key(plan.config)
        return cls(settings=gates_of(plan), key=key, results=cls.judged(plan), out=cls.path(plan))

    @classmethod
    def judged(cls, plan: Plan) -> list[Path]:
        """The results from which the verdict is made."""
        runs = compared_with_baseline(plan)
        return [
            *(TrainJob.path(plan, run.id, paths.RUN) for run in runs),
            *(EvaluateJob.path(plan, run.id, paths.RESULT) for run in runs),
            *(StoredJob.path(plan, name, paths.RESULT) for name in plan.names["stored"]),
            ProfileJob.path(plan, gates_of(plan).bench),
            NumericsJob.path(plan),
            SpeedJob.path(plan),
        ]

    def inputs(self, plan: Plan) -> dict[str, list[Path]]:
        baselines = sorted(self.settings.baselines.glob("*.json"))
        return {"baselines": baselines, "gates": [self.settings.file], "results": self.results}


#: The path that `workload_key` uses for every local model, because only its content counts. Changing it would change
#: the key of all committed baselines.
_ANY_FOLDER = "config/gates/policy"


def workload_key(config: Config) -> str:
    """A hash of everything that makes results comparable: gates compare only results with the same key.

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


# The class of each kind.


def _kinds(parent: type[Job]) -> Iterator[type[Job]]:
    for one in parent.__subclasses__():
        yield from (one, *_kinds(one))


#: The class of each kind of job.
KINDS: dict[str, type[Job]] = {
    one.model_fields["kind"].default: one for one in _kinds(Job) if not one.model_fields["kind"].is_required()
}
#: The kinds with a rule. Those of a bench share one.
RULES: dict[str, type[Job]] = {kind: one for kind, one in KINDS.items() if "place" in vars(one)}


def parse_job(text: str) -> Job:
    """The job in a rule's parameter."""
    kind = json.loads(text)["kind"]
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is no job; use one of {', '.join(KINDS)}")
    return KINDS[kind].model_validate_json(text)
