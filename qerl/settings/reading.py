"""Configurations from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from qerl.settings.base import ConfigError
from qerl.settings.yaml_values import DuplicateKey, UniqueKeys


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


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of a YAML text; tags can't construct objects. Raises `ConfigError`, which names `where`."""
    try:
        return UniqueKeys(text).get_single_data()
    except DuplicateKey as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; write it with fewer levels") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: this is not valid YAML: {error.problem or error.context}") from None
    # Impossible dates, numbers with thousands of digits and invalid bytes raise ValueError, not YAMLError.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
