"""Result files: each is a model that is written completely or not at all, and read with errors that name the file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from qerl.host.provenance import write_bytes, write_json, write_text
from qerl.results.schema import Stored
from qerl.settings.base import UserError, sentence

T = TypeVar("T", bound=Stored)


class ResultError(UserError):
    """A result file that is missing or doesn't match its schema. The message is one sentence for the user."""


def write(path: Path, result: Stored) -> None:
    """Write a result completely or not at all."""
    write_json(path, result.content())


def line(row: Stored) -> str:
    """A row as a line of JSON."""
    return json.dumps(row.content()) + "\n"


def write_rows(path: Path, rows: Iterable[Stored]) -> None:
    """Write JSON lines, compressed if the name ends in .gz.

    The whole file is rewritten, so that a killed job leaves no partial or repeated row.
    """
    text = "".join(map(line, rows))
    if path.suffix == ".gz":
        write_bytes(path, gzip.compress(text.encode(), mtime=0))
    else:
        write_text(path, text)


def read(schema: type[T], path: Path) -> T:
    """A result file as its model. Raises ResultError if it is missing or doesn't match."""
    try:
        return schema.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{path} doesn't exist; run the workflow to make it") from None
    except ValidationError as error:
        raise ResultError(f"{path} is not a {schema.__name__}: {sentence(error, schema)}") from None


def read_rows(schema: type[T], path: Path) -> Iterator[T]:
    """The rows of a file of JSON lines, which may be compressed, as their model."""
    if not path.exists():
        raise ResultError(f"{path} doesn't exist; run the workflow to make it")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield schema.model_validate_json(line)
            except ValidationError as error:
                raise ResultError(f"{path}, line {number}: {sentence(error, schema)}") from None
