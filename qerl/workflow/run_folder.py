"""A run by hand in its folder: its settings, the checks before any work, the workflow's jobs for it, and its use."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from qerl.checkpoints.files import RUN_FILE, check_checkpoint, check_tokenizer, weights_format_of
from qerl.data.hub import contents_of
from qerl.data.sources import RECORDS, RecordFiles, as_files, is_objects, parse_run
from qerl.host.console import log
from qerl.host.imports import (
    check_engine,
    check_functions,
    check_installed,
    check_libraries,
    check_origin,
    check_unchanged,
    path_of,
    source_version,
)
from qerl.host.provenance import flush, write_text, writing
from qerl.jobs import DataJob, HubBase, Job, QuantizeJob, TrainJob
from qerl.results.paths import CHECKPOINT, DATA, LOG, METRICS, POLICY, REPORT, RUN, TRACKED, WORK
from qerl.results.schema import RunResult, StepMetrics, read, read_rows
from qerl.settings.base import ConfigError, PathLike, check_kind, path_argument, read_yaml
from qerl.settings.data import LocalData
from qerl.settings.run import OF_SEVERAL, UNDECIDING, RunFile, RunSettings
from qerl.settings.workflow import flat, merged, nested
from qerl.workflow.bases import HUB_MODEL, MAIN_BRANCH, base_folder, check_weights, model_folder

if TYPE_CHECKING:
    import pandas as pd

    from qerl.models.policy import Policy

#: The record of the inputs of a run's jobs.
INPUTS = "inputs.json"

Dtype = Literal["float32", "bfloat16"]

# The settings of the run.


def without_objects(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None
) -> tuple[RunFile | Mapping[str, Any] | PathLike, RecordFiles]:
    """The settings with Python objects in them replaced: records by files that are still to be written."""
    if not isinstance(run, Mapping):
        return run, RecordFiles(None, {})
    values, folder = dict(run), run.get("out") if out is None else out
    reward = values.get("reward")
    if isinstance(reward, Mapping) and isinstance(functions := reward.get("functions"), Mapping):
        values["reward"] = {**reward, "functions": {name: _by_path(name, each) for name, each in functions.items()}}
    environment = values.get("environment")
    if isinstance(environment, Mapping) and callable(made := environment.get("name")):
        values["environment"] = {**environment, "name": path_of(made, "environment.name")}
    if is_objects(values.get("dataset")) and not isinstance(folder, (str, Path)):
        raise ConfigError(f"run: `out` must be the path of a new folder for all that the run makes, not {folder!r}")
    if "dataset" not in values or not isinstance(folder, (str, Path)):
        return values, RecordFiles(None, {})  # which is no run, as its fields will say
    records = as_files(values["dataset"], Path(folder).resolve())
    return {**values, "dataset": records.values}, records


def _by_path(name: str, reward: Any) -> Any:
    """A reward of settings with its function, if it is an object, by path."""
    if isinstance(reward, Mapping) and "function" in reward:
        return {**reward, "function": _by_path(name, reward["function"])}
    return path_of(reward, f"reward.functions.{name}") if callable(reward) else reward


def file_values(file: Path) -> dict[str, Any]:
    """The values of a run's file. Raises `ConfigError` for the folder of a run and for a workflow's configuration."""
    if (stored := file / RUN_FILE).is_file():
        raise ConfigError(f"{file} is the folder of a run; go on with its file: qerl train {stored}")
    values = read_yaml(file)
    check_kind(values, str(file), of_run=True)
    return values


def read_run(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None, changes: Mapping[str, Any] | None = None
) -> RunFile:
    """The settings of a run, given as such, as values or as a file. Dotted keys of `changes`, and `out`, override them.

    Raises `ConfigError`, which names the file and the changed keys.
    """
    if isinstance(run, RunFile):
        values, where = {name: getattr(run, name) for name in run.model_fields_set}, "run"
    elif isinstance(run, Mapping):
        values, where = dict(run), "run"
    elif isinstance(run, (str, PathLike)):
        values, where = file_values(Path(run)), str(run)
        if Path(run).name == RUN_FILE and Path(run).with_name(INPUTS).is_file() and _has_every_key(values):
            stored = _where_it_is(parse_run(values, where), Path(run).resolve().parent)
            values = stored.model_dump(mode="json", exclude=set(OF_SEVERAL))
    else:
        raise ConfigError(f"a run is a RunFile, a mapping of its keys or a path of a YAML file, not {run!r}")
    if changes:
        values, where = merged(nested(values), nested(changes)), f"{where} with {', '.join(changes)}"
    return parse_run({**values, **({} if out is None else {"out": out})}, where)


def _has_every_key(values: Mapping[str, Any]) -> bool:
    """Whether the values are those of a file that a run keeps in its folder, unlike one that a user wrote."""
    return values.keys() >= RunFile.model_fields.keys() - OF_SEVERAL


def _where_it_is(stored: RunFile, folder: Path) -> RunFile:
    """The stored settings of a run in its present folder, with records of Python there, as a folder may be moved."""
    dataset, origin = stored.dataset, stored.dataset.origin
    if isinstance(origin, LocalData) and origin.path.is_relative_to(stored.out / RECORDS):
        path = folder / origin.path.relative_to(stored.out)
        dataset = dataset.model_copy(update={"origin": origin.model_copy(update={"path": path})})
    return stored.model_copy(update={"out": folder, "dataset": dataset})


def members(settings: RunFile) -> list[RunFile]:
    """The runs of a file: itself, or with `seeds` or `runs` those, each in a folder of its name in `out`."""
    if not (settings.seeds or settings.runs):
        return [settings]
    common = settings.model_dump(exclude_unset=True, exclude={"out", *OF_SEVERAL})
    found = []
    for name, keys in (settings.runs or {"": {}}).items():
        where, own = f"runs.{name}" if name else "run", nested(keys)
        for seed in settings.seeds or (None,):
            label = "-".join([name] * bool(name) + [f"seed{seed}"] * (seed is not None))
            values = {"out": settings.out / label} | ({} if seed is None else {"seed": seed})
            found.append(parse_run({**merged(common, own), **values}, where))
    return found


def write_settings(settings: RunFile) -> None:
    """Write the settings into the folder of the run, with every key."""
    values = settings.model_dump(mode="json", exclude=set(OF_SEVERAL))
    write_text(settings.out / RUN_FILE, yaml.safe_dump(values, sort_keys=False))


def check_same(settings: RunFile) -> None:
    """Refuse a folder that belongs to another run."""
    folder, file = settings.out, settings.out / RUN_FILE
    if not file.is_file():
        # Killed while it was written, run.yaml is there under a name of its own.
        begun = {WORK, RECORDS, LOG, f"{RUN_FILE}.partial"}
        if folder.exists() and (not folder.is_dir() or {f.name for f in folder.iterdir()} - begun):
            raise ConfigError(f"{folder} exists and is not the folder of a run; give a new folder as `out`")
        return
    if not ((folder / INPUTS).is_file() or _has_every_key(file_values(file))):
        raise ConfigError(
            f"{file}, which no run wrote, would be overwritten; rename it, or give another folder as `out`"
        )
    # Settings of a start that failed before its first step may still be corrected.
    run = Run(folder)
    if not (run.finished or any(folder.glob(f"{WORK}/*/{METRICS}"))):
        return
    _check_equal(folder, run.settings, settings, UNDECIDING)


def _check_equal(folder: Path, stored: RunSettings, given: RunSettings, exclude: Any) -> None:
    """Refuse a folder whose run has other settings, but for those of `exclude`."""
    before, now = (flat(one.model_dump(mode="json", exclude=exclude)) for one in (stored, given))
    for key in {**now, **before}:
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{folder} holds a run with other settings ({key}: {before.get(key)} there, {now.get(key)} here); "
                "give another folder as `out`, or delete this one"
            )


# Checks before any work.


def checked_source(settings: RunFile) -> Path:
    """The folder of the model, after all checks that need no work; of a model of the hub config.json comes first."""
    import torch

    from qerl.rl.parallel import check_processes

    if not torch.is_grad_enabled():
        raise ConfigError(
            "training needs gradients, which torch.inference_mode() or torch.no_grad() turns off here; call it outside"
        )
    check_processes(settings.processes, settings.nodes)
    check_functions(settings)
    check_origin(settings.dataset, "origin")
    for path in sorted(settings.own_functions | data_stage(settings).job.own_functions):
        check_unchanged(path)
    check_engine(settings.rollout, "rollout.engine")
    check_libraries(settings.track, "track")
    source = base_folder(settings.model, settings.weights, lambda folder: _check_config(folder, settings))
    if weights_format_of(source) != settings.weights:
        check_installed("train")
    elif key := "recipe" if settings.recipe == "awq" else "pack_delta_nets" if settings.pack_delta_nets else None:
        setting = f"{key}={str(getattr(settings, key)).lower()}"
        raise ConfigError(f"{setting} quantizes a dense model, and {source} is quantized already; leave {key} out")
    _check_config(source, settings)
    return source


def _check_config(folder: Path, settings: RunFile) -> None:
    """Check the configuration of a model with the settings."""
    from qerl.workflow.preflight import check_settings  # after the checks that need no large library

    check_weights(folder, settings.weights)
    check_settings(folder, settings.settings)


# The jobs of the run. Snakemake compares what decides a job's result with the record of its last run; here
# `inputs.json` in the run's folder is this record.


class Inputs(BaseModel):
    """The inputs that determine the result of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, str] = {}
    """SHA-256 by name."""
    functions: dict[str, str] = {}
    """The version of each of the user's functions by its import path."""
    code: str
    """The version of the code."""
    settings: str = ""
    """The job's own settings as JSON."""

    def changes(self, now: Inputs) -> list[str]:
        """Names of the user's files and functions that have changed."""
        before, after = {**self.files, **self.functions}, {**now.files, **now.functions}
        return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


