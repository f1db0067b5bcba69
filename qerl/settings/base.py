"""The base class of all settings: the meaning of YAML values, errors of one sentence, types of values, and reading."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

# The meaning of YAML values in settings: unique keys, decimal numbers, words for "off", true and false.

#: The words that mean "off"; YAML itself reads off, no and false as false.
OFF = ("off", "none", "false")
#: Whole numbers and others that mean what their digits say. Underscores divide thousands alone, as in no date.
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
_DECIMAL = re.compile(r"[-+]?(([0-9]+|[0-9]{1,3}(_[0-9]{3})+)?(\.[0-9]*)?(e[-+]?[0-9]+)?|\.inf|\.nan)", re.IGNORECASE)


class AmbiguousYaml(ValueError):
    """Valid YAML that doesn't mean what it seems to: a key twice, or a number of another value than its digits."""


class StrictLoader(yaml.SafeLoader):
    """A YAML loader that constructs no objects from tags and rejects duplicate keys and numbers that aren't decimal."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The next mapping. An `AmbiguousYaml` names a key that it has twice, with dots or nested.

        A key that is merged in (<<) may be overridden in either spelling.
        """
        node = super().compose_mapping_node(anchor)
        pairs, lines = [*_pairs(node)], dict[tuple[str, str], int]()
        dotted = any("." in key.value for key, _ in pairs)
        for key, value in pairs:
            line = key.start_mark.line + 1
            for name in {(key.tag, key.value), *(_leaves(key, value) if dotted else ())}:
                if name in lines:
                    raise AmbiguousYaml(
                        f"the key `{name[1]}` is given twice, in lines {lines[name]} and {line}; keep one"
                    )
                lines[name] = line
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number. An `AmbiguousYaml` names one that YAML 1.1 reads otherwise than by its digits: 0123 is 83."""
        whole, line = node.tag.endswith(":int"), node.start_mark.line + 1
        number: int | float = (self.construct_yaml_int if whole else self.construct_yaml_float)(node)
        if not (_WHOLE if whole else _DECIMAL).fullmatch(node.value):
            raise AmbiguousYaml(
                f"line {line}: YAML reads `{node.value}` as {number}; write the number in decimal digits, or text in "
                "quotes"
            )
        return number


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Keys that are text or numbers with their values, but for merged mappings (<<)."""
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            yield key, value


def _leaves(key: yaml.ScalarNode, value: yaml.Node) -> Iterator[tuple[str, str]]:
    """The dotted keys of all values below a key, each with its tag."""
    if not isinstance(value, yaml.MappingNode):
        yield key.tag, key.value
        return
    for inner, below in _pairs(value):
        for tag, name in _leaves(inner, below):
            yield tag, f"{key.value}.{name}"


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    StrictLoader.add_constructor(_tag, StrictLoader.construct_number)


# The sentences for invalid settings: the key as written, what pydantic says of it, and the nearest known key.

#: The similarity of words that differ by a letter.
_SLIP = 0.9
#: pydantic's terms, and YAML's.
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
    """The first problem of a validation error; `written` turns the dotted key into the user's."""
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
        # Another member of a union may have the very key.
        meant = [one for one in _elsewhere(name, above, owner, settings) if one != _dotted(key)] or meant
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


# What a value of YAML means for a field.


class _Truth:
    """True or false where a number is expected."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value).lower()


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


def parts(annotation: Any) -> Iterator[Any]:
    """All types within an annotation, including the types of items and of mappings' values."""
    for option in options(annotation):
        if get_origin(option) in (list, dict, tuple):
            for inner in get_args(option):
                yield from parts(inner)
        else:
            yield option


def _without_truth(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_truth(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_truth(part) for part in value]
    return _Truth(value) if isinstance(value, bool) else value


# The base class of all settings, errors of one sentence, and types of values.

S = TypeVar("S", bound=BaseModel)
T = TypeVar("T")

PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonEmpty = Annotated[list[T], Field(min_length=1)]
#: The number of allowed seeds: a step's 64-bit seed has the run's seed in its upper half.
SEEDS = 2**32
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]

#: Characters that Unicode counts as printable and that show nothing: fillers, joiners and variation selectors.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def visible(text: str) -> str:
    """The text with each invisible character, except for spaces and line ends, as its escape, such as `\\u200b`."""
    shown = (c if c in " \t\r\n" or (c.isprintable() and not _BLANK.match(c)) else ascii(c)[1:-1] for c in text)
    return "".join(shown)


