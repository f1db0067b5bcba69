"""Acceptance of the last measurements as the baseline."""

from __future__ import annotations

import subprocess
from pathlib import Path

from qerl.gates.baselines import write_baseline
from qerl.jobs import Plan, VerdictJob
from qerl.results.paths import MEASURED
from qerl.results.schema import GateMeasurements
from qerl.results.store import read
from qerl.settings.base import ConfigError


def accept(plan: Plan) -> Path:
    """Make the last measurements the baseline of their machine class, in a separate git commit."""
    settings = plan.config.gates
    if settings is None:
        raise ConfigError(f"configuration {plan.config.name} has no `gates`; use config/ci.yaml")
    file = VerdictJob.path(plan, file=MEASURED)
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist; run the gates first: make gate")
    measured = read(GateMeasurements, file)
    commit = measured.provenance.commit
    if measured.provenance.dirty or not commit:
        raise ConfigError("the measured code isn't committed, so no later run could be compared with it; commit first")
    _check_nothing_staged()
    written = write_baseline(settings.baselines, measured)
    _git("add", str(written))
    _git("commit", "--quiet", "--message", f"Baseline {written.stem}: {commit[:12]}")
    return written


def _check_nothing_staged() -> None:
    if subprocess.run(["git", "diff", "--cached", "--quiet"], check=False).returncode:
        raise ConfigError("other changes are staged, and a baseline moves in a commit of its own; commit them first")


def _git(*arguments: str) -> None:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ConfigError(f"git {arguments[0]} failed: {answer.stderr.strip()}")
