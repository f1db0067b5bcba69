"""The runs of an experiment: one for each arm and point of its grid."""

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

#: The deepest allowed nesting of settings; deeper values contain themselves through an alias.
_DEEPEST = 20


def nested(dotted: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge {"adapter.rank": 8, "adapter": {"alpha": 16}} to {"adapter": {"rank": 8, "alpha": 16}}, recursively."""
    if depth > _DEEPEST:
        raise ConfigError(f"keys of a run are nested over {_DEEPEST} deep; see whether an alias (*) contains itself")
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is not a key of a run; write it as text")
        branch = nested(value, depth + 1) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = merged(tree, branch)
    return tree


def expand(name: str, experiment: Experiment, defaults: Mapping[str, Any]) -> Iterator[PlannedRun]:
    """One run for each arm and point of the grid. `defaults` are keys of the runs that the experiment may override."""
    labels = _short(list(experiment.grid))
    base = merged(defaults, nested(experiment.base))
    for arm, changes in experiment.arms.items():
        of_arm = merged(base, nested(changes))
        written = functools.partial(written_as, name, experiment, arm)
        points: list[dict[str, Any]] = []
        for values in itertools.product(*experiment.grid.values()):
            given = dict(zip(experiment.grid, values, strict=True))
            settings = parse(RunSettings, merged(of_arm, nested(given)), "", written)
            varied = {key: _as_taken(value, key, settings) for key, value in given.items()}
            if varied in points:
                twice = ", ".join(f"{key}={value}" for key, value in varied.items())
                raise ConfigError(f"experiments.{name}.grid has {twice} twice; keep one of the equal values")
            points.append(varied)
            suffix = "".join(f"-{labels[key]}{plain(value)}" for key, value in varied.items())
            yield PlannedRun(f"{name}-{arm}{suffix}", name, arm, varied, settings)


def written_as(name: str, experiment: Experiment, arm: str, key: str) -> str:
    """The key in the configuration from which a dotted key of a run's settings comes."""
    above = f"experiments.{name}"
    if any(f"{key}.".startswith(f"{varied}.") for varied in experiment.grid):
        return f"{above}.grid.{key}"
    if experiment.arms[arm] and (not key or _holds(nested(experiment.arms[arm]), key)):
        return f"{above}.arms.{arm}.{key}".removesuffix(".")
    return f"{above}.base.{key}".removesuffix(".")


def _holds(tree: Any, key: str) -> bool:
    """Whether a value exists at a dotted key, whose list indices (`[0]`) are ignored."""
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _as_taken(value: Any, key: str, settings: Any) -> Any:
    """A value of a grid. Synonyms of "off", and numbers that YAML reads as text (1e-5), become the settings' value."""
    for part in key.split("."):
        settings = getattr(settings, part)
    if isinstance(value, Mapping):
        return {inner: _as_taken(of_inner, inner, settings) for inner, of_inner in value.items()}
    as_text = isinstance(value, str) and isinstance(settings, (int, float))
    return settings if settings in ("off", None) or as_text else value


def _short(keys: list[str]) -> dict[str, str]:
    """The last part of each dotted key if it is unique, else the whole key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: part if list(last.values()).count(part) == 1 else key for key, part in last.items()}


def plain(value: Any) -> str:
    """A value as text for paths and commands."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))
