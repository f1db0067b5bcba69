"""Schemas of an evaluation's files: samples.jsonl (completions), outcomes.jsonl (problems) and result.json."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, TypeAdapter

from qerl.results.intervals import Interval
from qerl.results.schema.stored import OK, Number, Provenance, Stored, whole
from qerl.settings.data import Split
from qerl.settings.evaluation import EvaluationSettings, Harness, StockTask
from qerl.settings.models import MergedFormat, Recipe, WeightFormat
from qerl.settings.rollout import SamplingSettings


class SampleRow(Stored):
    """A line of samples.jsonl, with the verdicts of the harness and of the grader of training.

    `extracted` and `correct` are the harness's, and `flexible` is a stock task's second match. `agrees` says whether
    the grader of training has the same verdict, and `read` is the answer that it read. `completion` is the text as
    graders read it (`qerl.data.thinking`). `timeout` says whether either comparison exceeded its limit of CPU time.
    """

    dataset: str
    harness: Harness
    problem: str
    repeat: int
    prompt: str
    completion: str
    extracted: str | None
    read: str | None = None
    gold: str
    correct: int
    flexible: bool | None = None
    agrees: bool
    timeout: bool = False
    tokens: int
    finished: bool


class OutcomeRow(Stored):
    """A line of outcomes.jsonl: `right` of a problem's `drawn` completions are right, in `distinct` ways.

    `distinct` is None unless the data set is in the format countdown.
    """

    dataset: str
    problem: str
    right: int
    drawn: int
    distinct: int | None = None


class TaskScore(Stored):
    """The score of one data set. `task` is the stock task, or none for the prompt of training.

    `pass_at` has the unbiased pass@k by k. `distinct_solutions` is the mean number of distinct right formulas of a
    problem (countdown). `timeouts` counts the completions whose comparison exceeded its limit of CPU time. `date` is
    the one that chat templates state.
    """

    harness: Harness
    harness_version: str = ""
    problems: int
    repeats: int
    accuracy: float
    accuracies: list[float] = Field([])
    extracted: Number | None = None
    flexible: Number | None = None
    agreement: Number | None = None
    completion_tokens: Number | None = None
    truncated: Number | None = None
    pass_at: dict[int, float] = Field({})
    distinct_solutions: Number | None = None
    task: StockTask | None = None
    sampling: Annotated[SamplingSettings, PlainSerializer(whole)] | None = None
    timeouts: int = 0
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


class StoredPolicyResult(Scores):
    """gates/stored/<policy>/result.json, of a committed policy."""

    stored: str


class OwnEvaluationResult(Scores):
    """The result.json of `qerl eval`, with the user's policy and settings."""

    eval: str
    model: str
    adapter: bool
    settings: Annotated[EvaluationSettings, PlainSerializer(whole)]


class MergeLoss(Stored):
    """What a merge into one checkpoint costs, measured on `problems` of a split, each with `repeats` completions.

    `kl` is KL(policy || merged) per token in nats, over the whole vocabulary and at temperature 1, on completions of
    the policy. `same_token` is the share of these tokens at which both find the same token most likely.
    `difference` is the merged model's accuracy less the policy's, on the same problems with the same draws. Intervals
    are over problems.
    """

    split: Split
    problems: int
    repeats: int
    tokens: int
    kl: Interval
    same_token: float
    accuracy: Interval
    accuracy_merged: Interval
    difference: Interval
    dtype: Literal["float32", "bfloat16"]
    sampling: Annotated[SamplingSettings, PlainSerializer(whole)]


class MergedExport(Stored):
    """merged.json beside a merged checkpoint: the run, its base's format and the checkpoint's, and the loss."""

    run: str
    base_weights: WeightFormat
    weights: MergedFormat
    size_bytes: int
    loss: MergeLoss
    provenance: Provenance


AnyEvaluation = EvaluationResult | StoredPolicyResult | OwnEvaluationResult
_ANY: TypeAdapter[AnyEvaluation] = TypeAdapter(AnyEvaluation)


def evaluation_of(policy: dict[str, Any], seed: int, **scores: Any) -> AnyEvaluation:
    """The result of scoring the policy that `policy` describes, with a new stamp."""
    return _ANY.validate_python({**policy, **scores, "provenance": Provenance.of_now(seed)})
