"""The jobs of the workflow, a class per kind: its settings and paths, its function, and what decides its result.

The plan makes a job, a rule passes it on as JSON, and `qerl rule` runs it. This module imports no large library,
because every call of Snakemake reads it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from qerl.host.imports import OPTIONAL, source_version
from qerl.host.lease import own_lock
from qerl.host.provenance import code_version
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, FunctionData, Split
from qerl.settings.models import Base, PretrainSettings
from qerl.settings.run import UNDECIDING, UNDECIDING_OF_ENGINE, UNDECIDING_OF_STEPS, RunSettings
from qerl.settings.workflow import EvaluationSettings, GateSettings, RolloutBench, StepBench
from qerl.settings.workloads import Decoding, EngineStep, Mix, Prompting, StepWork, TrlStep

# The shared parts of all jobs.


class KilledError(RuntimeError):
    """A process of a job was killed, perhaps for lack of memory. A new start continues from its state."""


class Lock(NamedTuple):
    """A file that only one process at a time can lock."""

    folder: Path
    name: str


class Part(BaseModel):
    """A part of a job: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Job(Part):
    """The input of one call of `qerl rule`. A job has no default values."""

    #: The function that does the job, as `module:name`: planning doesn't import it. All code that the module imports
    #: decides the result.
    does: ClassVar[str]
    #: Whether the job needs one GPU, if the machine has any.
    on_gpu: ClassVar[bool] = False
    #: Whether the process runs only on the CPU cores that belong to its GPUs.
    own_cores: ClassVar[bool] = False
    #: Optional libraries that the job doesn't need, and whose import, which takes seconds, is prevented.
    without: ClassVar[Collection[str]] = ()

    out: Path
    """The path of the result: a file, or a folder of files."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that the job needs."""
        return int(self.on_gpu)

    @property
    def joins_free_memory(self) -> bool:
        """Whether the job's process joins free parts of GPU memory (`qerl.host.lease`)."""
        return False

    @property
    def lock(self) -> Lock | None:
        """The lock that the job must hold, because it continues the state of a killed job; None if it has none."""
        return None

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
        """The user's files that the job reads; their content decides, because copies have other times."""
        return []

    @property
    def function(self) -> str:
        """The function of this very job."""
        return self.does

    @property
    def code(self) -> str:
        """The version of the code that the job runs."""
        versions = map(source_version, sorted(self.own_functions))
        return " ".join([code_version(self.function.partition(":")[0]), *versions])


# Jobs that make data sets and bases, and that check them before any long work.


class DataJob(Job):
    """Prepare a data set: generated, from a local file or from the hub."""

    does: ClassVar[str] = "qerl.data.sources:prepare_data"
    kind: Literal["data"] = "data"
    settings: DatasetSettings
    lock_file: Path | None
    """Compare the hub's files with this lock file."""

    @property
    def own_functions(self) -> set[str]:
        """The function that gives the problems."""
        origin = self.settings.origin
        return {origin.function} if isinstance(origin, FunctionData) else set()

    @property
    def own_files(self) -> list[Path]:
        """The file of the problems."""
        return [self.settings.own_file] if self.settings.own_file else []


class CheckJob(Job):
    """Check settings, tokenizer and problems with the model, before any long work."""

    does: ClassVar[str] = "qerl.workflow.preflight:check_problems"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["check"] = "check"
    model: Path
    runs: list[RunSettings]
    """With the values of `CHECKED`, and otherwise default values."""
    evaluation: EvaluationSettings
    data: dict[str, Path]
    """The folder of each prepared data set."""


class PretrainJob(Job):
    """Train the miniature base policy from scratch."""

    does: ClassVar[str] = "qerl.rl.pretrain:pretrain_base"
    without: ClassVar[Collection[str]] = OPTIONAL
    on_gpu: ClassVar[bool] = True
    kind: Literal["pretrain"] = "pretrain"
    settings: PretrainSettings
    data: dict[str, Path]


class FetchJob(Job):
    """Download a model of the hub at a pinned revision."""

    does: ClassVar[str] = "qerl.workflow.bases:fetch_base"
    kind: Literal["fetch"] = "fetch"
    repo: str
    revision: str
    lock_file: Path | None

    @property
    def code(self) -> str:
        """None: a download is decided by its commit."""
        return ""


class QuantizeJob(Job):
    """Make a base in one weight format, with a report on size and error; `out` is the folder of the checkpoint."""

    does: ClassVar[str] = "qerl.workflow.bases:quantize_base"
    on_gpu: ClassVar[bool] = True
    kind: Literal["quantize"] = "quantize"
    base: Base
    source: Path
    data: Path | None
    """The data set on whose texts AWQ measures activations; None for other recipes."""
    report: Path | None
    """None links a source that has the format already."""


