"""Baselines: one file for each class of machines, with the measurements there."""

from __future__ import annotations

import re
from pathlib import Path

from qerl.results.files import ResultError, read, write
from qerl.results.schema.gates import Baseline, GateMeasurements
from qerl.results.schema.stored import Machine
from qerl.settings.base import ConfigError


def machine_class(machine: Machine) -> str:
    """A name for machines that should measure alike: the GPUs, or else the CPU and its cores."""
    return re.sub(r"[^a-z0-9]+", "-", machine.label.lower()).strip("-")


def baseline_file(folder: Path, machine: Machine) -> Path:
    """The file of the baseline of a machine's class."""
    return folder / f"{machine_class(machine)}.json"


def read_baseline(file: Path) -> Baseline:
    """Read a baseline. A `ConfigError` of one sentence says what is wrong with another file."""
    try:
        return read(Baseline, file)
    except ResultError as error:
        raise ConfigError(f"{error}; restore it from git") from None


def own_baseline(folder: Path, machine: Machine, key: str) -> Baseline | None:
    """The baseline of this machine's class and this workload, if there is one."""
    file = baseline_file(folder, machine)
    baseline = read_baseline(file) if file.is_file() else None
    return baseline if baseline and baseline.measured.key == key else None


def any_baseline(folder: Path, key: str) -> Baseline | None:
    """The first baseline of this workload, of whatever machine: numbers that only rounding tells apart."""
    of_key = (
        baseline for file in sorted(folder.glob("*.json")) if (baseline := read_baseline(file)).measured.key == key
    )
    return next(of_key, None)


def write_baseline(folder: Path, measured: GateMeasurements) -> Path:
    """Write the baseline of the measuring machine's class; its file."""
    file = baseline_file(folder, measured.provenance.machine)
    write(file, Baseline(measured=measured))
    return file
