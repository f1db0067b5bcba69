"""From a configuration to the sheets of the DAG: which checkpoints, runs, evaluations and measurements there are."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.config import (
    GROUP_SIZE,
    CalibrationSettings,
    Config,
    ConfigError,
    DatasetSettings,
    Experiment,
    FunctionData,
    HubData,
    LocalData,
    LocalModel,
    PretrainSettings,
    Recipe,
    RolloutBench,
    RunSettings,
    StepBench,
    TaskSettings,
    harness_of,
    merged,
    parse,
    read_yaml,
    require,
)
from qerl.data.hub import check_folder
from qerl.imports import check_engine
from qerl.lock import with_locked_revisions
from qerl.models.checkpoint import check_base, read_config
from qerl.models.context import check_room, usable_length
from qerl.own import described, fitted, traits
from qerl.results.printed import figures_fed, tables_fed
from qerl.userfunction import check

#: It names files, whose names have at most 255 bytes with what is appended to it.
_LONGEST_ID = 200
#: No settings are nested as deeply as this.
_DEEPEST = 20


@dataclass(frozen=True)
class Checkpoint:
    """A base model in one weight format, rounded to nearest, or by AWQ where there is a calibration."""

    model: str
    weights: str
    calibration: CalibrationSettings | None = None

    @property
    def id(self) -> str:
        """The name of its folder."""
        made = self.calibration
        awq = f"-awq-{made.dataset}-{made.samples}x{made.length}-seed{made.seed}" if made else ""
        return f"{self.model}-{self.weights}{awq}"

    @property
    def recipe(self) -> Recipe:
        """How its weights are quantized."""
        return "awq" if self.calibration else "rtn"


@dataclass(frozen=True)
class Run:
    """One training run: a row of the sheet."""

    id: str
    experiment: str
    arm: str
    varied: dict[str, Any]
    settings: RunSettings

    @property
    def checkpoint(self) -> Checkpoint:
        """The base that the run starts from."""
        return Checkpoint(self.settings.model, self.settings.weights, self.settings.calibrated)


@dataclass(frozen=True)
class Evaluation:
    """A policy to evaluate: a base in one format, or the outcome of a run; `tasks` names the tasks' data sets."""

    id: str
    checkpoint: Checkpoint
    run: Run | None
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All rows of all sheets of one configuration."""

    config: Config
    runs: dict[str, Run]
    #: Runs of experiments with `train: false`.
    timed: dict[str, Run]
    checkpoints: dict[str, Checkpoint]
    evaluations: dict[str, Evaluation]

    @property
    def tables(self) -> list[str]:
        """The tables that this configuration fills."""
        return [
            "accuracy",
            "quantization",
            *_for_benches(self.config, {"step": "memory_speed", "rollout": "throughput"}),
            *tables_fed(self._covered),
        ]

    @property
    def figures(self) -> list[str]:
        """The figures that this configuration fills."""
        noisy = any(run.settings.noise.schedule != "off" for run in self.runs.values())
        curves = ["accuracy", "reward", "entropy", "completion_length", *["noise"] * noisy]
        return [*curves, *_for_benches(self.config, {"rollout": "throughput"}), *figures_fed(self._covered)]

    @property
    def _covered(self) -> set[tuple[str, str]]:
        """(kind, model) of the results that stand beside the paper's, see `qerl.results.printed`."""
        models = {checkpoint.model for checkpoint in self.checkpoints.values()}
        evaluated = {(task.dataset, model) for task in self.config.evaluation.tasks for model in models}
        trained = {
            (kind, run.settings.model) for run in self.runs.values() for kind in ("run", f"data={run.settings.dataset}")
        }
        measured = {
            (bench.kind, model) for name, bench in self.config.benches.items() for model in self._bench_models(name)
        }
        return evaluated | trained | measured

    def _bench_models(self, bench: str) -> set[str]:
        settings = self.config.benches[bench]
        if isinstance(settings, RolloutBench):
            return {settings.model}
        return {run.settings.model for run in self.step_bench_runs(bench)}

    @property
    def folder(self) -> str:
        """Where all results of this configuration go."""
        return f"results/{self.config.name}"

    def evaluations_of(self, experiment: str) -> list[Evaluation]:
        """The evaluations of what an experiment trains."""
        return [e for e in self.evaluations.values() if e.run and e.run.experiment == experiment]

    def bench_checkpoints(self, bench: str) -> list[Checkpoint]:
        """The bases that a rollout measurement reads."""
        settings = self.config.benches[bench]
        assert isinstance(settings, RolloutBench)
        return [Checkpoint(settings.model, weights) for weights in settings.weights]

    def step_bench_runs(self, bench: str) -> list[Run]:
        """The runs that a step measurement times: of each arm and point of its experiment's grid, the first seed."""
        settings = self.config.benches[bench]
        assert isinstance(settings, StepBench)
        first: dict[str, Run] = {}
        for run in (*self.runs.values(), *self.timed.values()):
            if run.experiment == settings.experiment:
                point = {key: value for key, value in run.varied.items() if key != "seed"}
                first.setdefault(json.dumps([run.arm, point]), run)
        return list(first.values())


