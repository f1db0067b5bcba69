"""Typed jobs of the workflow's rules: one model per kind of job, made by the plan and parsed by `qerl rule`.

A job has its settings and the paths that it reads and writes. This module imports no large library, because every call
of Snakemake reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from qerl.host.imports import OPTIONAL
from qerl.host.nodes import own_lock
from qerl.settings.data import DatasetSettings
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

    #: Whether the process runs only on the CPU cores that belong to its GPUs.
    own_cores: ClassVar[bool] = False
    #: Optional libraries that the job doesn't need, and whose import, which takes seconds, is prevented.
    without: ClassVar[Collection[str]] = ()

    out: Path
    """The path of the result: a file, or a folder of files."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that the job needs."""
        return 0

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


# Jobs that make data sets and bases, and that check them before any long work.


class DataJob(Job):
    """Prepare a data set: generated, from a local file or from the hub."""

    kind: Literal["data"] = "data"
    settings: DatasetSettings
    lock_file: Path | None
    """Compare the hub's files with this lock file."""


class CheckJob(Job):
    """Check settings, tokenizer and problems with the model, before any long work."""

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

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["pretrain"] = "pretrain"
    settings: PretrainSettings
    data: dict[str, Path]

    @property
    def gpus(self) -> int:
        """One, where there is any."""
        return 1


class FetchJob(Job):
    """Download a model of the hub at a pinned revision."""

    kind: Literal["fetch"] = "fetch"
    repo: str
    revision: str
    lock_file: Path | None


class QuantizeJob(Job):
    """Make a base in one weight format, with a report on size and error."""

    kind: Literal["quantize"] = "quantize"
    base: Base
    source: Path
    data: Path | None
    """The data set on whose texts AWQ measures activations; None for other recipes."""

    @property
    def gpus(self) -> int:
        """One, where there is any."""
        return 1


# The job of a training run.


class HubBase(Part):
    """A base of the hub: its repository and commit."""

    name: str
    revision: str


class TrainJob(Job):
    """Train one run. A killed run continues from its last checkpoint in `work`."""

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
    followed: Path | None
    """The metrics.jsonl of the run whose entropy the temperature follows."""

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

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["evaluate"] = "evaluate"
    policy: PlannedPolicy | StoredPolicy
    settings: EvaluationSettings
    checkpoint: Path
    trained: Path | None
    """The folder of a run's policy; None for a base."""
    data: dict[str, Path]

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


class PointJob(Job):
    """A job with a GPU and its share of the cores to itself; it continues the files of a killed job."""

    own_cores: ClassVar[bool] = True

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out]

    @property
    def gpus(self) -> int:
        """One GPU, if the machine has any."""
        return 1

    @property
    def lock(self) -> Lock:
        """A lock for the job's file, since several jobs share a folder."""
        return Lock(self.out.parent, f".{self.out.name}.lock")


class DecodePart(Part):
    """A file of a decode job, with a point for each number of sequences."""

    file: str
    work: Decoding
    sequences: list[int]


class DecodeJob(PointJob):
    """Measure an engine's decode speed on one size and weight format, whose set-up its parts share.

    `out` is the folder of the parts' files.
    """

    kind: Literal["decode"] = "decode"
    parts: list[DecodePart]

    @property
    def engine(self) -> str:
        """The engine of all parts."""
        return self.parts[0].work.engine

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]


class RolloutMixJob(PointJob):
    """Measure an engine's rollout of completions of mixed lengths, end to end."""

    kind: Literal["rollout_mix"] = "rollout_mix"
    work: Mix


class PromptsJob(PointJob):
    """Measure prefill time in this project's engine, with a point for each pair of prompts and tokens per prompt."""

    kind: Literal["prompts"] = "prompts"
    work: Prompting
    points: list[tuple[int, int]]
    repeats: int


class StepPart(Part):
    """A file of a job of steps."""

    file: str
    work: StepWork
    settings: EngineStep


class GrpoStepJob(PointJob):
    """Measure whole GRPO steps of this project on one size and weight format, and under one cap of memory or none.

    `out` is the folder of the parts' files.
    """

    kind: Literal["grpo_step"] = "grpo_step"
    parts: list[StepPart]

    @property
    def files(self) -> list[Path]:
        """The files that the job writes."""
        return [self.out / part.file for part in self.parts]

    @property
    def joins_free_memory(self) -> bool:
        """As a training does."""
        return True


class TrlStepJob(PointJob):
    """Measure a whole GRPO step of TRL."""

    kind: Literal["trl_step"] = "trl_step"
    work: StepWork
    settings: TrlStep


# Jobs that make tables and figures of stored results.


class TableJob(Job):
    """Make one table."""

    kind: Literal["table"] = "table"
    name: str
    results: Path
    """A file with the path of a stored result a line."""


class FigureJob(Job):
    """Make one figure."""

    kind: Literal["figure"] = "figure"
    name: str
    results: Path
    """A file with the path of a stored result a line."""


class ReportJob(Job):
    """Make the report, one page of all results."""

    kind: Literal["report"] = "report"
    name: str
    """The name of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""
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


class SamplesJob(Job):
    """Make the page of samples."""

    kind: Literal["samples"] = "samples"
    name: str
    """The name of the configuration."""
    results: Path
    """A file with the path of a stored result a line."""


class ShapesJob(Job):
    """Make tables and figures of the speed grid."""

    kind: Literal["shapes"] = "shapes"
    files: list[Path]
    """Points that are measured, here or elsewhere."""


# Jobs of a study: gather the data of its runs, and make the page of this data.


class GatheredExperiment(Part):
    """An experiment of the study: what its runs answer."""

    role: Literal["main", "pilot"]
    size: str


class GatherJob(Job):
    """Write the metrics and outcomes of a study's runs to Parquet files."""

    kind: Literal["gather"] = "gather"
    study: str
    """The name of the configuration."""
    decides: bool
    experiments: dict[str, GatheredExperiment]
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


class RealArm(Part):
    """An arm of a configuration of real models, with the GPU-hours that it costs."""

    experiment: str
    model: str
    arm: str
    number: str
    """The number of its counterpart in the protocol."""
    seeds: int
    """The number of seeds in the configuration."""
    hours: dict[int, str]
    """The GPU-hours of training and evaluation by the number of seeds; numbers after ~ are estimates."""


class PageJob(Job):
    """Make tables, figures and the page of a study's data."""

    kind: Literal["page"] = "page"
    data: list[Path]
    """The folders of the Parquet files. Each has some of the runs."""
    real: list[RealArm]
    real_file: Path | None
    """The configuration that has these arms."""
    machine: str
    """The machine of the hours."""


# Jobs of the regression gates.


class NumericsJob(Job):
    """Compare codecs and graders with stored vectors."""

    kind: Literal["numerics"] = "numerics"
    vectors: Path


class SpeedJob(Job):
    """Time this code alternately with that of the machine's baseline."""

    kind: Literal["speed"] = "speed"
    checkpoint: Path
    baselines: Path
    key: str
    """A hash of the workload."""
    rounds: int
    """The number of rounds, in each of which both are timed."""

    @property
    def gpus(self) -> int:
        """One GPU, if the machine has any."""
        return 1


class VerdictJob(Job):
    """Judge all gates."""

    kind: Literal["verdict"] = "verdict"
    settings: GateSettings
    key: str
    """A hash of the workload."""
    results: list[Path]
    """Results of the workload's rules."""
