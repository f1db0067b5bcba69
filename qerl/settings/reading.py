"""Configurations from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl.settings.base import ConfigError
from qerl.settings.errors import visible
from qerl.settings.yaml_values import AmbiguousYaml, StrictLoader


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    if not path.exists():
        raise ConfigError(f"configuration file {path} doesn't exist")
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give a configuration in YAML")
    values = parse_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a configuration; it must have keys with values")
    return values


def check_kind(values: Mapping[str, Any], where: str, of_run: bool) -> None:
    """Raise `ConfigError` for the file of one run where a configuration is needed, and the other way around."""
    if of_run and "experiments" in values:
        raise ConfigError(
            f"{where} is a configuration of the workflow, with experiments; show it by `qerl plan`, start it by "
            "`snakemake --configfile`, and give `qerl train` a file with model, dataset and out (RunFile in "
            "config/README.md)"
        )
    if not of_run and "experiments" not in values and {"dataset", "out"} & values.keys():
        raise ConfigError(
            f"{where} is the file of one run, which `qerl train` takes; a configuration of the workflow has models, "
            "datasets and experiments (config/README.md)"
        )


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of a YAML text; tags can't construct objects. Raises `ConfigError`, which names `where`."""
    try:
        return StrictLoader(text).get_single_data()
    except AmbiguousYaml as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; write it with fewer levels") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = f"{error.problem or error.context}{_hidden(text, error)}"
        raise ConfigError(f"{where}{line}: this is not valid YAML: {problem}") from None
    # Impossible dates, numbers with thousands of digits and invalid bytes raise ValueError, not YAMLError.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def _hidden(text: str | bytes, error: yaml.MarkedYAMLError) -> str:
    """The invisible characters in the lines of an error, as the end of its sentence."""
    marks = [mark.line for mark in (error.context_mark, error.problem_mark) if mark]
    if not marks:
        return ""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    wrong = "".join(whole.split("\n")[min(marks) : max(marks) + 1])
    escapes = [visible(character) for character in dict.fromkeys(wrong) if visible(character) != character]
    return f"; there are invisible characters here: {' '.join(escapes)}" if escapes else ""
