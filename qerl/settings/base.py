"""The base class of all settings, errors of one sentence, and types of values."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from qerl.settings.errors import sentence, visible
from qerl.settings.yaml_values import as_meant

PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]


#: The number of allowed seeds: a step's 64-bit seed has the run's seed in its upper half.
SEEDS = 2**32


Seed = Annotated[int, Field(ge=0, lt=SEEDS)]


Fraction = Annotated[float, Field(ge=0, le=1)]


S = TypeVar("S", bound="Settings")


T = TypeVar("T")


NonEmpty = Annotated[list[T], Field(min_length=1)]


class UserError(ValueError):
    """An error that the user can correct. Its message is one line, and a long one is shortened in the middle."""

    def __init__(self, message: str) -> None:
        line = " ".join(part for part in re.split(r"[ \t\r\n]+", visible(message)) if part)
        super().__init__(line if len(line) <= 2000 else f"{line[:1500]} ... {line[-450:]}")


class ConfigError(UserError):
    """A configuration that can't run. The message is one sentence for the user."""


class Settings(BaseModel):
    """Base class of all settings, which are immutable. An unknown key, NaN and infinity are errors.

    Where a setting can be off, `off`, `none` and `false` all mean off. True and false don't count as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        return as_meant(cls, values)


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
