"""How a job is done: by a rule, with its lock and GPUs, and by hand, with a record of what its result was made of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from qerl.checkpoints.files import weights_format_of
from qerl.data.inputs import contents_of
from qerl.host.console import log
from qerl.host.imports import imports, source_version
from qerl.host.lease import WHOLE, alone, devices, join_free_memory, keep_to_own_cores, lease, percent_of_each
from qerl.host.provenance import check_writable, flush, write_text, writing
from qerl.jobs import DataJob, HubBase, Job, QuantizeJob, TrainJob
from qerl.results.paths import CHECKPOINT, DATA, REPORT, TRACKED, WORK
from qerl.settings.base import ConfigError
from qerl.settings.run import RunFile

# A job of the workflow.


def run(job: Job, gpu_percent: int | None = None) -> None:
    """Run a job with its GPUs and its lock.

    `gpu_percent` is the part of a GPU that the job leases, whose memory it may use; None leases its GPUs whole.
    """
    check_writable(job.out)
    percent = percent_of_each(job.gpus, gpu_percent)
    visible = [*devices()] if job.own_cores else []
    with ExitStack() as held:
        if job.lock:  # before the GPU, which a job that outlived a killed Snakemake may still have
            held.enter_context(alone(*job.lock))
        gpus = held.enter_context(lease(job.gpus, percent))
        if job.own_cores and gpus:
            keep_to_own_cores(gpus, visible)
        module, _, name = job.function.partition(":")
        if job.joins_free_memory:
            join_free_memory()
        with imports(job.without):
            if gpus and percent < WHOLE:
                _keep_to_share(percent / WHOLE)
            function = getattr(import_module(module), name)
        with writing(job.out):
            function(job)


def _keep_to_share(share: float) -> None:
    from qerl.host.gpus import cap_share  # imports torch, which must not see the other GPUs

    cap_share(share)


# The jobs of a run by hand. Snakemake compares what decides a job's result with the record of its last run; here
# `inputs.json` in the run's folder is this record.

#: The record of the inputs of a run's jobs.
INPUTS = "inputs.json"


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

    def make(self, do: Callable[[J], None]) -> None:
        """Let `do` do the job, unless its result exists and was made from the same inputs."""
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
        with writing(out.parent):
            do(self.job)
        flush(out)
        _write_record(self.folder, {**record, self.key: inputs})

    def write_inputs(self) -> None:
        """Record the inputs with which the job is done from now on."""
        _write_record(self.folder, {**read_record(self.folder), self.key: self.inputs})


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


def train_stage(settings: RunFile, base: HubBase | None = None) -> Stage[TrainJob]:
    """Train the run. Its failures end it with their message."""
    folder, name = settings.out, settings.out.name
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
        followed=settings.thermostat.metrics if settings.thermostat else None,
        out=folder,
    )
    return Stage("reward", job, folder)


def check_inputs(settings: RunFile) -> None:
    """Refuse a finished run whose inputs have changed. Inputs that no longer exist or are on the hub aren't
    compared.
    """
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
