"""Preparation of a run: its base checkpoint and its data, which are made once, with the record of their inputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from qerl.checkpoints.files import weights_format_of
from qerl.data.inputs import MadeOf, data_files, hashes_of, model_files, read_record, write_record
from qerl.host.console import log
from qerl.host.imports import source_version
from qerl.host.provenance import put, writing
from qerl.jobs import DataJob, HubBase, Job, QuantizeJob, TrainJob
from qerl.results.paths import CHECKPOINT, DATA, REPORT, TRACKED, WORK
from qerl.settings.base import ConfigError
from qerl.settings.run import RunFile
from qerl.workflow.bases import link_checkpoint, make_checkpoint

#: The record of the inputs of a run, by the keys of its settings: dataset, model, reward.
INPUTS = "inputs.json"


def check_inputs(settings: RunFile) -> None:
    """Refuse a finished run whose inputs have changed. Inputs that no longer exist or are on the hub aren't
    compared.
    """
    data_file, source = settings.dataset.own_file, Path(settings.model)
    now = {
        "dataset": _of_data(settings) if data_file is None or data_file.exists() else None,
        "model": _of_checkpoint(settings, source) if source.is_dir() else None,
        "reward": _of_reward(settings),
    }
    record = read_record(settings.out / INPUTS)
    pairs = {key: (record[key], made) for key, made in now.items() if made and key in record}
    for key, (before, after) in pairs.items():
        if changes := before.changes(after):
            raise ConfigError(
                f"{settings.out} is finished, and its {key} has changed since ({', '.join(changes)}); "
                "give another folder as `out`, or delete this one to train anew"
            )
    if any(before.code != after.code for before, after in pairs.values()):
        log.warning("%s was trained by another version of the code; delete it to train anew", settings.out)


def make_data(settings: RunFile) -> None:
    """Prepare the problems."""
    from qerl.data.records import DataError
    from qerl.data.sources import prepare, read_meta

    _make(settings, "dataset", DATA, _of_data(settings), lambda folder: prepare(settings.dataset, folder))
    rows = read_meta(settings.out / DATA).rows
    if not rows["train"]:
        others = sum(rows.values())
        why = f"all {others} are held out" if others else "all were dropped, as their answers contradict each other"
        raise DataError(f"dataset has no training problems, since {why}; give it more problems, or a split train")


def make_base(settings: RunFile, source: Path) -> None:
    """Make the run's base checkpoint, which is a link if `source` already has its weight format."""
    made = _of_checkpoint(settings, source)
    _make(settings, "model", CHECKPOINT, made, lambda folder: _base(settings, source, folder))


def tell_reward(settings: RunFile) -> None:
    """Record the version of the reward with which the run is trained from now on."""
    file = settings.out / INPUTS
    write_record(file, {**read_record(file), "reward": _of_reward(settings)})


def whole(target: Path, make: Callable[[Path], object]) -> None:
    """Let `make` write the folder `target` unless it exists, completely or not at all."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with writing(target.parent):
        make(partial / target.name)
        put(partial / target.name, target)
    partial.rmdir()


def train_job(settings: RunFile, base: HubBase | None = None) -> TrainJob:
    """The job of a run by hand, whose failures end it with their message."""
    folder, name = settings.out, settings.out.name
    return TrainJob(
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
        out=folder,
    )


def _of_data(settings: RunFile) -> MadeOf:
    job, file = DataJob(settings=settings.dataset, lock_file=None, out=settings.out / DATA), settings.dataset.own_file
    own = settings.dataset.model_dump_json().replace(f"{settings.out}/", "")  # a run's folder may be moved
    return _made_of(job, hashes_of(data_files(file), file) if file else {}, own)


def _of_checkpoint(settings: RunFile, source: Path) -> MadeOf:
    """The inputs of a checkpoint: the base, and the prepared problems that AWQ reads."""
    base, data = settings.settings.base, settings.out / DATA
    files = hashes_of(model_files(source), source)
    if base.calibration:
        files |= hashes_of(data_files(data), settings.out)
    job = QuantizeJob(base=base, source=source, data=data, out=settings.out)
    return _made_of(job, files, job.model_dump_json(include={"base"}))


def _of_reward(settings: RunFile) -> MadeOf:
    return _made_of(train_job(settings), {})


def _made_of(job: Job, files: dict[str, str], settings: str = "") -> MadeOf:
    """What decides the result of a job now, by the code that decides it in a workflow."""
    functions = {path: source_version(path) for path in sorted(job.own_functions)}
    return MadeOf(files=files, functions=functions, code=job.code, settings=settings)


def _make(settings: RunFile, key: str, name: str, made: MadeOf, make: Callable[[Path], object]) -> None:
    """Let `make` write a folder of the run, unless it exists and was made from the same inputs."""
    target, file = settings.out / name, settings.out / INPUTS
    record = read_record(file)
    if target.exists() and record.get(key) == made:
        return
    if target.exists():
        before = record.get(key, made)
        other = "the code" if before.settings == made.settings else "the settings"
        log.info("%s is made anew: %s changed", target, ", ".join(before.changes(made)) or other)
        # First remove the record, so that after a kill it never describes a folder that isn't there.
        write_record(file, {other: of for other, of in record.items() if other != key})
        shutil.rmtree(target)
    whole(target, make)
    write_record(file, {**record, key: made})


def _base(settings: RunFile, source: Path, target: Path) -> None:
    base = settings.settings.base
    if weights_format_of(source) == base.weights and base.error is None:
        link_checkpoint(source.absolute(), target)  # `whole` moves the folder, and with it relative links
        return
    make_checkpoint(base, source, target, target / REPORT, settings.out / DATA)
