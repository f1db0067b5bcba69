"""The plan of a call of Snakemake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from qerl.plan.make import plan_from
from qerl.plan.sheets import Plan
from qerl.provenance.files import check_clock
from qerl.settings.base import ConfigError
from qerl.settings.models import LocalModel
from qerl.settings.reading import read_yaml

Asked = TypeVar("Asked", bound=Callable[..., Any])


def with_signature(function: Asked) -> Asked:
    """The function with its signature. Snakemake asks for that at each call, which is a tenth of planning."""
    function.__signature__ = signature(function)  # type: ignore[attr-defined]
    return function


def one_of(names: Iterable[str]) -> str:
    """A regular expression for exactly these names; one that matches nothing if there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


def models_of(plan: Plan, kind: type) -> str:
    """A regular expression for the models of a plan that come from one kind of source."""
    return one_of(name for name, model in plan.config.models.items() if isinstance(model, kind))


def workflow_plan(given: Mapping[str, Any], files: Sequence[Path], root: Path) -> Plan:
    """The plan of what Snakemake was given: `--configfile` replaces the default, `--config` sets top-level keys.

    `given` has both, merged; `root` is the clone. The default is config/config.yaml of the working directory, as in
    .test, if there is one. Else it is the miniature's, and for `--config model=FOLDER` that of real models. Raises
    ValueError, which names the key or the file.
    """
    default = Path("config/config.yaml")
    if not default.is_file():
        default = root / "config" / ("own.yaml" if given.get("model") else "mini.yaml")
    for file in files:
        read_yaml(file)  # Snakemake takes the last one of two equal keys
    plan = plan_from(given, default, files)
    _check_paths(plan)
    check_clock([Path(plan.folder)])
    return plan


def _check_paths(plan: Plan) -> None:
    """Refuse paths of the user in which Snakemake would take a part in braces for a wildcard."""
    config = plan.config
    models = {f"models.{name}.path": m.path for name, m in config.models.items() if isinstance(m, LocalModel)}
    data = {f"datasets.{name}.origin": one.own_file for name, one in config.datasets.items()}
    followed = {
        f"experiments.{run.experiment}.thermostat.metrics": run.settings.thermostat.metrics
        for run in plan.runs.values()
        if run.settings.thermostat
    }
    given = {"model": config.model, "problems": config.problems}
    gates = config.gates
    of_gates = (
        {f"gates.{key}": getattr(gates, key) for key in ("file", "baselines", "vectors", "stored")} if gates else {}
    )
    for key, path in {**given, **models, **data, **followed, **of_gates}.items():
        if path is not None and "{" in str(path):
            raise ConfigError(
                f"`{key}`: Snakemake takes braces for a wildcard, and {path} has some; rename it, or give a link to it "
                "whose name has none"
            )
