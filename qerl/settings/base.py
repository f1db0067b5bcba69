"""The base class of all settings: the meaning of YAML values, errors of one sentence, types of values, and reading."""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qerl.settings.errors import choices, options, sentence

# The meaning of YAML values in settings: unique keys, decimal numbers, words for "off", true and false.

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
    earlier: dict[tuple[str, ...], tuple[bool, int]] = {}
    for key, value in pairs:
        line = key.start_mark.line + 1
        leaves = {(*key.value.split("."), *inner): off for inner, off in _leaves(value).items()}
        for path, off in leaves.items():
            for other, (other_off, other_line) in earlier.items():
                shared = min(len(path), len(other))
                # A part that is off has no settings. Other words may be names that begin alike: qwen2 and qwen2.5.
                ends_in_off = (off and len(path) == shared) or (other_off and len(other) == shared)
                if path[:shared] == other[:shared] and (len(path) == len(other) or ends_in_off):
                    raise AmbiguousYaml(
                        f"the key `{'.'.join(path[:shared])}` is given with dots and nested, in lines {other_line} and "
                        f"{line}; keep one"
                    )
        earlier.update({path: (off, line) for path, off in leaves.items()})


def _leaves(node: yaml.Node) -> dict[tuple[str, ...], bool]:
    """The paths of the values below a node of YAML, with whether each is a word for "off" or null."""
    if not isinstance(node, yaml.MappingNode):
        return {(): isinstance(node, yaml.ScalarNode) and (node.tag.endswith(":null") or node.value.lower() in OFF)}
    pairs = ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
    return {(*key.value.split("."), *inner): off for key, value in pairs for inner, off in _leaves(value).items()}


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
    """All types within an annotation, including those of items and of mappings' values."""
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


def check_seed(seed: Any) -> None:
    """Raise `ConfigError` unless every consumer of seeds accepts `seed`."""
    if not _is_whole(seed) or not 0 <= seed < SEEDS:
        raise ConfigError(f"`seed` must be a whole number from 0 to {SEEDS - 1}, not {seed!r}")


def check_count(count: Any, key: str) -> None:
    """Raise `ConfigError` unless the argument `key` of a function is a whole number above 0."""
    if not _is_whole(count) or count < 1:
        raise ConfigError(f"`{key}` must be a whole number above 0, not {count!r}")


def check_unicode(text: str, what: str) -> None:
    """Raise `ConfigError` for a text with half of a surrogate pair, which no tokenizer or file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has half of a surrogate pair at character {error.start}, which is no character; correct the text"
        ) from None


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number of Python or numpy. True and false are none."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


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
    readable = text.decode(errors="replace") if isinstance(text, bytes) else text
    wrong = "".join(readable.split("\n")[min(marks) : max(marks) + 1])
    escapes = [visible(character) for character in dict.fromkeys(wrong) if visible(character) != character]
    return f"; there are invisible characters here: {' '.join(escapes)}" if escapes else ""
