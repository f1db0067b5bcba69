"""Settings of evaluations: tasks, harnesses and their sampling."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import (
    Field,
    model_validator,
)

from qerl.settings.base import ConfigError, PositiveInt, Seed, Settings
from qerl.settings.data import RecordFormat, Split
from qerl.settings.rollout import EngineSettings, SamplingSettings

#: The harnesses; `qerl` is the grader of training.
Harness = Literal["lm-eval", "lighteval", "qerl"]


StockTask = Literal["gsm8k", "math_500", "aime24", "aime25", "amc23"]


#: The record formats that each harness can score.
SCORED: dict[Harness, tuple[RecordFormat, ...]] = {
    "lm-eval": ("gsm8k",),
    "lighteval": ("math", "aime"),
    "qerl": get_args(RecordFormat),
}


#: The harness and the record format of each stock task. lighteval lacks amc23, which is built from its aime tasks.
STOCK_TASKS: dict[StockTask, tuple[Harness, RecordFormat]] = {
    "gsm8k": ("lm-eval", "gsm8k"),
    "math_500": ("lighteval", "math"),
    "aime24": ("lighteval", "aime"),
    "aime25": ("lighteval", "aime"),
    "amc23": ("lighteval", "math"),
}


class TaskSampling(Settings):
    """Sampling settings of one task that differ from the evaluation's. None takes the evaluation's."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    max_tokens: PositiveInt | None = None


class TaskSettings(Settings):
    """One evaluation task: a split of a data set, scored by a harness."""

    dataset: str
    harness: Harness
    """`lm-eval` scores gsm8k, `lighteval` math and aime, each by its own metric. `qerl` scores every format by the
    grader of training, which is fast where a problem has many completions."""
    split: Split = "test"
    """Split whose problems are asked. Settings such as a learning rate are chosen on `validation`."""
    name: str = ""
    """Name of the task in results, by default that of the data set. Two tasks on one data set need different names."""
    task: StockTask | None = None
    """A stock task of the harness, with its own prompt, gold answer and metric. Without one, prompts are the data
    set's, as in training, and only the metric is the harness's."""
    chat: bool = True
    """Give the prompt as a user's message in the chat template. False gives a stock task its prompt as plain text, as
    `lm_eval` does without `--apply_chat_template`."""
    fewshot: Annotated[int | None, Field(ge=0)] = None
    """Number of solved examples before a stock task's question, from the training split. None takes the task's own
    number: 5 for gsm8k, 0 for the others."""
    repeats: PositiveInt | None = None
    """Number of completions of each problem. None takes the evaluation's."""
    sampling: TaskSampling = TaskSampling()

    @model_validator(mode="after")
    def _fits_the_stock_task(self) -> TaskSettings:
        if self.task is None and (not self.chat or self.fewshot is not None):
            raise ValueError("chat and fewshot are settings of a stock task; name one with `task`, or leave them out")
        if self.task and self.harness != STOCK_TASKS[self.task][0]:
            raise ValueError(f"task={self.task} isn't one of {self.harness}; use harness: {STOCK_TASKS[self.task][0]}")
        if self.task and self.split != "test":
            raise ValueError(f"task={self.task} asks the test split; leave split or task out")
        if self.task and self.harness == "lighteval" and self.fewshot:
            raise ValueError(f"task={self.task} has no few-shot examples; leave fewshot out")
        return self

    @property
    def label(self) -> str:
        """The task's name in results."""
        return self.name or self.dataset


class EvaluationSettings(EngineSettings):
    """How policies are evaluated, always without noise. The default sampling is that of the paper's section 4.1."""

    engine_key: ClassVar[str] = "evaluation.engine"

    tasks: list[TaskSettings]
    sampling: SamplingSettings = SamplingSettings(temperature=0.6, top_p=0.95)
    repeats: PositiveInt = 4
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0

    def sampling_of(self, task: TaskSettings) -> SamplingSettings:
        """The sampling settings of `task`."""
        return self.sampling.model_copy(update=task.sampling.model_dump(exclude_none=True))

    def repeats_of(self, task: TaskSettings) -> int:
        """Number of completions of each problem of `task`."""
        return task.repeats or self.repeats

    @model_validator(mode="after")
    def _labels_differ(self) -> EvaluationSettings:
        labels = [task.label for task in self.tasks]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two tasks are called {twice[0]!r} in results; give one of them a `name`")
        return self

    @model_validator(mode="after")
    def _repeats_differ(self) -> EvaluationSettings:
        sampled = [(f" of task {task.label}", self.sampling_of(task), self.repeats_of(task)) for task in self.tasks]
        for whose, sampling, repeats in sampled or [("", self.sampling, self.repeats)]:
            if sampling.temperature == 0 and repeats > 1:
                raise ValueError(
                    f"repeats={repeats} at sampling.temperature=0{whose} draws the same completions again; "
                    "use repeats=1"
                )
        return self


def harness_of(record_format: RecordFormat) -> Harness:
    """The harness that has a task for a record format; the project's own grader if no other has."""
    return next(harness for harness, formats in SCORED.items() if record_format in formats)


def check_scored(task: TaskSettings, record_format: RecordFormat, where: str) -> None:
    """Raise `ConfigError` unless the task accepts records of that format."""
    if task.task and STOCK_TASKS[task.task][1] != record_format:
        raise ConfigError(
            f"{where}: task={task.task} needs records of format {STOCK_TASKS[task.task][1]}, and those of "
            f"{task.dataset!r} are {record_format}; name another data set or another task"
        )
    if record_format not in SCORED[task.harness]:
        raise ConfigError(
            f"{where}: {task.harness} has no task for {task.dataset!r}, whose format is {record_format}; "
            f"use harness: {harness_of(record_format)}"
        )
