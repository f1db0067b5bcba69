"""Settings of data sets: where records come from, and how problems are asked."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from qerl.settings.base import FilePath, Fraction, FunctionPath, NonEmpty, PositiveInt, Seed, Settings

RecordFormat = Literal["gsm8k", "math", "aime", "countdown", "reasoning_gym", "prompt"]
Split = Literal["train", "validation", "test"]
AnswerForm = Literal["native", "tags"]
CountdownUse = Literal["all", "some"]


class GeneratedSplits(Settings):
    """Seed and number of problems of each split. Shares of flawed solutions hold for training alone."""

    seed: Seed = 0
    train: PositiveInt = 4096
    validation: PositiveInt = 256
    test: PositiveInt = 256


class Generated(GeneratedSplits):
    """Arithmetic word problems made by `qerl.data.generated`."""

    source: Literal["generated"] = "generated"
    terse: Fraction = 0.55
    """Share of the training solutions that state the answer at once, without the steps."""


class CountdownData(GeneratedSplits):
    """Countdown problems made by `qerl.data.generated`.

    They need `format: countdown`. Each has a solution, most have several."""

    source: Literal["countdown"]
    numbers: NonEmpty[Annotated[int, Field(ge=2, le=6)]] = [3, 4]
    """How many numbers a problem gives, drawn uniformly from these counts."""
    smallest: PositiveInt = 1
    """Smallest given number."""
    largest: Annotated[int, Field(ge=2, le=99)] = 20
    """Largest given number."""
    largest_target: PositiveInt = 99
    """Largest target, and largest intermediate result of a training solution."""
    use: CountdownUse = "all"
    """`all`: a solution uses each given number exactly once. `some`: at most once."""
    missed: Fraction = 0.75
    """Share of the training solutions that compute correctly and miss the target."""
    style: Literal["direct", "search"] = "direct"
    """`direct`: a solution has the steps to its formula. `search`: steps that miss the target and ways back come first.
    It needs `use: all`."""

    @model_validator(mode="after")
    def _range_has_numbers(self) -> CountdownData:
        if self.smallest > self.largest:
            raise ValueError(f"smallest={self.smallest} is above largest={self.largest}; lower it, or raise largest")
        return self

    @model_validator(mode="after")
    def _search_uses_all(self) -> CountdownData:
        if self.style == "search" and self.use != "all":
            raise ValueError(f"style=search writes solutions that use all numbers; leave out use={self.use}")
        return self


class ReasoningGymData(GeneratedSplits):
    """Problems of a task of the library reasoning-gym (the extra `reasoning_gym`), which also scores the answers.

    They need `format: reasoning_gym`."""

    source: Literal["reasoning_gym"]
    task: str
    """The library's name of a task, such as `countdown` or `chain_sum`."""
    arguments: dict[str, Any] = {}
    """Fields of the task's configuration, such as `{max_numbers: 4}`."""
    levels: list[Annotated[int, Field(ge=0)]] = []
    """Levels of the task's curriculum, drawn uniformly; `arguments` win. Without any, the task's own defaults hold."""


class LocalData(Settings):
    """A file of records (.jsonl or .ndjson, .json, .csv, .parquet, also with .gz or .zst), split by a hash of the
    question, a folder with one file per split, or one that `save_to_disk` of `datasets` wrote."""

    source: Literal["local"]
    path: FilePath
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


class HubData(Settings):
    """A data set of the Hugging Face hub at a pinned revision: from the hub, its cache or a local copy."""

    source: Literal["hub"]
    repo: str
    revision: str | None = None
    """A commit, or a branch, a tag or none if a lock file (`lock`) resolves it to a commit."""
    subset: str | None = None
    """The repository's name of the subset, such as `main` of openai/gsm8k."""
    splits: dict[Split, str] = {"train": "train", "test": "test"}
    """Maps each split to one of the repository. `{test: train}` tests on a repository's only split, called train."""
    folder: FilePath | None = None
    """A local copy of the repository, read in place of the hub (`hf download --repo-type dataset REPO --local-dir
    FOLDER`)."""


class FunctionData(Settings):
    """Records that a function of the user returns.

    It returns a list, split by a hash of the question, or a mapping from split names to lists.
    """

    source: Literal["python"]
    function: FunctionPath
    """`module:function`, importable from the working directory or installed, called without an argument. It may be a
    generator, or return a `datasets.Dataset`."""
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


Bound = Annotated[float, Field(allow_inf_nan=True)]


class FilterSettings(Settings):
    """Conditions that all training records must meet. Validation and test are never filtered."""

    max_characters: PositiveInt | None = None
    """Longest question that is kept (1024 on BigMath in the released scripts)."""
    levels: list[int] | None = None
    """Levels (column `level`) that are kept. A record without a level is dropped."""
    within: dict[str, tuple[Bound, Bound]] = {}
    """Columns whose number must lie between two bounds, inclusive, as `{llama8b_solve_rate: [0, 0.5]}`. A record
    without it is dropped."""


#: The default instruction of a data set, by answer form and record format. Without an instruction, a policy may state
#: its answer in another form, which earns no reward.
_TAGGED = "Reason between <think> and </think>, then give the final answer alone between <answer> and </answer>."


_BOXED = "Let's think step by step and output the final answer within \\boxed{}."