# The job of a training run.


class HubBase(Part):
    """A base of the hub: its repository and commit."""

    name: str
    revision: str


class TrainJob(Job):
    """Train one run. A killed run continues from its last checkpoint in `work`."""

    does: ClassVar[str] = "qerl.rl.train:train_run"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["train"] = "train"
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

    @property
    def gpus(self) -> int:
        """The number of GPUs of its processes on this machine or of its engine."""
        return self.settings.gpus_of_node

    @property
    def joins_free_memory(self) -> bool:
        """As its settings say."""
        return self.settings.joins_free_memory

    @property
    def lock(self) -> Lock:
        """A lock of the work folder: a training survives a killed Snakemake, and a second would write the same
        files. Of several machines, which may share the folder, each has its own; so has each process of torchrun.
        """
        return Lock(self.work, own_lock(self.settings.nodes))

    @property
    def undeciding(self) -> Any:
        """Settings that decide no result. A time limit decides one only if exceeding it is a result."""
        fields: dict[str, Any] = {"settings": UNDECIDING, "on_failure": True, "tracked": True}
        return fields if self.on_failure == "row" else fields | {"time_limit": True}

    @property
    def own_functions(self) -> set[str]:
        """The reward."""
        return {self.settings.reward.function} if self.settings.reward.function else set()


# The job of an evaluation.


class PlannedPolicy(Part):
    """The description of a planned policy in its result: a base, or a run's policy."""

    eval: str
    base: Base
    run: str | None
    arm: str | None
    experiment: str | None
    varied: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        """The fields that describe it in its result."""
        return self.model_dump(mode="json", exclude={"base"}) | self.base.stored


class StoredPolicy(Part):
    """The description of a committed adapter in its result. The gates evaluate it without training."""

    stored: str

    @property
    def described(self) -> dict[str, Any]:
        """The field that describes it in its result."""
        return self.model_dump()


class EvaluateJob(Job):
    """Score a base or a trained policy on every task."""

    does: ClassVar[str] = "qerl.evals.evaluate:evaluate_policy"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["evaluate"] = "evaluate"
    policy: PlannedPolicy | StoredPolicy
    settings: EvaluationSettings
    checkpoint: Path
    trained: Path | None
    """The folder of a run's policy; None for a base."""
    data: dict[str, Path]

    @property
    def splits(self) -> list[Split]:
        """The splits that its tasks read. A stock task takes its examples from the training split."""
        asked = {split for task in self.settings.tasks for split in (task.split, *(("train",) * bool(task.task)))}
        return [split for split in get_args(Split) if split in asked]

    @property
    def gpus(self) -> int:
        """The number of GPUs of the engine."""
        return self.settings.engine_gpus

    @property
    def undeciding(self) -> Any:
        """Settings of the engine's memory."""
        return {"settings": UNDECIDING_OF_ENGINE}


# Jobs of a configuration's benches of time and memory (the rule `profile`).


class RolloutJob(Job):
    """Measure rollout throughput by weight format and LoRA rank."""

    does: ClassVar[str] = "qerl.bench.native:bench_rollout"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["rollout"] = "rollout"
    bench: str
    settings: RolloutBench
    checkpoints: dict[str, Path]
    """By weight format."""

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


class StepJob(Job):
    """Measure the time of a training step of several runs."""

    does: ClassVar[str] = "qerl.bench.steps:bench_step"
    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["step"] = "step"
    bench: str
    settings: StepBench
    runs: list[TimedRun]

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
        """The rewards."""
        return {run.settings.reward.function for run in self.runs if run.settings.reward.function}


# Jobs of the speed grid (`shapes` of a configuration): each writes one file of points on random weights.

#: The most tokens of each sequence that the warm-up of a decode point, or of a step of equal lengths, decodes.
WARM_UP = 256


def enough_runs(seconds: Sequence[float]) -> bool:
    """Whether a decode point has enough timed runs, by their seconds.

    It has three. Short ones are repeated, up to nine times or until they took 5 s in total. A first run of 10 s or
    more is enough: three of that length differed by 0.25 % in the median on an H200, and by at most 1.8 %.
    """
    if not seconds or seconds[0] >= 10:
        return bool(seconds)
    return len(seconds) >= 9 or (len(seconds) >= 3 and sum(seconds) >= 5)


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

    `out` is the folder of the parts' files. All parts share a set-up.
    """

    on_gpu: ClassVar[bool] = True
    own_cores: ClassVar[bool] = True
    kind: Literal["point"] = "point"
    parts: list[PointPart[W, P]]

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
    def lock(self) -> Lock:
        """A lock of the job's folder."""
        return Lock(self.out.parent, f".{self.out.name}.lock")

    @property
    def joins_free_memory(self) -> bool:
        """Steps of this project do, as a training does."""
        return isinstance(self.parts[0].settings, EngineStep)

    @property
    def own_files(self) -> list[Path]:
        """The traces of rollouts."""
        works: list[Any] = [part.work for part in self.parts]
        return [work.trace for work in works if isinstance(work, Mix) and work.trace]


