"""Runs by hand: `qerl train`, the folder of a run, and the use of a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from filelock import FileLock

from qerl.checkpoints.folder import (
    RUN_FILE,
    check_checkpoint,
    check_tokenizer,
    weights_format_of,
)
from qerl.data.by_hand import parse_run
from qerl.data.given import GIVEN, Given, given, is_given
from qerl.host.allocator import join_free_memory
from qerl.host.gpu_lease import alone
from qerl.host.imports import check_engine, check_installed, check_trackers
from qerl.host.nodes import own_lock
from qerl.host.plugins import check as check_function
from qerl.host.plugins import check_unchanged, path_of
from qerl.host.progress import log
from qerl.host.screen import quiet
from qerl.jobs.train import HubBase, TrainJob
from qerl.prepare.run_parts import CHECKPOINT, DATA, INPUTS, check_inputs, make_base, make_data, tell_reward
from qerl.provenance.files import check_writable, write_text, writing
from qerl.results.files import read_rows
from qerl.results.paths import LOG, METRICS, POLICY, REPORT, RUN, TRACKED, WORK
from qerl.results.schema.training import StepMetrics
from qerl.settings.base import ConfigError, path_argument
from qerl.settings.data import FunctionData, LocalData
from qerl.settings.reading import check_kind, read_yaml
from qerl.settings.run import UNDECIDING, RunFile

if TYPE_CHECKING:
    import pandas as pd

    from qerl.policy.policy import Policy
from qerl.by_hand.models import HUB_MODEL, MAIN_BRANCH, Dtype, PathLike, base_folder, check_weights, model_folder


@dataclass(frozen=True)
class Run:
    """A training run in its folder: run.yaml, inputs.json, data, checkpoint, policy, metrics.jsonl, run.json, log."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_argument(self.folder, "the folder of a run"))

    @cached_property
    def settings(self) -> RunFile:
        """The settings in run.yaml, with all defaults."""
        return _read_run(self.folder / RUN_FILE, self.folder)

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


def train(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None = None, *, log_to_file: bool = False
) -> Run:
    """Prepare the problems, fetch and quantize the model, and train it. `out` overrides the `out` of `run`.

    `run` is a `RunFile`, its values, or a YAML file with them. Among values, `dataset` (or its `origin`) may be the
    records themselves: a list, a generator, a function or a `datasets.Dataset`. A mapping from splits to these works
    too, and `reward.function` may be a function of a module. Finished parts are kept: a killed run continues where it
    stopped, and a finished run does nothing. A part that was made of other files, functions or code is made anew. A
    finished run whose inputs have changed is refused with a `ConfigError` that names them.

    With `log_to_file`, all that the process and its libraries print goes to log.txt in the run's folder. The screen
    shows progress and the project's own lines.
    """
    values, records = _without_objects(run, out)
    settings = _read_run(values, out)
    made = Run(settings.out)
    _check_same(made.folder, settings)
    if made.finished:
        records.write(replace=False)
        check_inputs(made.settings)
        log.info("%s is finished: nothing to do", made.folder)
        return made
    check_writable(made.folder)
    with quiet(made.folder / LOG) if log_to_file else nullcontext(), writing(made.folder):
        _make(made, settings, records)
    return made


def _make(run: Run, settings: RunFile, records: Given) -> None:
    from qerl.prepare.preflight import check_runs

    source = _checked_source(settings)
    if settings.joins_free_memory:
        join_free_memory()
    with alone(run.folder / WORK, own_lock(settings.nodes)):
        # Machines may share the folder, and torchrun's processes do: one after the other finds what is made.
        with FileLock(run.folder / WORK / "parts"):
            records.write()
            _forget_parts(run, settings)
            _write_run_file(settings)
            make_data(settings)
            check_runs(source, [(run.data, settings.rollout)])
            make_base(settings, source)
            tell_reward(settings)
        _train(run)


