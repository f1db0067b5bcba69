"""The meaning of YAML values in settings: unique keys, words for "off", and true and false that aren't numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic import BaseModel

from qerl.settings.errors import choices, options, parts

#: The words that mean "off"; YAML itself reads off, no and false as false.
OFF = ("off", "none", "false")


class DuplicateKey(ValueError):
    """A mapping of YAML that has a key twice."""


class UniqueKeys(yaml.SafeLoader):
    """A YAML loader that constructs no objects from tags and rejects duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The next mapping. A `DuplicateKey` names a key that it has twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise DuplicateKey(f"the key `{key.value}` is given twice, in lines {lines[name]} and {line}; keep one")
            lines[name] = line
        return node


def as_meant(settings: type[BaseModel], values: Any) -> Any:
    """The values for the fields of `settings`, with every word for "off" replaced by the field's value for it.

    Where a number is expected, true and false become values that aren't numbers: pydantic would take them for 1 and 0.
    """
    if not isinstance(values, Mapping):
        return values
    known = settings.model_fields
    return {key: _read(value, *_reading(settings, key)) if key in known else value for key, value in values.items()}


class _Truth:
    """True or false where a number is expected."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value).lower()


def _read(value: Any, off: str, is_number: bool) -> Any:
    if off and (value is False or value is None or (isinstance(value, str) and value.lower() in OFF)):
        return "off" if off == "off" else None
    return _without_truth(value) if is_number else value


@functools.cache
def _reading(settings: type[BaseModel], name: str) -> tuple[str, bool]:
    """A field's value for "off" (a word, "null" or none), and whether it accepts numbers but not true and false."""
    annotation = settings.model_fields[name].annotation
    known, within = options(annotation), list(parts(annotation))
    own_meaning = any(option in (bool, str, Path, Any) for option in known)
    off = "off" if "off" in choices(annotation) else "null" if NoneType in known and not own_meaning else ""
    return off, any(part in (int, float) for part in within) and not any(part in (bool, Any) for part in within)


def _without_truth(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_truth(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_truth(part) for part in value]
    return _Truth(value) if isinstance(value, bool) else value