# Jobs that make tables and figures of stored results.


class ReportedJob(Job):
    """A job that reads all stored results."""

    name: str
    """The name of the table or figure, or else of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""


class TableJob(ReportedJob):
    """Make one table."""

    does: ClassVar[str] = "qerl.report.make:write_table"
    kind: Literal["table"] = "table"


class FigureJob(ReportedJob):
    """Make one figure."""

    does: ClassVar[str] = "qerl.report.make:write_figure"
    kind: Literal["figure"] = "figure"


class SamplesJob(ReportedJob):
    """Make the page of samples."""

    does: ClassVar[str] = "qerl.report.samples:write_page"
    kind: Literal["samples"] = "samples"


class ReportJob(ReportedJob):
    """Make the report, one page of all results."""

    does: ClassVar[str] = "qerl.report.page:write_report"
    kind: Literal["report"] = "report"
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


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    does: ClassVar[str] = "qerl.report.speed_tables:write_shapes"
    kind: Literal["shapes"] = "shapes"
    files: list[Path]
    """Points that are measured, here or elsewhere."""

    @property
    def own_files(self) -> list[Path]:
        """These points, which are no input, as they would start measurements."""
        return self.files


# Jobs of a study: gather the data of its runs, and make the page of this data.


class GatherJob(Job):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    does: ClassVar[str] = "qerl.study.gather:gather_study"
    kind: Literal["gather"] = "gather"
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


class DosedArm(Part):
    """An arm's error of the weights: its base, and the σ with which the noise on its norms starts."""

    checkpoint: Path
    sigma: float


class DoseJob(Job):
    """Measure how far each arm's error moves an untrained base."""

    does: ClassVar[str] = "qerl.evals.divergence:measure_doses"
    on_gpu: ClassVar[bool] = True
    kind: Literal["dose"] = "dose"
    model: str
    checkpoint: Path
    """The base in BF16."""
    arms: dict[str, DosedArm]
    data: Path
    settings: EvaluationSettings
    """The number and the length of completions. The one task names the split of the problems."""
    problems: int

    @property
    def checkpoints(self) -> list[str]:
        """The bases that are compared."""
        return sorted({str(self.checkpoint), *(str(arm.checkpoint) for arm in self.arms.values())})


class PageJob(Job):
    """Make tables, the figure and the page of a study's data."""

    does: ClassVar[str] = "qerl.study.dose:write_page"
    kind: Literal["page"] = "page"
    data: list[Path]
    """The folders of the Parquet files. Each has some of the runs."""
    doses: list[Path]
    """The doses of the bases."""


# Jobs of the regression gates.


class NumericsJob(Job):
    """Compare codecs and graders with stored vectors."""

    does: ClassVar[str] = "qerl.gates.numerics:measure_numerics"
    kind: Literal["numerics"] = "numerics"
    vectors: Path


class SpeedJob(Job):
    """Time this code alternately with that of the machine's baseline."""

    does: ClassVar[str] = "qerl.gates.speed:measure_speed"
    on_gpu: ClassVar[bool] = True
    kind: Literal["speed"] = "speed"
    checkpoint: Path
    baselines: Path
    key: str
    """A hash of the workload."""
    rounds: int
    """The number of rounds, in each of which both are timed."""


class VerdictJob(Job):
    """Judge all gates."""

    does: ClassVar[str] = "qerl.gates.compare:judge_results"
    kind: Literal["verdict"] = "verdict"
    settings: GateSettings
    key: str
    """A hash of the workload."""
    results: list[Path]
    """Results of the workload's rules."""


# What a rule passes on.

#: The class of each kind of job.
KINDS: dict[str, type[Job]] = {
    one.model_fields["kind"].default: one
    for parent in (Job, ReportedJob)
    for one in parent.__subclasses__()
    if "kind" in one.model_fields
}


def parse_job(text: str) -> Job:
    """The job in a rule's parameter."""
    kind = json.loads(text)["kind"]
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is no job; use one of {', '.join(KINDS)}")
    return KINDS[kind].model_validate_json(text)
