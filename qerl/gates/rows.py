"""The gates as data: rows of a tab-separated file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

from pydantic import Field

from qerl.results.schema.gates import Check
from qerl.settings.base import ConfigError, Settings, parse

COLUMNS = ("gate", "metric", "check", "limit", "why")


class Gate(Settings):
    """One gate; the meaning and unit of `limit` depend on `check` (`qerl.gates.judge`)."""

    gate: Annotated[str, Field(min_length=1)]
    metric: Annotated[str, Field(min_length=1)]
    check: Check
    limit: float
    why: Annotated[str, Field(min_length=1)]


def read_gates(file: Path) -> list[Gate]:
    """The rows of a file of gates. A `ConfigError` names an invalid line."""
    if not file.is_file():
        raise ConfigError(f"file of gates {file} doesn't exist")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", strict=True)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ConfigError(f"{file} must begin with the columns {', '.join(COLUMNS)}, separated by tabs")
        gates = [_gate(row, f"{file}, line {rows.line_num}") for row in rows]
    names = [gate.gate for gate in gates]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{file} has two gates called {twice[0]!r}; rename one")
    return gates


def _gate(row: dict[str, str], where: str) -> Gate:
    if None in row or None in row.values():
        raise ConfigError(f"{where}: a row has {len(COLUMNS)} columns, separated by tabs")
    return parse(Gate, row, where)