#: Inputs by the key of a run's settings that names them: dataset, model, reward.
Record = dict[str, Inputs]
_RECORD = TypeAdapter(Record)


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Stage(Generic[J]):
    """A job of a run, the key of the run's settings that names its inputs, and the paths that it reads."""

    key: str
    job: J
    folder: Path
    """The folder of the run."""
    reads: tuple[Path, ...] = ()

    @property
    def inputs(self) -> Inputs:
        """The inputs as they are now, by what decides the job's result in a workflow."""
        # The content of files decides, and not their place: a model, or the folder of the run, may be moved.
        places = {name for name, value in self.job if isinstance(value, Path)}
        return Inputs(
            files={name: digest for path in self.reads for name, digest in contents_of(path).items()},
            functions={path: source_version(path) for path in sorted(self.job.own_functions)},
            code=self.job.code,
            settings=self.job.model_dump_json(exclude=places).replace(f"{self.folder}/", ""),
        )

    def make(self, do: Callable[[J], None], others: Sequence[Stage[J]] = ()) -> None:
        """Let `do` do the job, unless its result exists and was made from the same inputs.

        The result of a job of `others`, which are done, is taken if it was made from these inputs. Its files become
        hard links, which take no space and survive if either run is deleted.
        """
        out, inputs, record = self.job.out, self.inputs, read_record(self.folder)
        if out.exists() and record.get(self.key) == inputs:
            return
        before = record.pop(self.key, None)
        if out.exists():
            if before:
                other = "the code" if before.settings == inputs.settings else "the settings"
                log.info("%s is made anew: %s changed", out, ", ".join(before.changes(inputs)) or other)
            # The record goes first and comes last, so that after a kill it never describes an incomplete folder.
            _write_record(self.folder, record)
            shutil.rmtree(out)
        same = next((other.job for other in others if other.inputs == inputs), None)
        with writing(out.parent):
            if same:
                shutil.copytree(same.out, out, symlinks=True, copy_function=_link_or_copy)
            else:
                do(self.job)
        # A power cut must not leave a record of files that never reached the disk.
        flush(out)
        _write_record(self.folder, {**record, self.key: inputs})

    def write_inputs(self) -> None:
        """Record the inputs with which the job is done from now on."""
        _write_record(self.folder, {**read_record(self.folder), self.key: self.inputs})


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
            raise
        shutil.copy2(source, target)


