"""The meaning of YAML values in settings: unique keys, decimal numbers, words for "off", true and false."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

import yaml
from pydantic import BaseModel

from qerl.settings.errors import choices, options, parts

#: The words that mean "off"; YAML itself reads off, no and false as false.
OFF = ("off", "none", "false")


#: A whole number of YAML 1.1 that starts with 0 and is octal.
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
#: Digits with underscores that don't divide thousands, as in a date or a version.
_NO_THOUSANDS = re.compile(r"(?![-+]?[0-9]{1,3}(_[0-9]{3})+(\.|$))[-+]?[0-9]+_[0-9_]*(\..*)?")


class AmbiguousYaml(ValueError):
    """Valid YAML that doesn't mean what it seems to: a key twice, or a number whose value isn't that of its digits."""


class StrictLoader(yaml.SafeLoader):
    """A YAML loader that constructs no objects from tags and rejects duplicate keys and numbers that aren't decimal."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The next mapping. An `AmbiguousYaml` names a key that it has twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise AmbiguousYaml(
                    f"the key `{key.value}` is given twice, in lines {lines[name]} and {line}; keep one"
                )
            lines[name] = line
        _check_spellings(node)
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number. An `AmbiguousYaml` names one that YAML 1.1 reads otherwise than by its digits: 0123 is 83."""
        is_whole = node.tag.endswith(":int")
        number: int | float = (self.construct_yaml_int if is_whole else self.construct_yaml_float)(node)
        text, line = node.value, node.start_mark.line + 1
        if ":" in text:
            how = "minutes and seconds"
        elif is_whole and _OCTAL.fullmatch(text):
            how = "an octal number"
        elif _NO_THOUSANDS.fullmatch(text):
            how = "a number with underscores"
        else:
            return number
        raise AmbiguousYaml(
            f"line {line}: YAML reads `{text}` as {how}, which is {number}; write the number in decimal "
            "digits, or text in quotes"
        )


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    StrictLoader.add_constructor(_tag, StrictLoader.construct_number)


def _check_spellings(node: yaml.MappingNode) -> None:
    """Raise `AmbiguousYaml` for two keys of a mapping, one with dots and one nested, that give the same setting.

    A key that is merged in (<<) may be overridden in either spelling.
    """
    pairs = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    if not any("." in key.value for key, _ in pairs):
        return
    given: dict[tuple[str, ...], tuple[bool, int]] = {}
    for key, value in pairs:
        line = key.start_mark.line + 1
        leaves = {(*key.value.split("."), *inner): off for inner, off in _leaves(value).items()}
        for path, off in leaves.items():
            for other, (other_off, other_line) in given.items():
                shared = min(len(path), len(other))
                # A part that is off has no settings. Other words may be names that begin alike: qwen2 and qwen2.5.
                ends_in_off = (off and len(path) == shared) or (other_off and len(other) == shared)
                if path[:shared] == other[:shared] and (len(path) == len(other) or ends_in_off):
                    raise AmbiguousYaml(
                        f"the key `{'.'.join(path[:shared])}` is given with dots and nested, in lines {other_line} and "
                        f"{line}; keep one"
                    )
        given.update({path: (off, line) for path, off in leaves.items()})


def _leaves(node: yaml.Node) -> dict[tuple[str, ...], bool]:
    """The paths of the values below a node of YAML, with whether each is a word for "off" or null."""
    if not isinstance(node, yaml.MappingNode):
        return {(): isinstance(node, yaml.ScalarNode) and (node.tag.endswith(":null") or node.value.lower() in OFF)}
    pairs = ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
    return {(*key.value.split("."), *inner): off for key, value in pairs for inner, off in _leaves(value).items()}


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
    is_off = value is False or (isinstance(value, str) and value.lower() in OFF)
    if off == "empty":
        return [] if is_off else value
    if off and (is_off or value is None):
        return "off" if off == "off" else None
    return _without_truth(value) if is_number else value


@functools.cache
def _reading(settings: type[BaseModel], name: str) -> tuple[str, bool]:
    """A field's value for "off" (a word, "null", "empty", none), and whether it is a number, not true and false."""
    field = settings.model_fields[name]
    annotation = field.annotation
    known, within = options(annotation), list(parts(annotation))
    own_meaning = any(option in (bool, str, Path, Any) for option in known)
    off = "off" if "off" in choices(annotation) else "null" if NoneType in known and not own_meaning else ""
    if any(get_origin(option) is list for option in known) and field.default == []:
        off = "empty"
    return off, any(part in (int, float) for part in within) and not any(part in (bool, Any) for part in within)


def _without_truth(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_truth(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_truth(part) for part in value]
    return _Truth(value) if isinstance(value, bool) else value
