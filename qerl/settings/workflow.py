"""A whole configuration: models, data sets, experiments, evaluations, studies, benches and gates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from qerl.settings.base import ConfigError, FilePath, Name, NonEmpty, PositiveInt, Seed, Settings, nearest
from qerl.settings.data import DatasetSettings, RecordFormat, Split
from qerl.settings.models import ModelSettings, PretrainSettings, WeightFormat
from qerl.settings.run import EngineSettings, SamplingSettings, TrackerName
from qerl.settings.workloads import ShapesSettings

# Settings of evaluations: tasks, harnesses and their sampling.

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
    grader of training, which is fast."""
    split: Split = "test"
    """Split whose problems are asked. Choose settings such as a learning rate on `validation`."""
    name: str = ""
    """Name of the task in results, by default the data set's."""
    task: StockTask | None = None
    """A stock task of the harness, with its own prompt, gold answer and metric. Without one, prompts are those of
    training, and only the metric is the harness's."""
    chat: bool = True
    """False gives a stock task its prompt as plain text, as `lm_eval` does without `--apply_chat_template`."""
    fewshot: Annotated[int | None, Field(ge=0)] = None
    """Number of solved training examples before a stock task's question. None takes the task's own number: 5 for gsm8k,
    0 for the others."""
    repeats: PositiveInt | None = None
    """None takes the evaluation's."""
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
    """How policies are evaluated, always without noise. Sampling is by default as in the paper's section 4.1."""

    engine_key: ClassVar[str] = "evaluation.engine"

    # Each experiment has its own evaluation tasks: Table 1's policies on AIME and Table 2's on GSM8K would cost GPU-
    # hours for numbers that no table has.
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


# Settings of a study: paired arms, and the page of their comparisons.


class StudiedExperiment(Settings):
    """An experiment whose arms are compared."""

    experiment: str
    size: Name
    """Name of the size of its bases."""


class StudySettings(Settings):
    """The comparison of paired arms by docs/dose-protocol.md, with its data, tables, figure and page.

    The workflow writes them to the folder `study` of the results.
    """

    decides: bool
    """Whether the numbers decide anything. False marks the page as a run of the pipeline alone."""
    protocol: FilePath
    """File that says what is compared, and what follows from which outcome. The data have its SHA-256."""
    experiments: NonEmpty[StudiedExperiment]
    """The experiments that answer the question, with their sizes."""
    committed: Path | None = None
    """Folder of the committed data. Each folder in it has the data of some runs, from the target `study_finished`. The
    target `study_published` makes the page in docs/results from all of them."""


# Settings of benches: rollouts, steps, the speed grid and the regression gates.


class RolloutBench(EngineSettings):
    """Rollout throughput by weight format and LoRA rank (paper Tables 5 to 9), in one process."""

    kind: Literal["rollout"]
    model: str
    weights: list[WeightFormat] = ["bf16", "nf4", "mxfp4", "nvfp4"]
    ranks: list[Annotated[int, Field(ge=0)]] = [16, 32, 64]
    sequences: PositiveInt = 32
    prompt_tokens: PositiveInt = 256
    completion_tokens: PositiveInt = 2048
    repeats: PositiveInt = 3
    interleave: bool = True
    """Keep all points in memory and time them round by round, so that other load affects all alike. False times each
    alone in memory, which large models and exact memory peaks need."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0


class StepBench(Settings):
    """Seconds and peak memory of one GRPO step (paper Tables 3 and 5 to 8).

    Each arm of an experiment is timed at each point of its grid, with one seed."""

    kind: Literal["step"]
    experiment: str
    repeats: PositiveInt = 3
    interleave: bool = True
    """As in RolloutBench."""


BenchSettings = Annotated[RolloutBench | StepBench, Field(discriminator="kind")]


class GateSettings(Settings):
    """Regression gates (docs/gates.md). With them the workflow makes a verdict instead of tables."""

    file: FilePath
    """Table of the gates, one per row."""
    baselines: FilePath
    """Folder of the baselines, one file per machine class. `qerl gate accept` writes them."""
    vectors: FilePath
    """Folder of the reference vectors for codecs, kernels and graders."""
    experiment: str
    """Experiment whose runs are compared with the baseline's, seed by seed."""
    stored: FilePath
    """Folder with one folder per trained policy, which is evaluated without training."""
    bench: str
    """A bench of kind `rollout` with bf16 and one other weight format."""
    rounds: PositiveInt = 10
    """Rounds in which this code and the baseline's are timed, for rollouts and for updates."""


# A whole configuration: models, data sets, experiments, evaluation and benches.
#
# This package doesn't import torch, because every call of Snakemake parses the configuration. Unknown keys and
# impossible combinations are errors that name the key and the fix.


