"""Schemas of the files under results/, which writers construct and readers parse, and the writing and reading.

They are of preparation, training, evaluation and gates; `qerl.results.speeds` has those of speeds.
"""

from __future__ import annotations

import datetime
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from qerl.host.provenance import stamp, write_bytes, write_json, write_text
from qerl.results.paths import METRICS, POLICY
from qerl.results.statistics import Interval
from qerl.settings.base import Fraction, PositiveInt, UserError, sentence
from qerl.settings.data import AnswerForm, RecordFormat, Split
from qerl.settings.models import Base, Recipe, WeightFormat
from qerl.settings.run import RunSettings, SamplingSettings
from qerl.settings.workflow import EvaluationSettings, Harness, StockTask

# The shared parts of all stored results: strictness, stamp, numbers that keep their digits, and statuses.
#
# A model writes the keys that it was given and no others, so that a file has only its job's content. Reading refuses
# keys that the model lacks.

#: The status of a point that was measured; any other text is its error.
OK = "ok"
#: The status of a point for which memory ran out.
NO_MEMORY = "out of memory"
#: The beginning of the status of a run that diverged.
DIVERGED = "diverged"


def _number(value: float, info: SerializationInfo) -> float:
    return value if info.mode_is_json() else float(value)


#: An integer or a float: a file keeps what it is, tables see a float.
Number = Annotated[int | float, PlainSerializer(_number, return_type=Any)]
#: Counts, and measures such as seconds and bytes, that can't be below zero; NaN is none.
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[Number, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
#: A sample of a speed or a time, by which others are divided.
Sample = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def whole(settings: BaseModel) -> dict[str, Any]:
    """Every key of settings, those at their defaults too."""
    return settings.model_dump(mode="json")


class Stored(BaseModel):
    """Base of all results."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="constants")

    def content(self) -> dict[str, Any]:
        """The content of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Machine(Stored):
    """The machine of a result. `label` is one line for captions.

    `host` is a hash that tells machines of a kind apart, `driver` the version of the GPU's driver, and `cuda` the
    version for which PyTorch is built.
    """

    cpu: str = ""
    cores: Count = 0
    memory_gib: Amount | None = None
    gpu: list[str] | None = None
    driver: str | None = None
    cuda: str | None = None
    host: str = ""
    label: str


class Provenance(Stored):
    """A result's stamp: code, machine, versions of libraries, seed and time (UTC); `dirty` is none where not known.

    Code outside a git checkout has no `commit`, but a `version` and a hash of its `files`.
    """

    commit: str | None
    dirty: bool | None
    version: str = ""
    files: str = ""
    machine: Machine
    versions: dict[str, str] = Field({})
    seed: int | None = None
    time: str = ""

    @classmethod
    def of_now(cls, seed: int | None = None) -> Self:
        """The stamp of this code on this machine."""
        return cls.model_validate(stamp(seed))

    @property
    def columns(self) -> dict[str, str]:
        """The stamp as columns `machine` and `commit`."""
        return {"machine": self.machine.label, "commit": self._code}

    @property
    def _code(self) -> str:
        if self.commit is None:
            return f"version {self.version} (files {self.files})"
        return self.commit[:12] + (" (modified)" if self.dirty else "")


class Head(Stored):
    """What result files share, whatever else they have. A bench's own has its name as `bench`, and a `kind`."""

    model_config = ConfigDict(extra="ignore")

    bench: str = ""
    kind: str = ""
    provenance: Provenance | None = None

    @property
    def of_bench(self) -> str:
        """What was measured, a key of `qerl.results.speeds.SCHEMAS`."""
        return self.kind or self.bench


class Quartiles(Stored):
    """Median and quartiles of samples, in their unit."""

    p25: float
    median: float
    p75: float


def check_measured(status: str, samples: Sized) -> None:
    """Raise ValueError for a point of status ok without samples."""
    if status == OK and not len(samples):
        raise ValueError("a point with status ok needs samples")


class MeasuredPoint(Stored):
    """The fields that all points share. A failed point has its error as `status` and no samples."""

    samples: list[Sample] = Field(default=[])
    weight_bytes: Amount | None = None
    sampler: str | None = None
    peak_memory_bytes: Amount | None = None
    status: str

    @model_validator(mode="after")
    def _ok_has_samples(self) -> Self:
        check_measured(self.status, self.samples)
        return self


# Schemas of preparation: a data set's dataset.json, a quantization's report.json, and a base's pretrain.json.


class PreparedDataset(Stored):
    """data/<dataset>/dataset.json: the problems' prompt and origin, and the rows and SHA-256 of each split.

    Folders that were prepared before data sets had a key such as units or system lack it. `date` is the one that chat
    templates state. It has no stamp, so that equal problems and dates give equal files.
    """

    format: RecordFormat
    instruction: str
    system: str = ""
    template_arguments: dict[str, Any] = Field({})
    answer: AnswerForm
    units: list[str] = Field([])
    thinking: tuple[str, str] | None = None
    date: datetime.date | None = None
    rows: dict[Split, Count]
    sha256: dict[Split, str]
    columns: dict[str, str]
    filter: dict[str, Any]
    origin: dict[str, Any]
    repository_files: dict[str, str]


class QuantizationReport(Stored):
    """quantize/<checkpoint>/report.json; `relative_error` by layer type, `calibration` of AWQ, a random error."""

    model: str
    weights: WeightFormat
    weights_format: WeightFormat | None = None
    method: str
    pack_delta_nets: bool = False
    size_bytes: Amount
    bits_per_weight: Amount
    bits_per_weight_model: Amount
    relative_error: dict[str, float]
    versions: dict[str, str] = Field({})
    calibration: dict[str, Any] | None = None
    random_error: dict[str, Any] | None = None
    provenance: Provenance

    @property
    def base(self) -> Base:
        """The base; a `method` that is no recipe rounds to nearest."""
        recipe: Recipe = self.method if self.method in ("awq", "random") else "rtn"  # type: ignore[assignment]
        return Base(self.model, self.weights, recipe, self.pack_delta_nets)


class PretrainCheck(Stored):
    """A check of a base during its training."""

    step: Count
    loss: float
    accuracy: Fraction


class PretrainReport(Stored):
    """models/<model>/pretrain.json; `accuracy` by data set."""

    steps: Count
    parameters: Count
    checks: list[PretrainCheck]
    accuracy: dict[str, Fraction]
    provenance: Provenance


# Schemas of training's files: metrics.jsonl, one row per step, and run.json.


def _named(name: str) -> Any:
    return Field(alias=name)


def _maybe(name: str) -> Any:
    return Field(None, alias=name)


class StepMetrics(Stored):
    """A line of train/<run>/metrics.jsonl; `value/` is of PPO, and `reward/` is of parts, also of the user's functions.

    A step in which a function left out all completions lacks its part.
    `entropy` is the trained policy's, `entropy/sampler` the sampling policy's, estimated by its completions.
    `discovery` is the share of the training problems that some completion has solved so far. `grading/timeouts` counts
    completions whose comparison with the answer exceeded the grader's limits; a step without such completions lacks it.
    `validation/` is of the policy after the step, on held-out problems, and `validation/base` of the policy before the
    first step, by the measure that the run compares. `silent/` is of completions without a gradient: their number, and
    the sample that stands for them in `entropy`, `mismatch/` and `ess/`. `seconds/idle` is of several processes: for
    how long a rank waited in the rollout for the others, as the mean of all ranks, and as the longest. With an
    environment, `turns` is the mean of a completion, `environment_tokens` counts the tokens of replies, which no other
    figure has, and `seconds/environment` adds up the time of all replies.
    """

    model_config = ConfigDict(extra="allow")

    step: Count
    problems: Count
    reward: Number
    reward_std: Number = _named("reward/std")
    reward_correct: Number = _named("reward/correct")
    reward_format: Number = _named("reward/format")
    reward_overlong: Number = _named("reward/overlong")
    reward_custom: Number | None = _maybe("reward/custom")  # of earlier runs, between others
    reward_equal_groups: Number = _named("reward/equal_groups")
    discovery: Number | None = None
    completion_tokens: Amount
    completion_length: Amount
    truncated: Amount
    grading_timeouts: Count | None = _maybe("grading/timeouts")
    turns: Number | None = None
    environment_tokens: Count | None = None
    loss: Number
    entropy: Number
    entropy_sampler: Number | None = _maybe("entropy/sampler")
    temperature: Number | None = None
    mismatch_kl: Number = _named("mismatch/kl")
    ess_tokens: Number | None = _maybe("ess/tokens")
    ess_sequences: Number | None = _maybe("ess/sequences")
    reference_kl: Number = _named("reference/kl")
    silent_completions: Count | None = _maybe("silent/completions")
    silent_sampled: Count | None = _maybe("silent/sampled")
    silent_entropy: Number | None = _maybe("silent/entropy")
    silent_mismatch_kl: Number | None = _maybe("silent/mismatch_kl")
    clip_ratio_low: Number = _named("clip_ratio/low")
    clip_ratio_high: Number = _named("clip_ratio/high")
    value_mean: Number | None = _maybe("value/mean")
    value_explained_variance: Number | None = _maybe("value/explained_variance")
    value_loss: Number | None = _maybe("value/loss")
    value_clipped: Number | None = _maybe("value/clipped")
    validation_base: Number | None = _maybe("validation/base")
    validation_pass_at_1: Number | None = _maybe("validation/pass@1")
    validation_pass_at_k: Number | None = _maybe("validation/pass@k")
    validation_reward: Number | None = _maybe("validation/reward")
    seconds_validation: Number | None = _maybe("seconds/validation")
    mismatch_max_ratio: Number = _named("mismatch/max_ratio")
    grad_norm: Number
    learning_rate: Number
    noise_sigma: Number = _named("noise/sigma")
    noise_norm: Number = _named("noise/norm")
    rollout_rate: Amount = _named("tokens_per_second/rollout")
    update_rate: Amount = _named("tokens_per_second/update")
    sync_seconds: Amount = _named("seconds/sync")
    rollout_seconds: Amount = _named("seconds/rollout")
    idle_seconds: Number | None = _maybe("seconds/idle")
    idle_seconds_max: Number | None = _maybe("seconds/idle_max")
    environment_seconds: Number | None = _maybe("seconds/environment")
    update_seconds: Amount = _named("seconds/update")
    step_seconds: Amount = _named("seconds/step")
    memory_bytes: Amount

    @model_validator(mode="after")
    def _others_are_rewards(self) -> Self:
        if unknown := [name for name in self.model_extra or {} if not name.startswith("reward/")]:
            raise ValueError(f"{unknown[0]} is no metric")
        return self


class StoredCompletion(Stored):
    """A completion of a stored rollout.

    `tokens` are the texts of its tokens, which together are the text that was graded. A token that ends within a
    character has an empty text. `logprobs` are the sampler's, and `entropies` the trained policy's before the
    step's first update; both are in nats, at the sampling temperature. `extracted` is the answer that the grader read.
    `advantage` is None for ppo, where every token has its own. A part is None if the completion was left out of it, and
    the reward if it was of all. `replies` are the places of an environment's tokens, first and last plus one.
    """

    tokens: list[str]
    logprobs: list[float]
    entropies: list[float]
    parts: dict[str, float | None]
    reward: float | None
    advantage: float | None
    extracted: str | None
    finished: bool
    replies: list[tuple[int, int]] = []


class RolloutRow(Stored):
    """A line of train/<run>/rollouts/step-<step>.jsonl.gz: a problem with completions of its group."""

    step: Count
    problem: str
    prompt: str
    gold: str
    completions: list[StoredCompletion]


class RunSummary(Stored):
    """The cost of one training run.

    `seconds` cover all its steps, and the peak is the highest of all attempts: a run that was killed has had several.
    """

    steps: Count
    kept_step: Count | None = None
    """The step whose policy was kept, with `validation.keep: best`."""
    seconds: Amount
    peak_memory_bytes: Amount | None
    trainable_parameters: Count
    weight_bytes: Amount
    sampler: str = ""
    rollout_tokens_per_second: Amount
    update_tokens_per_second: Amount
    step_seconds: Quartiles


class RunResult(Stored):
    """train/<run>/run.json. A failed run has its error as `status`, its message as `reason`, and no summary."""

    run: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    settings: Annotated[RunSettings, PlainSerializer(whole)]
    status: str = OK
    reason: str = ""
    summary: RunSummary | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _ok_has_a_summary(self) -> Self:
        if self.status == OK and self.summary is None:
            raise ValueError("a run with status ok needs a summary")
        return self


# Schemas of an evaluation's files: samples.jsonl (completions), outcomes.jsonl (problems) and result.json.


class SampleRow(Stored):
    """A line of samples.jsonl, with the verdicts of the harness and of the grader of training.

    `extracted` and `correct` are the harness's, and `flexible` is a stock task's second match. `agrees` says whether
    the grader of training has the same verdict, and `read` is the answer that it read. `completion` is the text as
    graders read it (`qerl.data.prompts`). `timeout` says whether either comparison exceeded its limit of CPU time.
    """

    dataset: str
    harness: Harness
    problem: str
    repeat: Count
    prompt: str
    completion: str
    extracted: str | None
    read: str | None = None
    gold: str
    correct: Annotated[int, Field(ge=0, le=1)]
    flexible: bool | None = None
    agrees: bool
    timeout: bool = False
    tokens: Count
    finished: bool


class OutcomeRow(Stored):
    """A line of outcomes.jsonl: `right` of a problem's `drawn` completions are right, in `distinct` ways.

    `distinct` is None unless the data set is in the format countdown.
    """

    dataset: str
    problem: str
    right: Count
    drawn: PositiveInt
    distinct: Count | None = None

    @model_validator(mode="after")
    def _counts_are_possible(self) -> Self:
        if not (self.distinct or 0) <= self.right <= self.drawn:
            distinct = "" if self.distinct is None else f", in {self.distinct} ways"
            raise ValueError(f"{self.right} of {self.drawn} completions can't be right{distinct}")
        return self


class TaskScore(Stored):
    """The score of one data set. `task` is the stock task, or none for the prompt of training.

    `pass_at` has the unbiased pass@k by k. `distinct_solutions` is the mean number of distinct right formulas of a
    problem (countdown). `timeouts` counts the completions whose comparison exceeded its limit of CPU time. `date` is
    the one that chat templates state.
    """

    harness: Harness
    harness_version: str = ""
    problems: PositiveInt
    repeats: PositiveInt
    accuracy: Fraction
    accuracies: list[Fraction] = Field([])
    extracted: Number | None = None
    flexible: Number | None = None
    agreement: Number | None = None
    completion_tokens: Amount | None = None
    truncated: Number | None = None
    pass_at: dict[PositiveInt, Fraction] = Field({})
    distinct_solutions: Amount | None = None
    task: StockTask | None = None
    sampling: Annotated[SamplingSettings, PlainSerializer(whole)] | None = None
    timeouts: Count = 0
    date: datetime.date | None = None


class Scores(Stored):
    """The content of every result.json. The result of a failed run has its `status` and no task."""

    tasks: dict[str, TaskScore]
    sampler: str = ""
    noise_norm: Number = 0.0
    status: str = OK
    provenance: Provenance


class EvaluationResult(Scores):
    """evaluate/<eval>/result.json; `run` is None for an untrained base."""

    eval: str
    model: str
    weights: WeightFormat
    recipe: Recipe = "rtn"
    pack_delta_nets: bool = False
    run: str | None
    arm: str | None
    experiment: str | None
    varied: dict[str, Any]

    @property
    def base(self) -> Base:
        """The base of the policy."""
        return Base(self.model, self.weights, self.recipe, self.pack_delta_nets)


class StoredPolicyResult(Scores):
    """gates/stored/<policy>/result.json, of a committed policy."""

    stored: str


class OwnEvaluationResult(Scores):
    """The result.json of `qerl eval`, with the user's policy and settings."""

    eval: str
    model: str
    adapter: bool
    settings: Annotated[EvaluationSettings, PlainSerializer(whole)]

    @property
    def trained(self) -> bool:
        """Whether the policy is a run's: its adapter on a base, or the whole model of a run with method=full."""
        return self.adapter or Path(self.model).name == POLICY


class Dose(Stored):
    """How far an error of the weights moves a policy before training, on completions of the policy at temperature 1.

    `kl` is KL(policy || perturbed) of a whole completion in nats, the sum over its tokens. `entropy` is the policy's
    entropy of a token in nats, and `entropy_change` the perturbed policy's at the same tokens, less it. Intervals are
    over problems.
    """

    problems: PositiveInt
    completions: PositiveInt
    tokens: PositiveInt
    kl: Interval
    entropy: Interval
    entropy_change: Interval


class DoseReport(Stored):
    """dose-<model>.json: the dose of each arm on an untrained base, against the base in BF16."""

    model: str
    arms: dict[str, Dose]
    provenance: Provenance


AnyEvaluation = EvaluationResult | StoredPolicyResult | OwnEvaluationResult
_ANY: TypeAdapter[AnyEvaluation] = TypeAdapter(AnyEvaluation)


def evaluation_of(policy: dict[str, Any], seed: int, **scores: Any) -> AnyEvaluation:
    """The result of scoring the policy that `policy` describes, with a new stamp."""
    return _ANY.validate_python({**policy, **scores, "provenance": Provenance.of_now(seed)})


# Schema of the regression gates' verdict, which a report shows; `qerl.gates.compare` has those of their measurements.

#: The checks of gates (docs/gates.md): a number or a ratio's interval against a bound; or a number, accuracies,
#: completions or a series of numbers against the baseline's.
Check = Literal["at-most", "at-least", "ratio-at-most", "growth", "paired", "same", "golden"]
Outcome = Literal["pass", "fail", "no baseline"]


class Verdict(Stored):
    """The verdict of a gate. Numbers are in the metric's unit. `limit` is the number that `now` was compared with.

    Stored verdicts have a check `drop`, which became `paired`.
    """

    gate: str
    metric: str
    check: Check | Literal["drop"]
    outcome: Outcome
    now: float | None = None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    limit: float | None = None
    detail: str = ""
    why: str


class VerdictResult(Stored):
    """gates/verdict.json: the worst outcome, and each gate's; a test states the `defect` that it planted."""

    defect: str | None = None
    outcome: Outcome
    key: str
    baseline: str | None
    gates: list[Verdict]
    provenance: Provenance


# Files: each is written completely or not at all, and read with errors that name the file.

T = TypeVar("T", bound=Stored)


class ResultError(UserError):
    """A result file that is missing or doesn't match its schema. The message is one sentence for the user."""


def write(path: Path, result: Stored) -> None:
    """Write a result completely or not at all."""
    write_json(path, result.content())


def line(row: Stored) -> str:
    """A row as a line of JSON."""
    return json.dumps(row.content()) + "\n"


def write_rows(path: Path, rows: Iterable[Stored]) -> None:
    """Write JSON lines, compressed if the name ends in .gz.

    The whole file is rewritten, so that a killed job leaves no partial or repeated row.
    """
    text = "".join(map(line, rows))
    if path.suffix == ".gz":
        write_bytes(path, gzip.compress(text.encode(), mtime=0))
    else:
        write_text(path, text)


def read(schema: type[T], path: Path) -> T:
    """A result file as its model. Raises ResultError if it is missing or doesn't match."""
    try:
        return schema.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{path} doesn't exist; run the workflow to make it") from None
    except ValidationError as error:
        raise ResultError(f"{path} is not a {schema.__name__}: {sentence(error, schema)}") from None


def read_rows(schema: type[T], path: Path) -> Iterator[T]:
    """The rows of a file of JSON lines, which may be compressed, as their model."""
    if not path.exists():
        raise ResultError(f"{path} doesn't exist; run the workflow to make it")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    yield schema.model_validate_json(line)
                except ValidationError as error:
                    raise ResultError(f"{path}, line {number}: {sentence(error, schema)}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ResultError(f"{path} is damaged ({error}); make it again") from None


def read_steps(file: Path, run: RunResult) -> list[StepMetrics]:
    """The steps of a run in the metrics.jsonl beside its run.json; those before the end of a run that failed.

    Raises ResultError unless a run that ended well has all that its summary counts.
    """
    metrics = file.with_name(METRICS)
    steps = list(read_rows(StepMetrics, metrics))
    if run.summary and len(steps) != run.summary.steps:
        raise ResultError(f"{metrics} has {len(steps)} steps, and {file} tells of {run.summary.steps}; copy both again")
    return steps