def data_stage(settings: RunFile) -> Stage[DataJob]:
    """Prepare the problems."""
    job = DataJob(settings=settings.dataset, lock_file=None, out=settings.out / DATA)
    return Stage("dataset", job, settings.out, tuple(job.own_files))


def base_stage(settings: RunFile, source: Path) -> Stage[QuantizeJob]:
    """Make the base from `source`, which is linked if it has the run's weight format already."""
    base, target = settings.settings.base, settings.out / CHECKPOINT
    data = settings.out / DATA if base.calibration else None
    as_it_is = weights_format_of(source) == base.weights and base.error is None
    report = None if as_it_is else target / REPORT
    # A link in the run's folder to a relative path would lead elsewhere.
    job = QuantizeJob(base=base, source=source.absolute(), data=data, report=report, out=target)
    return Stage("model", job, settings.out, (source, data) if data else (source,))


def train_stage(settings: RunFile) -> Stage[TrainJob]:
    """Train the run, whose base is made. Failures end it with their message."""
    folder, name, base = settings.out, settings.out.name, None
    # A base that was quantized here is a folder for others, and one of the hub as it is there has its name.
    if (named := HUB_MODEL.fullmatch(settings.model)) and not (
        Path(settings.model).is_dir() or (folder / CHECKPOINT / REPORT).exists()
    ):
        base = HubBase(name=named["repo"], revision=named["revision"] or MAIN_BRANCH)
    job = TrainJob(
        id=name,
        experiment=name,
        arm="run",
        varied={},
        settings=settings.settings,
        on_failure="stop",
        time_limit=None,
        base=base,
        checkpoint=folder / CHECKPOINT,
        data=folder / DATA,
        work=folder / WORK,
        tracked=folder / TRACKED,
        version="",
        out=folder,
    )
    return Stage("reward", job, folder)