class Experiment(Settings):
    """Base settings of a run, named arms that override them, and a grid over any keys (RunSettings).

    It expands into one run for each arm and each point of its grid. Keys may be dotted, so these are 18 runs:

    ```yaml
    experiments:
      ranks:
        base: {model: miniature, dataset: arithmetic, weights: nvfp4, dtype: float32}
        grid: {adapter.rank: [8, 16, 32], optimizer.learning_rate: [1.0e-3, 3.0e-3], seed: [0, 1, 2]}
    ```
    """

    base: dict[str, Any]
    arms: dict[Name, dict[str, Any]] = {"run": {}}
    """Settings of each arm over the base. An arm of null is left out, so that a protocol can remove one."""
    grid: dict[str, NonEmpty[Any]] = {"seed": [0, 1, 2]}
    """Values of each key. Every combination is a run of every arm."""
    train: bool = True
    """False leaves training out: the runs are only timed, by benches of kind `step`."""
    tasks: list[str] | None = None
    """Data sets of `evaluation.tasks` on which bases and trained policies are scored. None takes all, an empty list
    none."""
    on_failure: Literal["stop", "row"] = "stop"
    """What follows if a run is out of memory, over `time_limit` or diverges: `stop` fails its job, `row` makes the
    failure a row of the tables. To try such a run again, delete its folder `train/<run>` in the results."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours that the steps of a run may take in all attempts together. A start with a higher limit continues."""

    @field_validator("base")
    @classmethod
    def _keys_are_nested(cls, base: dict[str, Any]) -> dict[str, Any]:
        return nested(base)

    @field_validator("arms", mode="before")
    @classmethod
    def _null_is_left_out(cls, arms: Any) -> Any:
        return {name: arm for name, arm in arms.items() if arm is not None} if isinstance(arms, Mapping) else arms

    @field_validator("arms")
    @classmethod
    def _arms_are_left(cls, arms: dict[Name, dict[str, Any]]) -> dict[Name, dict[str, Any]]:
        if not arms:
            raise ValueError("no arm is left, and so no run; give at least one, or leave `arms` out for a single run")
        return {name: nested(arm) for name, arm in arms.items()}


#: The blocks of steps from whose means a run's drift is estimated, and so the least steps of a run.
DRIFT_BLOCKS = 20

Protocol = Literal["paper", "upstream-scripts"]


