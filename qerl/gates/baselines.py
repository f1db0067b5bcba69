"""Baselines: one file per machine class, with the accepted measurements of that class."""

from __future__ import annotations

import re
from pathlib import Path

from qerl.results.schema import Baseline, GateMeasurements, Machine
from qerl.results.store import ResultError, read, write
from qerl.settings.base import ConfigError


def machine_class(machine: Machine) -> str:
    """The machine class, a name for machines with comparable measurements: the GPUs, or else the CPU and its cores."""
    return re.sub(r"[^a-z0-9]+", "-", machine.label.lower()).strip("-")


def baseline_file(folder: Path, machine: Machine) -> Path:
    """The baseline's file for a machine's class."""
    return folder / f"{machine_class(machine)}.json"


def read_baseline(file: Path) -> Baseline:
    """Read a baseline. Raises `ConfigError` with one sentence if the file isn't a valid baseline."""
    try:
        return read(Baseline, file)
    except ResultError as error:
        raise ConfigError(f"{error}; restore it from git") from None


def own_baseline(folder: Path, machine: Machine, key: str) -> Baseline | None:
    """The baseline of this machine's class and this workload, or None."""
    file = baseline_file(folder, machine)
    baseline = read_baseline(file) if file.is_file() else None
    return baseline if baseline and baseline.measured.key == key else None


def any_baseline(folder: Path, key: str) -> Baseline | None:
    """The first baseline of this workload from any machine, for numbers that differ between machines only by
    rounding.
    """
    of_key = (
        baseline for file in sorted(folder.glob("*.json")) if (baseline := read_baseline(file)).measured.key == key
    )
    return next(of_key, None)


def write_baseline(folder: Path, measured: GateMeasurements) -> Path:
    """Write the baseline of the measuring machine's class, and return its file."""
    file = baseline_file(folder, measured.provenance.machine)
    write(file, Baseline(measured=measured))
    return file
