"""Every key of a configuration, from the models of `qerl.settings`: config/README.md for people, with type, default and
meaning, and a JSON schema for editors and the catalog of Snakemake's workflows.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qerl.settings.base import Settings, parts
from qerl.settings.models import LockedRepo
from qerl.settings.run import UNDECIDING, RunFile
from qerl.settings.workflow import Config


def sections() -> list[type[BaseModel]]:
    """The models of a configuration, of a run's file and of a lock file, each before those that it names."""
    found: dict[type[BaseModel], None] = {}

    def add(model: Any) -> None:
        if not isinstance(model, type) or not issubclass(model, Settings) or model in (*found, Settings):
            return
        found[model] = None
        for named in (
            *model.__bases__,
            *(part for field in model.model_fields.values() for part in parts(field.annotation)),
        ):
            add(named)

    for root in (Config, RunFile, LockedRepo):
        add(root)
    return list(found)


def _link(model: type) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})"


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        named = "none" if annotation is type(None) else annotation.__name__
        return _link(annotation) if issubclass(annotation, Settings) else named
    names = [_type_name(part) if not isinstance(part, str) else f"`{part}`" for part in get_args(annotation)]
    if origin in (list, dict, tuple):
        return f"{origin.__name__} of {', '.join(dict.fromkeys(names))}"
    return " or ".join(dict.fromkeys(names))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "by the keys before it"
    if isinstance(field.default, Settings):
        return "its defaults"
    return "none" if field.default is None else f"`{field.default}`"


def _section(settings: type[BaseModel]) -> str:
    inherited = [_link(parent) for parent in settings.__bases__ if parent is not Settings]
    about = [inspect.getdoc(settings) or "", *(f"It also has the keys of {parent}." for parent in inherited)]
    rows = [
        (f"`{name}`", _type_name(field.annotation), _default(field), " ".join((field.description or "").split()))
        for name, field in settings.model_fields.items()
        if name in inspect.get_annotations(settings)
    ]
    table = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
    return "\n\n".join([f"## {settings.__name__}", *about, "\n".join(f"| {' | '.join(row)} |" for row in table)])


def _dotted(keys: Any) -> list[str]:
    """Dotted keys of a mapping of keys to sets of keys, to mappings of the same kind, or to True."""
    if not isinstance(keys, dict):
        return sorted(keys)
    inner = {key: [""] if value is True else [f".{rest}" for rest in _dotted(value)] for key, value in keys.items()}
    return [f"{key}{rest}" for key, rests in inner.items() for rest in rests]


def markdown() -> str:
    """The whole page."""
    undeciding = (
        "These keys of a run decide no result, so changing them reruns nothing: "
        f"{', '.join(f'`{key}`' for key in _dotted(UNDECIDING))}. The same holds for those of an evaluation's engine."
    )
    return "\n\n".join(["# Configuration", undeciding, *map(_section, sections())]) + "\n"


def schema() -> str:
    """The JSON schema of a configuration file, as YAML. It leaves the keys of runs to the workflow's own checks."""
    made = Config.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["required"] = ["name"]  # `shapes` need no other key, and a protocol may give them
    made["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = {"type": ["object", "null"]}
    return f"# Made by `qerl keys --schema`.\n{yaml.safe_dump(made, sort_keys=False, width=118)}"