INSTRUCTIONS: dict[AnswerForm, dict[RecordFormat, str]] = {
    "native": {
        "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
        "math": _BOXED,
        "aime": _BOXED,
        "countdown": 'Let\'s think step by step and output the formula with + - * / and ( ) after "####".',
        "reasoning_gym": "Let's think step by step and give the final answer alone between <answer> and </answer>.",
        "prompt": "",
    },
    "tags": dict.fromkeys(get_args(RecordFormat), _TAGGED),
}


#: The one record format of a generator that has only one.
_FORMAT_OF: dict[type[Settings], RecordFormat] = {CountdownData: "countdown", ReasoningGymData: "reasoning_gym"}


def _instruction_of(values: dict[str, Any]) -> str:
    """The default of `DatasetSettings.instruction`; `values` are the fields before it."""
    return INSTRUCTIONS[values["answer"]][values["format"]]


def _no_number(value: Any) -> Any:
    """Refuse a number, which the library would read as seconds since 1970."""
    if isinstance(value, (int, float)):
        raise ValueError(f"a date is written as 2026-01-31, not {value!r}")
    return value


Delimiter = Annotated[str, Field(min_length=1)]


class DatasetSettings(Settings):
    """A set of problems with verifiable answers.

    Each question counts once, in the first of test, validation and train that has it. One with contradictory answers is
    dropped with a warning.
    """

    format: RecordFormat
    columns: dict[str, str] = {}
    """Maps the format's column names to the records', where they differ: `{problem: prompt, answer: solution}`. A
    point names a key within a column: `{answer: extra_info.answer}`."""
    filter: FilterSettings = FilterSettings()
    origin: Annotated[
        Generated | CountdownData | ReasoningGymData | LocalData | HubData | FunctionData,
        Field(discriminator="source"),
    ]
    answer: AnswerForm = "native"
    """How completions state their answer: `native` as the records do (`#### n`, `\\boxed{}`), `tags` as
    `<think>...</think><answer>...</answer>`, which the instruction must ask for."""
    instruction: str = Field(default_factory=_instruction_of)
    """Text appended to each question on a line of its own, which tells the policy how to state the answer. The default
    asks for what the grader of the format reads, and is empty for `format: prompt`. An empty text appends nothing."""
    system: str = ""
    """The system message of each chat that has none of its own, in `prompt` or in a column `system`. With an empty text
    the chat template decides."""
    template_arguments: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}`."""
    units: list[str] = []
    """Words and signs that may follow a number without changing it, such as `["%", points]`, besides the built-in units
    (docs/evaluation.md)."""

    thinking: tuple[Delimiter, Delimiter] | None = None
    """What begins and ends the model's thinking, such as `["<plan>", "</plan>"]`, besides `<think>` and `</think>`.
    None takes it from tokenizer and chat template. A completion whose thinking hasn't ended states no answer."""
    date: Annotated[datetime.date, BeforeValidator(_no_number)] | None = None
    """The date that the model's chat template states, if it states one. None takes the day on which the data are
    prepared, which is kept with them."""

    @property
    def own_file(self) -> Path | None:
        """The user's file or folder from which the data set is made, or None."""
        if isinstance(self.origin, LocalData):
            return self.origin.path
        return self.origin.folder if isinstance(self.origin, HubData) else None

    @property
    def form(self) -> dict[str, Any]:
        """The settings of prompt and answer, which can be applied to other problems too."""
        keys = ("instruction", "system", "template_arguments", "answer", "units", "thinking", "date")
        return {key: getattr(self, key) for key in keys}

    @field_validator("units")
    @classmethod
    def _units_hold_no_digits(cls, units: list[str]) -> list[str]:
        for unit in units:
            if not unit.strip() or any(sign in "0123456789.,<>" for sign in unit):
                raise ValueError(
                    f"a unit is a word or a sign such as '%', without digits, points and commas; got {unit!r}"
                )
        return [unit.strip() for unit in units]

    @field_validator("thinking")
    @classmethod
    def _delimiters_differ(cls, thinking: tuple[str, str] | None) -> tuple[str, str] | None:
        if thinking and (thinking[0] in thinking[1] or thinking[1] in thinking[0]):
            raise ValueError(f"no delimiter may be a part of the other; got {thinking[0]!r} and {thinking[1]!r}")
        return thinking

    @model_validator(mode="after")
    def _generator_has_the_format(self) -> DatasetSettings:
        needed = _FORMAT_OF.get(type(self.origin))
        if needed and self.format != needed:
            raise ValueError(f"origin.source={self.origin.source} makes records of format: {needed}, not {self.format}")
        if self.format in ("countdown", "reasoning_gym", "prompt") and isinstance(self.origin, Generated):
            other = f"; use origin.source={self.format}" * (self.format != "prompt")
            raise ValueError(f"origin.source=generated makes no records of format: {self.format}{other}")
        return self

    @model_validator(mode="after")
    def _tags_are_asked_for(self) -> DatasetSettings:
        if self.answer == "tags" and not all(tag in self.instruction for tag in ("<think>", "<answer>")):
            raise ValueError(
                "answer: tags needs an instruction that asks for <think>...</think><answer>...</answer>; "
                "the given one doesn't name both tags"
            )
        return self