class Config(Settings):
    """A configuration is one YAML file, which describes the science. Files in `profiles/` describe cores and GPUs.

    Each file of this folder begins with what it is for. `qerl plan CONFIG` prints its runs with their cost and state.
    An unknown key, or one given twice, is an error, as is a number that YAML reads otherwise than by its digits, such
    as `0123` (83) and `1:30` (90). Where a setting can be off, `off`, `none` and `false` all mean off. `qerl keys
    --schema` prints the schema by which an editor checks a file that begins with `# yaml-language-server:
    $schema=PATH`.

    Another workflow imports the rules of a clone. Results go to its working directory:

    ```python
    module qerl:
        snakefile: "path/to/clone/workflow/Snakefile"
        config: config["qerl"]

    use rule * from qerl as qerl_*
    ```
    """

    name: Name
    """Name of the folder of results, results/NAME."""
    protocol: Protocol = "paper"
    """The source to follow where paper and scripts disagree. Another than `paper` overrides keys by its entry of
    `protocols` and has its own folder of results."""
    # paper.yaml follows the paper; `protocols` has the keys in which the released scripts differ, and the results of
    # each side have a folder of their own.
    protocols: dict[Protocol, dict[str, Any]] = {}
    """The keys in which each other protocol differs, placed as in the whole file."""
    lock: FilePath | None = None
    """File of the commits and SHA-256 hashes of everything from the hub, which `qerl lock CONFIG` writes."""
    models: dict[Name, ModelSettings]
    datasets: dict[Name, DatasetSettings]
    experiments: dict[Name, Experiment]
    evaluation: EvaluationSettings
    benches: dict[Name, BenchSettings] = {}
    gates: GateSettings | None = None
    shapes: ShapesSettings | None = None
    """Benches of speed and memory. With this key, the four required ones may be left out."""
    drift: bool = False
    """Also report whether the KL divergence of sampler and trainer grows over a run's steps, at least 20."""
    study: StudySettings | None = None
    """The comparison of paired arms, with a page of its own."""
    side_by_side: PositiveInt = 1
    """The most runs of one base, engine and data set that train side by side in one job (docs/cohorts.md). With 1, each
    run has a job of its own. It decides no result."""
    track: list[TrackerName] = []
    """Trackers of all runs whose experiment doesn't name its own."""

    @model_validator(mode="before")
    @classmethod
    def _shapes_need_nothing_else(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.get("shapes"):
            return values
        return {"models": {}, "datasets": {}, "experiments": {}, "evaluation": {"tasks": []}, **values}

    @model_validator(mode="before")
    @classmethod
    def _follow_the_protocol(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("protocol", "paper") == "paper":
            return values
        protocol, parts = values["protocol"], values.get("protocols") or {}
        if not isinstance(protocol, str) or not isinstance(parts, Mapping) or "name" not in values:
            return values  # not a mapping, for which the fields raise the error
        if not isinstance(parts.get(protocol), Mapping):
            raise ValueError(f"protocol={protocol} is not in `protocols` ({', '.join(map(str, parts)) or 'empty'})")
        rest = _with_nested_keys({key: value for key, value in values.items() if key != "protocols"})
        return {**merged(rest, _with_nested_keys(parts[protocol])), "name": f"{values['name']}-{protocol}"}

    @field_validator("protocols")
    @classmethod
    def _keys_are_nested(cls, protocols: dict[Protocol, dict[str, Any]]) -> dict[Protocol, dict[str, Any]]:
        return {name: _with_nested_keys(values) for name, values in protocols.items()}

    @model_validator(mode="after")
    def _names_exist(self) -> Config:
        tasks, studied = self.evaluation.tasks, self.study.experiments if self.study else []
        for number, task in enumerate(tasks):
            require(task.dataset, self.datasets, f"evaluation.tasks[{number}].dataset", "datasets")
            check_scored(task, self.datasets[task.dataset].format, f"evaluation.tasks[{number}]")
        evaluated = {task.dataset: None for task in tasks}
        for name, experiment in self.experiments.items():
            for dataset in experiment.tasks or ():
                require(dataset, evaluated, f"experiments.{name}.tasks", "evaluation.tasks")
        for name, model in self.models.items():
            keys = ("datasets", "held_out") if isinstance(model, PretrainSettings) else ()
            for key, dataset in [(one, each) for one in keys for each in getattr(model, one)]:
                require(dataset, self.datasets, f"models.{name}.{key}", "datasets")
                if self.datasets[dataset].answer == "tags":
                    raise ValueError(
                        f"models.{name}.{key}: pre-training imitates the solutions of {dataset!r} as they are, "
                        "without tags; give it a data set with answer: native"
                    )
        for name, bench in self.benches.items():
            if isinstance(bench, RolloutBench):
                require(bench.model, self.models, f"benches.{name}.model", "models")
            else:
                require(bench.experiment, self.experiments, f"benches.{name}.experiment", "experiments")
        if self.gates:
            require(self.gates.experiment, self.experiments, "gates.experiment", "experiments")
            require(self.gates.bench, self.benches, "gates.bench", "benches")
        for place, name in ((f"study.experiments[{n}]", each.experiment) for n, each in enumerate(studied)):
            require(name, self.experiments, f"{place}.experiment", "experiments")
            compared = self.experiments[name].tasks
            if not any(task.split == "test" and (compared is None or task.dataset in compared) for task in tasks):
                raise ConfigError(
                    f"{place} names {name}, which has no scores to compare; give experiments.{name}.tasks a data set "
                    "whose test split is among evaluation.tasks"
                )
        return self


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `override` over it. Nested mappings are merged in the same way, but an empty one
    replaces what is there: it would else change nothing.
    """
    result = dict(base)
    for key, value in override.items():
        both = value and isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


#: The deepest allowed nesting of settings; deeper values contain themselves through an alias.
_DEEPEST = 20


def nested(dotted: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge {"adapter.rank": 8, "adapter": {"alpha": 16}} to {"adapter": {"rank": 8, "alpha": 16}}, recursively."""
    if depth > _DEEPEST:
        raise ConfigError(f"keys of a run are nested over {_DEEPEST} deep; see whether an alias (*) contains itself")
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is not a key of a run; write it as text")
        branch = nested(value, depth + 1) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = merged(tree, branch)
    return tree


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of nested settings by dotted keys, as `nested` takes them."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return values


def _with_nested_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with dotted keys of runs nested: merging compares keys, and the later of two spellings would win."""
    experiments = values.get("experiments")
    if not isinstance(experiments, Mapping):
        return dict(values)
    result: dict[str, Any] = {}
    for name, experiment in experiments.items():
        if isinstance(experiment, Mapping):
            experiment = dict(experiment)
            if isinstance(base := experiment.get("base"), Mapping):
                experiment["base"] = nested(base)
            if isinstance(arms := experiment.get("arms"), Mapping):
                experiment["arms"] = {
                    a: nested(keys) if isinstance(keys, Mapping) else keys for a, keys in arms.items()
                }
        result[name] = experiment
    return {**values, "experiments": result}


def require(name: str, known: Mapping[str, Any], key: str, section: str) -> None:
    """Raise `ConfigError` unless the value `name` of `key` is a key of `section`."""
    if name not in known:
        among = ", ".join(known) or "empty"
        raise ConfigError(f"{key} names {name!r}, which is not in `{section}` ({among}){nearest(name, known)}")