def _checked_source(settings: RunFile) -> Path:
    """The folder of the model, after all checks that need no work; of a model of the hub config.json comes first."""
    import torch

    from qerl.rl.data_parallel import check_processes

    if not torch.is_grad_enabled():
        raise ConfigError(
            "training needs gradients, which torch.inference_mode() or torch.no_grad() turns off here; call it outside"
        )
    check_processes(settings.processes, settings.nodes)
    if settings.reward.function is not None:
        check_function(settings.reward.function, "reward.function")
        check_unchanged(settings.reward.function)
    if isinstance(settings.dataset.origin, FunctionData):
        check_function(settings.dataset.origin.function, "origin.function")
        check_unchanged(settings.dataset.origin.function)
    followed = settings.thermostat.metrics if settings.thermostat else None
    if followed is not None and not followed.is_file():
        raise ConfigError(f"thermostat.metrics {followed} doesn't exist; give the metrics.jsonl of a finished run")
    check_engine(settings.rollout, "rollout.engine")
    check_trackers(settings.track, "track")
    source = base_folder(settings.model, settings.weights, lambda folder: _check_config(folder, settings))
    if weights_format_of(source) != settings.weights:
        check_installed("train")
    elif key := "recipe" if settings.recipe == "awq" else "pack_delta_nets" if settings.pack_delta_nets else None:
        asked = f"{key}={str(getattr(settings, key)).lower()}"
        raise ConfigError(f"{asked} quantizes a dense model, and {source} is quantized already; leave {key} out")
    _check_config(source, settings)
    return source


def _check_config(folder: Path, settings: RunFile) -> None:
    """Check the configuration of a model with the settings."""
    from qerl.prepare.preflight import check_settings  # after the checks that need no large library

    check_weights(folder, settings.weights)
    check_settings(folder, settings.settings)


def _without_objects(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None
) -> tuple[RunFile | Mapping[str, Any] | PathLike, Given]:
    """The settings with Python objects in them replaced: records by files that are still to be written."""
    if not isinstance(run, Mapping):
        return run, Given(None, {})
    values, folder = dict(run), run.get("out") if out is None else out
    if isinstance(reward := values.get("reward"), Mapping) and callable(reward.get("function")):
        values["reward"] = {**reward, "function": path_of(reward["function"], "reward.function")}
    if is_given(values.get("dataset")) and not isinstance(folder, (str, Path)):
        raise ConfigError(f"run: `out` must be the path of a new folder for all that the run makes, not {folder!r}")
    if "dataset" not in values or not isinstance(folder, (str, Path)):
        return values, Given(None, {})  # which is no run, as its fields will say
    records = given(values["dataset"], Path(folder).resolve())
    return {**values, "dataset": records.values}, records


def _read_run(run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None) -> RunFile:
    if isinstance(run, RunFile):
        values, where = {name: getattr(run, name) for name in RunFile.model_fields}, "run"
    elif isinstance(run, Mapping):
        values, where = dict(run), "run"
    elif isinstance(run, (str, PathLike)):
        if (stored := Path(run) / RUN_FILE).is_file():
            raise ConfigError(f"{run} is the folder of a run; go on with its file: qerl train {stored}")
        values, where = read_yaml(Path(run)), str(run)
        check_kind(values, where, of_run=True)
        if _is_stored(Path(run), values):
            return _read_run(_where_it_is(parse_run(values, where), Path(run).resolve().parent), out)
    else:
        raise ConfigError(f"a run is a RunFile, a mapping of its keys or a path of a YAML file, not {run!r}")
    return parse_run({**values, **({} if out is None else {"out": out})}, where)


def _is_stored(file: Path, values: Mapping[str, Any]) -> bool:
    """Whether a file is the one that a run keeps in its folder, with every key, and not one that a user wrote."""
    return file.name == RUN_FILE and file.with_name(INPUTS).is_file() and values.keys() >= RunFile.model_fields.keys()