class UserError(ValueError):
    """An error that the user can correct. Its message is one line, and a long one is shortened in the middle."""

    def __init__(self, message: str) -> None:
        line = " ".join(part for part in re.split(r"[ \t\r\n]+", visible(message)) if part)
        super().__init__(line if len(line) <= 2000 else f"{line[:1500]} ... {line[-450:]}")


class ConfigError(UserError):
    """A configuration that can't run. The message is one sentence for the user."""


class Part(BaseModel):
    """A part of a job or a result, which no configuration states: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# YAML reads `off` as false, so off, none and false all mean off; true and false are no numbers, and text that is a
# number is one (YAML reads 1e-5 as text). pydantic finds a mistake, and the sentence is ours, with the key as written.
class Settings(BaseModel):
    """Base class of all settings, which are immutable. An unknown key, NaN and infinity are errors.

    Where a setting can be off, `off`, `none` and `false` all mean off. True and false don't count as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        meant = dict(values)
        for key, value in values.items():
            if key not in cls.model_fields:
                continue
            off, is_number = _reading(cls, key)
            is_off = value is False or (isinstance(value, str) and value.lower() in OFF)
            if off == "empty":
                meant[key] = [] if is_off else value
            elif off and (is_off or value is None):
                meant[key] = "off" if off == "off" else None
            elif is_number:  # pydantic would take true and false for 1 and 0
                meant[key] = _without_truth(value)
        return meant


def _names_a_function(path: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", path) or ".py:" in path:
        raise ValueError(f"{path!r} is not an import path; write `module:function` (no .py)")
    return path


FunctionPath = Annotated[str, AfterValidator(_names_a_function)]


def can_name_a_file(path: Path) -> Path:
    """The path, in which `~` is the user's folder, as in a shell.

    Raises ValueError if no file system accepts it, since a look-up would raise errors of many kinds. Variables such as
    $HOME would become folders of that name, and the path depend on the shell of a later start.
    """
    text = str(path)
    if variable := re.search(r"\$\{?[A-Za-z_]\w*\}?", text):
        raise ValueError(f"{variable.group()} isn't replaced in a path, as a shell would do; write the path out")
    unwritable = "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)
    if unwritable or len(text) > 1024 or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError("this can't be a file's name: it is too long or contains an invalid character; shorten it")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{path.parts[0]} names no user of this machine; write the path out") from None


def not_empty(value: Any) -> Any:
    """The value. Raises ValueError for an empty text, which as a path would be the working directory."""
    if value == "":
        raise ValueError("this is empty; give a path, or . for the working directory")
    return value


FilePath = Annotated[Path, AfterValidator(can_name_a_file), BeforeValidator(not_empty)]


def _is_a_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}", name):
        raise ValueError(
            f"{name[:100]!r} names folders and files of results: use at most 100 letters, digits and . _ + -, "
            "and none of . + - first"
        )
    return name


#: A name in a configuration that becomes part of paths and commands.
Name = Annotated[str, AfterValidator(_is_a_name)]


def check_count(count: Any, key: str, least: int = 1, end: float = math.inf) -> None:
    """Raise `ConfigError` unless a function's argument is a whole number, of Python or numpy, from `least` below `end`.

    True and false are none.
    """
    try:
        taken = not isinstance(count, bool) and least <= operator.index(count) < end
    except TypeError:
        taken = False
    if not taken:
        wanted = f"above {least - 1}" if end == math.inf else f"from {least} to {end - 1}"
        raise ConfigError(f"`{key}` must be a whole number {wanted}, not {count!r}")


def check_unicode(text: str, what: str) -> None:
    """Raise `ConfigError` for a text with half of a surrogate pair, which no tokenizer or file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has half of a surrogate pair at character {error.start}, which is no character; correct the text"
        ) from None


#: A path as an argument of the library.
PathLike = str | Path


def path_argument(value: Any, what: str) -> Path:
    """The path that a function's argument `what` names. Raises `ConfigError` for a value that can't name a file."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{what} must be a path, not {value!r}")
    try:
        path = Path(not_empty(value))
        return path if os.path.lexists(path) else can_name_a_file(path)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None


def parse(
    settings: type[S], values: Mapping[str, Any], where: str, written: Callable[[str], str] = lambda key: key
) -> S:
    """Validate `values`, or raise a `ConfigError` of one sentence that names `where`, if any, and the offending key.

    `written` turns a dotted key of `settings` into the key that the user wrote.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError((f"{where}: " if where else "") + sentence(error, settings, written)) from None


# Configurations from YAML.


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
        raise ConfigError(f"{where}{line}: this is not valid YAML: {error.problem or error.context}") from None
    # Impossible dates, numbers with thousands of digits and invalid bytes raise ValueError, not YAMLError.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
