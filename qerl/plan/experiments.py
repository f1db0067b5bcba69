"""The runs of an experiment: one for each arm and point of its grid."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qerl.plan.sheets import PlannedRun
from qerl.settings.base import ConfigError, parse
from qerl.settings.config import Experiment, merged, nested
from qerl.settings.run import RunSettings


def expand(name: str, experiment: Experiment, defaults: Mapping[str, Any]) -> Iterator[PlannedRun]:
    """One run for each arm and point of the grid. `defaults` are keys of the runs that the experiment may override."""
    labels = _short(list(experiment.grid))
    base = merged(defaults, experiment.base)
    same: dict[str, dict[str, RunSettings]] = {}
    for arm, changes in experiment.arms.items():
        of_arm = merged(base, changes)
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
            others = same.setdefault(repr(varied), {})
            # Arms that are only timed may be equal, which shows how far times repeat.
            if experiment.train and settings in others.values():
                twin = next(other for other, of_other in others.items() if of_other == settings)
                raise ConfigError(
                    f"experiments.{name}.arms.{arm} has the same settings as the arm {twin}, so their runs would be "
                    "the same; change one, or leave it out"
                )
            others[arm] = settings
            suffix = "".join(f"-{labels[key]}{plain(value)}" for key, value in varied.items())
            yield PlannedRun(f"{name}-{arm}{suffix}", name, arm, varied, settings)


def written_as(name: str, experiment: Experiment, arm: str, key: str) -> str:
    """The key in the configuration from which a dotted key of a run's settings comes."""
    above = f"experiments.{name}"
    if any(f"{key}.".startswith(f"{varied}.") for varied in experiment.grid):
        return f"{above}.grid.{key}"
    if experiment.arms[arm] and (not key or _holds(experiment.arms[arm], key)):
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