def _where_it_is(stored: RunFile, folder: Path) -> RunFile:
    """The stored settings of a run in its present folder, with records of Python there, as a folder may be moved."""
    dataset, origin = stored.dataset, stored.dataset.origin
    if isinstance(origin, LocalData) and origin.path.is_relative_to(stored.out / GIVEN):
        path = folder / origin.path.relative_to(stored.out)
        dataset = dataset.model_copy(update={"origin": origin.model_copy(update={"path": path})})
    return stored.model_copy(update={"out": folder, "dataset": dataset})


def _check_same(folder: Path, settings: RunFile) -> None:
    """Refuse a folder that belongs to another run."""
    if not (folder / RUN_FILE).is_file():
        # Killed while it was written, run.yaml is there under a name of its own.
        begun = {WORK, GIVEN, LOG, f"{RUN_FILE}.partial"}
        if folder.exists() and (not folder.is_dir() or {f.name for f in folder.iterdir()} - begun):
            raise ConfigError(f"{folder} exists and is not the folder of a run; give a new folder as `out`")
        return
    if not _trained(Run(folder)):  # a start that failed: settings may still be corrected
        return
    import pandas as pd

    stored, asked = (
        pd.json_normalize(s.model_dump(mode="json", exclude=UNDECIDING)).loc[0].to_dict()
        for s in (Run(folder).settings, settings)
    )
    for key in {**asked, **stored}:
        if stored.get(key) != asked.get(key):
            raise ConfigError(
                f"{folder} holds a run with other settings ({key}: {stored.get(key)} there, {asked.get(key)} here); "
                "give another folder as `out`, or delete this one"
            )


def _trained(run: Run) -> bool:
    """Whether at least one step of the run is done."""
    return run.finished or any(run.folder.glob(f"{WORK}/*/{METRICS}"))


def _forget_parts(run: Run, settings: RunFile) -> None:
    """Remove data and checkpoint that an earlier, failed start made by other settings. Files are compared elsewhere."""
    if not (run.folder / RUN_FILE).is_file():
        return
    before = Run(run.folder).settings
    if not run.checkpoint.exists() or before.dataset != settings.dataset:
        shutil.rmtree(run.data, ignore_errors=True)
    if _of_base(before) != _of_base(settings):
        if run.checkpoint.is_symlink():
            run.checkpoint.unlink()
        else:
            shutil.rmtree(run.checkpoint, ignore_errors=True)


def _of_base(settings: RunFile) -> tuple[Any, ...]:
    """The settings of which a base is made."""
    of_run = settings.settings
    return settings.model, settings.weights, settings.pack_delta_nets, of_run.calibrated, of_run.perturbed


def _write_run_file(settings: RunFile) -> None:
    write_text(settings.out / RUN_FILE, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))


def _train(run: Run) -> None:
    from qerl.rl.train import train_run

    name = run.folder.name
    job = TrainJob(
        id=name,
        experiment=name,
        arm="run",
        varied={},
        settings=run.settings.settings,
        on_failure="stop",
        time_limit=None,
        base=_hub_base(run),
        checkpoint=run.checkpoint,
        data=run.data,
        work=run.folder / WORK,
        tracked=run.folder / TRACKED,
        followed=run.settings.thermostat.metrics if run.settings.thermostat else None,
        out=run.folder,
    )
    train_run(job)


def _hub_base(run: Run) -> HubBase | None:
    """Name and revision of the base, where it is one of the hub as it is there; one quantized here is a folder."""
    named = HUB_MODEL.fullmatch(run.settings.model)
    if named is None or Path(run.settings.model).is_dir() or (run.checkpoint / REPORT).exists():
        return None
    return HubBase(name=named["repo"], revision=named["revision"] or MAIN_BRANCH)


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
    from qerl.policy.policy import load_policy

    policy = load_policy(checkpoint, run.adapter if run else None, dtype or (run.settings.dtype if run else "bfloat16"))
    check_template(policy.tokenizer, policy.lm.config.vocab_size)
    return policy