def check_inputs(settings: RunFile) -> None:
    """Refuse a finished run whose inputs, or settings in run.yaml, have changed. Inputs that no longer exist or are on
    the hub aren't compared.
    """
    # The content of the model decides, and not its place.
    trained = read(RunResult, settings.out / RUN).settings
    _check_equal(settings.out, trained, settings.settings, {**UNDECIDING, "model": True})
    data_file, source = settings.dataset.own_file, Path(settings.model)
    stages: list[Stage[Any]] = [data_stage(settings)] if data_file is None or data_file.exists() else []
    stages += [base_stage(settings, source)] if source.is_dir() else []
    record = read_record(settings.out)
    pairs = {
        stage.key: (record[stage.key], stage.inputs)
        for stage in [*stages, train_stage(settings)]
        if stage.key in record
    }
    for key, (before, after) in pairs.items():
        if changes := before.changes(after):
            raise ConfigError(
                f"{settings.out} is finished, and its {key} has changed since ({', '.join(changes)}); "
                "give another folder as `out`, or delete this one to train anew"
            )
    if any(before.code != after.code for before, after in pairs.values()):
        log.warning("%s was trained by another version of the code; delete it to train anew", settings.out)


def read_record(folder: Path) -> Record:
    """The recorded inputs of a run's jobs, empty if none were written."""
    file = folder / INPUTS
    return _RECORD.validate_json(file.read_bytes()) if file.is_file() else {}


def _write_record(folder: Path, record: Record) -> None:
    write_text(folder / INPUTS, _RECORD.dump_json(record, indent=1).decode() + "\n")


# The folder as people use it.


@dataclass(frozen=True)
class Run:
    """A training run in its folder: run.yaml, inputs.json, data, checkpoint, policy, metrics.jsonl, run.json, log."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_argument(self.folder, "the folder of a run"))

    @cached_property
    def settings(self) -> RunFile:
        """The settings in run.yaml, with all defaults."""
        return read_run(self.folder / RUN_FILE, self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its last step."""
        return (self.folder / RUN).is_file()

    @property
    def checkpoint(self) -> Path:
        """The base in the run's weight format, which is a link if the model already had that format."""
        return self.folder / CHECKPOINT

    @property
    def adapter(self) -> Path:
        """The trained tensors: an adapter in PEFT's layout, or a whole model after method=full."""
        return self.folder / POLICY

    @property
    def data(self) -> Path:
        """The prepared problems: train.jsonl, validation.jsonl, test.jsonl, dataset.json."""
        return self.folder / DATA

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per finished step: reward and its parts, loss, entropy, lengths, ..."""
        import pandas as pd

        # During training the metrics are beside the checkpoints.
        candidates = [self.folder / METRICS, *self.folder.glob(f"{WORK}/*/{METRICS}")]
        metrics_files = [file for file in candidates if file.is_file()]
        if not metrics_files:
            raise ConfigError(
                f"{self.folder} has no metrics: none of its steps is finished; train it with `qerl train`"
                if (self.folder / RUN_FILE).is_file()
                else f"{self.folder} is not the folder of a run: it has no {RUN_FILE}"
            )
        latest = max(metrics_files, key=lambda file: file.stat().st_mtime_ns)
        return pd.DataFrame([row.content() for row in read_rows(StepMetrics, latest)])

    @cached_property
    def policy(self) -> Policy:
        """The trained policy, loaded on first use."""
        return load(self.folder)


def check_finished(run: Run) -> None:
    """Raise `ConfigError` unless the folder is that of a run which was trained to its last step."""
    if not (run.folder / RUN_FILE).is_file():
        raise ConfigError(f"{run.folder} is not the folder of a run: it has no {RUN_FILE}")
    if not run.finished:
        raise ConfigError(f"{run.folder} isn't finished; go on with `qerl train {run.folder / RUN_FILE}`")


def load(model: PathLike, dtype: Dtype | None = None) -> Policy:
    """A policy to sample from and to evaluate: a checkpoint as it is, or a finished run's adapter on its checkpoint.

    `dtype` is that of activations and dense weights; by default a run's own, else bfloat16.
    """
    if dtype not in (None, *get_args(Dtype)):
        raise ConfigError(f"dtype={dtype!r} isn't supported; use {' or '.join(get_args(Dtype))}")
    folder = path_argument(model, "a model or a run")
    run = Run(folder) if (folder / RUN_FILE).is_file() else None
    if run:
        check_finished(run)
    checkpoint = run.checkpoint if run else model_folder(str(folder))
    check_checkpoint(checkpoint)
    check_tokenizer(checkpoint)
    from qerl.data.prompts import check_template
    from qerl.models.policy import load_policy

    policy = load_policy(checkpoint, run.adapter if run else None, dtype or (run.settings.dtype if run else "bfloat16"))
    check_template(policy.tokenizer, policy.lm.config.vocab_size)
    return policy