def _for_benches(config: Config, names: Mapping[str, str]) -> list[str]:
    kinds = {bench.kind for bench in config.benches.values()}
    return [name for kind, name in names.items() if kind in kinds]


def nested(dotted: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """{"adapter.rank": 8, "adapter": {"alpha": 16}} as {"adapter": {"rank": 8, "alpha": 16}}; `depth` for itself."""
    if depth > _DEEPEST:
        raise ConfigError(f"keys of a run are nested over {_DEEPEST} deep; see whether an alias (*) contains itself")
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is no key of a run; write it as text")
        branch = nested(value, depth + 1) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = merged(tree, branch)
    return tree


def _expand(name: str, experiment: Experiment) -> Iterator[Run]:
    """One run for each arm and point of the grid."""
    labels = _short(list(experiment.grid))
    base = nested(experiment.base)
    for arm, changes in experiment.arms.items():
        of_arm = merged(base, nested(changes))
        written = functools.partial(_written, name, experiment, arm)
        for values in itertools.product(*experiment.grid.values()):
            given = dict(zip(experiment.grid, values, strict=True))
            settings = parse(RunSettings, merged(of_arm, nested(given)), "", written)
            varied = {key: _as_taken(value, key, settings) for key, value in given.items()}
            suffix = "".join(f"-{labels[key]}{_plain(value)}" for key, value in varied.items())
            yield Run(f"{name}-{arm}{suffix}", name, arm, varied, settings)


def _written(name: str, experiment: Experiment, arm: str, key: str) -> str:
    """The key of a configuration that a dotted key of a run's settings comes from."""
    above = f"experiments.{name}"
    if any(f"{key}.".startswith(f"{varied}.") for varied in experiment.grid):
        return f"{above}.grid.{key}"
    if experiment.arms[arm] and (not key or _holds(nested(experiment.arms[arm]), key)):
        return f"{above}.arms.{arm}.{key}".removesuffix(".")
    return f"{above}.base.{key}".removesuffix(".")


def _holds(tree: Any, key: str) -> bool:
    """Whether there is a value at a dotted key, places in lists (`[0]`) left aside."""
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _as_taken(value: Any, key: str, settings: Any) -> Any:
    """A value of a grid, with the one word that settings have for "off", whichever was used."""
    for part in key.split("."):
        settings = getattr(settings, part)
    if isinstance(value, Mapping):
        return {inner: _as_taken(of_inner, inner, settings) for inner, of_inner in value.items()}
    return settings if settings in ("off", None) else value


def _short(keys: list[str]) -> dict[str, str]:
    """The last part of each dotted key, where it tells the keys apart; else the whole."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: part if list(last.values()).count(part) == 1 else key for key, part in last.items()}


def _shortened(config: Config) -> Config:
    """Apply the command line's `model=` and `problems=`: every run uses that checkpoint and those problems.

    Results go to a folder of their own, which ends in a hash of the two paths: other paths may have the same names.
    """
    from qerl.data.sources import check_problem_file

    changes: dict[str, Any] = {}
    model = _plain_name(config.model, "model", ())
    problems = _plain_name(config.problems, "problems", config.datasets)
    if config.model is not None:
        changes["models"] = {model: LocalModel(source="local", path=config.model)}
        changes["benches"] = {
            key: bench.model_copy(update={"model": model}) if isinstance(bench, RolloutBench) else bench
            for key, bench in config.benches.items()
        }
    if config.problems is not None:
        record_format = check_problem_file(config.problems)
        origin = {"source": "local", "path": config.problems}
        same = next((known for known in config.datasets.values() if known.format == record_format), None)
        asked = {"instruction": same.instruction, "answer": same.answer, "units": same.units} if same else {}
        values = {"format": record_format, "origin": origin, **asked}
        dataset = parse(DatasetSettings, values, "problems")
        changes["datasets"] = {**config.datasets, problems: dataset}
        task = TaskSettings(dataset=problems, harness=harness_of(record_format))
        changes["evaluation"] = config.evaluation.model_copy(update={"tasks": [task]})
    base_change = {key: value for key, value in (("model", model), ("dataset", problems)) if value}
    changes["experiments"] = {
        key: experiment.model_copy(update={"base": {**experiment.base, **base_change}})
        for key, experiment in config.experiments.items()
    }
    identity = _path_hash(config.model, config.problems)
    changes["name"] = "-".join([config.name, *base_change.values(), identity]).replace(".", "_")
    return config.model_copy(update=changes)


def _plain_name(path: Path | None, otherwise: str, taken: Collection[str]) -> str:
    """A file's or folder's name as a part of paths and commands; empty for no path.

    `otherwise` takes the place of a name without a plain character; a name that is `taken` gets the path's hash.
    """
    if path is None:
        return ""
    name = path.resolve().stem if path.is_file() else path.resolve().name
    plain = _plain(name)[:60].strip("-.+") or otherwise
    return f"{plain}-{_path_hash(path)}" if plain in taken else plain


def _path_hash(*paths: Path | None) -> str:
    """Eight hexadecimal digits for files and folders, as they lie from the working directory, where results are too."""
    lie = [os.path.relpath(path.resolve()) if path else "" for path in paths]
    return hashlib.sha256("\0".join(lie).encode()).hexdigest()[:8]


def _plain(value: Any) -> str:
    """A value as a part of paths and commands."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))


def plan(config: Config) -> Plan:
    """Expand a configuration and check that its parts fit; a `ConfigError` says what doesn't."""
    config = _shortened(config) if config.model or config.problems else config
    runs: dict[str, Run] = {}
    for name, experiment in config.experiments.items():
        for run in _expand(name, experiment):
            if run.id in runs:
                raise ConfigError(
                    f"two runs are named {run.id}; rename an arm or a grid key, and put values of a grid that differ "
                    "in special characters alone into arms"
                )
            if len(run.id) > _LONGEST_ID:
                raise ConfigError(
                    f"experiments.{name}.grid: the run's name {run.id[:40]}... has over {_LONGEST_ID} "
                    "characters; put the long values of the grid into arms"
                )
            _check_run(run, config)
            runs[run.id] = run
    if not (config.shapes or config.benches or any(config.experiments[run.experiment].train for run in runs.values())):
        raise ConfigError("nothing to do: `experiments` has no run to train, and there are no `benches` or `shapes`")
    checkpoints = _named_apart(_checkpoints(config, runs))
    trained = {id: run for id, run in runs.items() if config.experiments[run.experiment].train}
    timed = {id: run for id, run in runs.items() if id not in trained}
    evaluations: dict[str, Evaluation] = {}
    for evaluation in _evaluations(config, trained):
        if evaluation.id in evaluations:
            raise ConfigError(f"a run has the name of the evaluation {evaluation.id}; rename its experiment or arm")
        evaluations[evaluation.id] = evaluation
    return Plan(config, trained, timed, checkpoints, evaluations)


def _evaluations(config: Config, trained: Mapping[str, Run]) -> Iterator[Evaluation]:
    """The bases that runs start from, and bf16 beside them, each on the tasks of all their runs; then the runs."""
    every = dict.fromkeys(task.dataset for task in config.evaluation.tasks)
    of_run = {id: _tasks(config, run) for id, run in trained.items()}
    of_base: dict[Checkpoint, set[str]] = {}
    for id, run in trained.items():
        for base in (Checkpoint(run.settings.model, "bf16"), run.checkpoint):
            of_base.setdefault(base, set()).update(of_run[id])
    for base, asked in of_base.items():
        if asked:
            yield Evaluation(f"base-{base.id}", base, None, tuple(task for task in every if task in asked))
    for id, run in trained.items():
        if of_run[id]:
            yield Evaluation(id, run.checkpoint, run, of_run[id])


def _tasks(config: Config, run: Run) -> tuple[str, ...]:
    named = config.experiments[run.experiment].tasks
    every = dict.fromkeys(task.dataset for task in config.evaluation.tasks)
    return tuple(every) if named is None or config.problems else tuple(named)


def _checkpoints(config: Config, runs: Mapping[str, Run]) -> Iterator[Checkpoint]:
    """Every base in bf16 (the reference of each table) and in each format that a run or a measurement uses."""
    for run in runs.values():
        yield Checkpoint(run.settings.model, "bf16")
        yield run.checkpoint
    for bench in config.benches.values():
        if isinstance(bench, RolloutBench):
            yield from (Checkpoint(bench.model, weights) for weights in ("bf16", *bench.weights))


def _named_apart(checkpoints: Iterable[Checkpoint]) -> dict[str, Checkpoint]:
    """Each checkpoint once, by its id, which must not be another's."""
    named: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        if named.setdefault(checkpoint.id, checkpoint) != checkpoint:
            raise ConfigError(f"two checkpoints are named {checkpoint.id}; rename a model or a data set")
    return named


def _check_run(run: Run, config: Config) -> None:
    """What can be known before any job starts."""
    settings = run.settings
    written = functools.partial(_written, run.experiment, config.experiments[run.experiment], run.arm)
    require(settings.model, config.models, written("model"), "models")
    require(settings.dataset, config.datasets, written("dataset"), "datasets")
    if (made := settings.calibrated) and made.dataset:
        require(made.dataset, config.datasets, written("calibration.dataset"), "datasets")
    if settings.weights in GROUP_SIZE:
        _check_groups(config.models[settings.model], settings.weights, written("weights"))


def _check_groups(model: Any, weights: str, where: str) -> None:
    group = GROUP_SIZE[weights]
    for key, width in _widths(model).items():
        if width % group:
            raise ConfigError(
                f"{where}: {key}={width} is not a multiple of {group}, the group size of weights={weights}"
            )


def _widths(model: Any) -> dict[str, int]:
    """Input widths of the linear layers, where they are known before a download."""
    if isinstance(model, PretrainSettings):
        return {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    if isinstance(model, LocalModel) and (model.path / "config.json").is_file():
        architecture = read_config(model.path)
        return {key: architecture[key] for key in ("hidden_size", "intermediate_size") if key in architecture}
    return {}


def check_inputs(plan_: Plan) -> None:
    """Local checkpoints, problem files and functions are there, whole and readable; a sentence names what isn't."""
    config = plan_.config
    origins = [dataset.origin for dataset in config.datasets.values()]
    rewards = [run.settings.reward.function for run in plan_.runs.values()]
    data = [origin.function for origin in origins if isinstance(origin, FunctionData)]
    for function in dict.fromkeys(rewards):
        if function is not None:
            check(function, "reward.function")
    for function in dict.fromkeys(data):
        check(function, "origin.function")
    for origin in origins:
        if isinstance(origin, HubData):
            check_folder(origin)
    for model in config.models.values():
        if isinstance(model, LocalModel):
            check_base(model.path)
    _check_lengths(plan_)
    _check_test_splits(plan_)
    local = [dataset for dataset in config.datasets.values() if isinstance(dataset.origin, LocalData)]
    if local:
        from qerl.data.sources import check_problem_file

        for dataset in local:
            check_problem_file(dataset.origin.path, dataset.format, dataset.columns)  # type: ignore[union-attr]


def _check_lengths(plan_: Plan) -> None:
    """Completions leave room for a prompt in the context of local checkpoints."""
    folders = {name: model.path for name, model in plan_.config.models.items() if isinstance(model, LocalModel)}
    for run in plan_.runs.values():
        if folder := folders.get(run.settings.model):
            rollout, where = run.settings.rollout, f"experiment {run.experiment}, arm {run.arm}"
            context = usable_length(read_config(folder), rollout)
            check_room(context, rollout.sampling.max_tokens, f"{where}: rollout.sampling.max_tokens")
    settings = plan_.config.evaluation
    for name in dict.fromkeys(evaluation.checkpoint.model for evaluation in plan_.evaluations.values()):
        for task in settings.tasks if name in folders else ():
            context = usable_length(read_config(folders[name]), settings)
            check_room(context, settings.sampling_of(task).max_tokens, f"evaluation on {task.label}: max_tokens")


def _check_test_splits(plan_: Plan) -> None:
    """What is evaluated on has a test split, where the configuration tells."""
    for name in dict.fromkeys(task for evaluation in plan_.evaluations.values() for task in evaluation.tasks):
        origin = plan_.config.datasets[name].origin
        if isinstance(origin, HubData) and "test" not in origin.splits:
            raise ConfigError(
                f"evaluation.tasks: {name} has no test split; name one of the repository's in datasets.{name}.origin."
                "splits, as {test: train} where all there is to test on is called train"
            )
        if isinstance(origin, LocalData) and origin.path.is_file() and origin.test_fraction == 0:
            raise ConfigError(
                f"evaluation.tasks: {name} has no test split, since its origin.test_fraction is 0; raise it"
            )


def check_engines(plan_: Plan) -> None:
    """Engines of runs, evaluations and measurements are installed: for where jobs start, not for who only plans."""
    for run in plan_.runs.values():
        check_engine(run.settings.rollout, f"experiment {run.experiment}, arm {run.arm}: rollout.engine")
    if plan_.evaluations:
        check_engine(plan_.config.evaluation, "evaluation.engine")
    for name, bench in plan_.config.benches.items():
        if isinstance(bench, RolloutBench):
            check_engine(bench, f"benches.{name}.engine")


def fitting(plan_: Plan) -> list[str]:
    """Lines for people about the settings that follow from the models; none where nothing does."""
    if not plan_.config.fit_to_model:
        return []
    first = {run.settings.model: run for run in reversed(plan_.runs.values())}
    lines = []
    for name, run in first.items():
        model = plan_.config.models[name]
        assert isinstance(model, LocalModel)
        about, *keys = described(traits(model.path), run.settings.model_dump())
        lines += [f"{model.path}: {about}", *keys]
    return [*lines, f"{len(plan_.runs)} runs, results in {plan_.folder}"]


def plan_from(given: Mapping[str, Any], default: Path, files: Sequence[Path] = (), typed: Collection[str] = ()) -> Plan:
    """The plan of what Snakemake was given: a whole configuration, or single keys over the one in `default`.

    A whole configuration comes from `files`, where there are any, but for the keys `typed` on the command line. Errors
    name both.
    """
    values, where = given, ", ".join(map(_as_typed, files)) or "configuration"
    if not files and "name" not in given:
        values, where, typed = {**read_yaml(default), **given}, _as_typed(default), given
    if typed:
        where += f" with {', '.join(map(str, typed))} of the command line"
    if "name" not in values:
        raise ConfigError(f"{where} has no `name`; give it a `name`: its results go to results/NAME")
    if values.get("protocol", "paper") != "paper":
        where += f" with protocol {values['protocol']}"
    try:
        plan_ = plan(with_locked_revisions(parse(Config, fitted(values), "")))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_inputs(plan_)
    return plan_


def _as_typed(file: Path) -> str:
    """A file as people name it: from the working directory, where it lies below that."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
