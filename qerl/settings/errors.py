"""Error sentences for invalid settings: the key as written, what pydantic says of it, and the nearest known key."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError

#: The similarity of words that differ by a letter.
_SLIP = 0.9
#: pydantic's terms, and those of YAML.
_TERMS = {
    r"^\w+ should ": "must ",
    r"^Input is not a valid path.*": "must be a path",
    r"a valid dictionary.*|an object.*": "a mapping",
    r"a valid integer": "a whole number",
    r"\bvalid ": "",
}


@functools.cache
def _other_names() -> dict[str, list[str]]:
    """The names of other libraries, by the keys of this project that have their meaning."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text()))


def options(annotation: Any) -> list[Any]:
    """The types that a field accepts: the members of a union, without limits."""
    if get_origin(annotation) is Annotated:
        return options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [option for member in get_args(annotation) for option in options(member)]
    return [annotation]


def choices(annotation: Any) -> list[str]:
    """The words that a field accepts."""
    return [str(word) for option in options(annotation) if get_origin(option) is Literal for word in get_args(option)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [option for option in options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]


def _keys(settings: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted keys of all nested settings, except within lists and mappings."""
    for name, field in settings.model_fields.items():
        yield above + name
        for model in _models(field.annotation):
            yield from _keys(model, f"{above}{name}.")


def nearest(word: object, known: Iterable[str]) -> str:
    """The text "; did you mean `x`?" if a known word resembles the given one, else an empty text."""
    lower = {one.lower(): one for one in known}
    similar = difflib.get_close_matches(word.lower(), lower, 1) if isinstance(word, str) else []
    return f"; did you mean `{lower[similar[0]]}`?" if similar else ""


def sentence(error: ValidationError, settings: type[BaseModel], written: Callable[[str], str] = lambda key: key) -> str:
    """The first problem of a validation error; `written` turns the dotted key into that of the user."""
    errors = error.errors(include_url=False)
    # A misspelt key also causes an error about a missing one, so the unknown key comes first.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    place, annotation, owner = _place(settings, first["loc"])
    dotted = written(_dotted(place))
    key = f"`{dotted}`" if dotted else "it"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"unknown key {key}{_meant(place, owner, settings, written)}"
    if kind in ("value_error", "assertion_error", "json_invalid"):
        return f"{key}: {context['error']}" if dotted else str(context["error"])
    if kind == "missing":
        field = owner.model_fields.get(place[-1]) if owner else None
        meaning = " ".join(field.description.split()) if field and field.description else ""
        return f"{key} is missing" + f" ({meaning.partition('. ')[0].rstrip('.')})" * bool(meaning)
    if kind.startswith("union_tag"):
        name, value = context["discriminator"].strip("'"), context.get("tag")
        tags = [tag for model in _models(annotation) for tag in choices(model.model_fields[name].annotation)]
        wrong = "is missing" if value is None else f"must not be {_shown(value)}"
        return f"`{dotted}.{name}` {wrong}; give one of {', '.join(tags)}{nearest(value, tags)}"
    # Each member of a union refuses the value by an error of its own.
    of_value = [e for e in errors if e is first or _place(settings, e["loc"])[0] == place]
    words = re.findall("'([^']*)'", " ".join(e.get("ctx", {}).get("expected", "") for e in of_value))
    said = " or ".join(dict.fromkeys(map(_in_words, of_value))).replace(" or must be ", " or ")
    if first["loc"][-1:] == ("[key]",):
        key = f"a key of `{written(_dotted(place[:-1]))}`"
    hint = nearest(value, words)
    if kind == "path_type" and isinstance(value, (int, float)):
        hint = "; a name that reads as a number needs its folder, as in ./NAME"
    elif kind == "string_type" and not isinstance(value, (Mapping, list, tuple)):
        hint = "; put it in quotes"  # YAML reads off, no and 2024 as other types
    elif len(models := _models(annotation)) == 1:
        said = f"must be a mapping of the keys {', '.join(models[0].model_fields)}"
    return f"{key} {said}, not {_shown(value)}{hint}"


def _in_words(error: Any) -> str:
    """What a value must be, without what pydantic says of the value itself."""
    said = error["msg"] if error["type"] == "literal_error" else re.sub(", .*| after validation.*", "", error["msg"])
    for term, of_yaml in _TERMS.items():
        said = re.sub(term, of_yaml, said)
    return said if said.startswith("must ") else f"is invalid: {said[0].lower()}{said[1:]}"


def _place(settings: type[BaseModel], location: Sequence[Any]) -> tuple[list[Any], Any, type[BaseModel] | None]:
    """The key of a location, which also names members of unions; the type of its value; the model that has the key."""
    key: list[Any] = []
    annotation: Any = settings
    owner: type[BaseModel] | None = None
    for part in location:
        models = _models(annotation)
        containers = [o for o in options(annotation) if get_origin(o) in (list, tuple, dict)]
        if len(models) > 1:
            tags = {model: [choices(field.annotation) for field in model.model_fields.values()] for model in models}
            annotation = next((model for model in models if [part] in tags[model]), None)
            continue
        if models:
            owner = models[0]
            annotation = owner.model_fields[part].annotation if part in owner.model_fields else None
        elif containers and (isinstance(part, int) or get_origin(containers[0]) is dict):
            annotation, owner = get_args(containers[0])[-1], None
        elif classes := [o for o in options(annotation) if is_dataclass(o)]:
            annotation, owner = get_type_hints(classes[0]).get(part), None
        else:
            break
        key.append(str(part) if models else part)
    return key, annotation, owner


def _dotted(key: Sequence[Any]) -> str:
    """A key as users write it: `evaluation.tasks[0].dataset`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _meant(
    key: list[Any], owner: type[BaseModel] | None, settings: type[BaseModel], written: Callable[..., str]
) -> str:
    """A hint for an unknown key: one beside it that differs by a letter, of its name elsewhere, or similar to it."""
    name, above, known = str(key[-1]), _dotted(key[:-1]), list(owner.model_fields) if owner else []
    if "." in name and _dotted(key) in _keys(settings):
        return f"; a key with dots is written so: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
    meant = [f"{above}.{one}".removeprefix(".") for one in difflib.get_close_matches(name, known, 1)]
    if not difflib.get_close_matches(name, known, 1, cutoff=_SLIP):
        meant = _elsewhere(name, above, owner, settings) or meant
    if meant:
        return f"; did you mean {' or '.join(f'`{written(one)}`' for one in meant)}?"
    return f"; the keys here are {', '.join(known[:20])} (config/README.md has every key)" if known else ""


def _elsewhere(name: str, above: str, owner: type[BaseModel] | None, settings: type[BaseModel]) -> list[str]:
    """The keys of a name, or of that of another library: those below `above` first, then those of fewer levels."""
    inner = [f"{above}.{key}".removeprefix(".") for key in _keys(owner)] if owner else []
    meant = [f".{key}" for key, names in _other_names().items() if name in names]
    for known in (inner, list(_keys(settings))):
        if same := [key for key in known if key.rpartition(".")[2] == name]:
            return sorted(same, key=lambda key: key.count("."))
        # A command's or an evaluation's settings are a part of a run's: `sampling.max_tokens`.
        if other := [key for key in known if any(m.endswith(f".{key.removeprefix(f'{above}.')}") for m in meant)]:
            return other[:1]
    return []


def _shown(value: Any) -> str:
    """A value in YAML, shortened."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"
