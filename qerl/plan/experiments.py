"""The runs of an experiment: its arms times its grid."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qerl.plan.sheets import PlannedRun
from qerl.settings.base import ConfigError, parse
from qerl.settings.config import Experiment, merged
from qerl.settings.run import RunSettings

#: No settings are nested as deeply as this.
_DEEPEST = 20


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


def expand(name: str, experiment: Experiment) -> Iterator[PlannedRun]:
    """One run for each arm and point of the grid."""
    labels = _short(list(experiment.grid))
    base = nested(experiment.base)
    for arm, changes in experiment.arms.items():
        of_arm = merged(base, nested(changes))
        written = functools.partial(written_as, name, experiment, arm)
        for values in itertools.product(*experiment.grid.values()):
            given = dict(zip(experiment.grid, values, strict=True))
            settings = parse(RunSettings, merged(of_arm, nested(given)), "", written)
            varied = {key: _as_taken(value, key, settings) for key, value in given.items()}
            suffix = "".join(f"-{labels[key]}{plain(value)}" for key, value in varied.items())
            yield PlannedRun(f"{name}-{arm}{suffix}", name, arm, varied, settings)


def written_as(name: str, experiment: Experiment, arm: str, key: str) -> str:
    """The key of a configuration that a dotted key of a run's settings comes from."""
    above = f"experiments.{name}"
    if any(f"{key}.".startswith(f"{varied}.") for varied in experiment.grid):
        return f"{above}.grid.{key}"
    if experiment.arms[arm] and (not key or _holds(nested(experiment.arms[arm]), key)):
        return f"{above}.arms.{arm}.{key}".removesuffix(".")
    return f"{above}.base.{key}".removesuffix(".")


def _holds(tree: Any, key: str) -> bool:
    """Whether there is a value at a dotted key, without places in lists (`[0]`)."""
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _as_taken(value: Any, key: str, settings: Any) -> Any:
    """A value of a grid, with every word for "off" replaced by the settings' own."""
    for part in key.split("."):
        settings = getattr(settings, part)
    if isinstance(value, Mapping):
        return {inner: _as_taken(of_inner, inner, settings) for inner, of_inner in value.items()}
    return settings if settings in ("off", None) else value


def _short(keys: list[str]) -> dict[str, str]:
    """The last part of each dotted key if it is unique, else the whole key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: part if list(last.values()).count(part) == 1 else key for key, part in last.items()}


def plain(value: Any) -> str:
    """A value as a part of paths and commands."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))
