"""The table of the measurements that rows of the paper's Tables 3 and 5 to 9 and of Figures 1 and 11 lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.report.pages import NOT_RUN
from qerl.report.ratios import DIFFERENT_MACHINES
from qerl.report.tables import write_table
from qerl.results.names import decode_name, step_name
from qerl.results.printed import PROMPT, TOKENS

#: The rank of rows for which the paper states none.
RANK = 16
OF_ANOTHER = "of another machine than BF16's"
_CAPTION = (
    "Measurements that the paper's tables and figures lack here, and those that have no ratio to BF16's. "
    "`qerl grid config/shapes.yaml` lists the jobs that make these files"
)


def rollout_file(cell: Mapping[Any, Any], engine: str) -> str:
    """The name of the decode file that has a cell of `paper.beside`, without its ending."""
    rank = RANK if pd.isna(cell["rank"]) else int(cell["rank"])
    return decode_name(engine, size_of(cell), cell["weights"], rank, PROMPT, TOKENS)


def step_file(cell: Mapping[Any, Any], system: str, group: int) -> str:
    """The name of the file of steps that has a cell of `paper.beside`, without its ending.

    A batch is of prompts of `group` completions, or, with a group of one, of completions of one prompt.
    """
    batch, recompute = settings_of(cell)["bs"], settings_of(cell).get("gc", "on")
    work = f"1x{batch}" if group == 1 else f"{batch}x{group}"
    variant = "recompute" if recompute == "on" else "no-recompute"
    return step_name(system, size_of(cell), cell["weights"], RANK, f"{work}-{PROMPT}x{TOKENS}", variant)


def missing_rollouts(frame: pd.DataFrame, engine: str, sequences: int) -> list[dict[str, Any]]:
    """The decode files and numbers of sequences that rows of `paper.beside` lack, a batch of one being `sequences`."""
    rows = []
    for cell, why in _lacking(frame, "rollout_rate", "rollout_speedup"):
        count = sequences * int(settings_of(cell)["bs"])
        rows.append({"file": rollout_file(cell, engine), "why": why, "sequences": count, "of": cell["table"]})
    return rows


def missing_steps(frame: pd.DataFrame, system: str, group: int) -> list[dict[str, Any]]:
    """The files of steps that rows of `paper.beside` lack, in the reading of `step_file`."""
    rows = []
    for cell, why in _lacking(frame, "step_seconds", "step_speedup"):
        count = int(settings_of(cell)["bs"]) * group
        rows.append({"file": step_file(cell, system, group), "why": why, "sequences": count, "of": cell["table"]})
    return rows


def write_missing(rows: Iterable[dict[str, Any]], out: Path) -> None:
    """Write the table paper-missing with a row per file and reason, or none if nothing is missing."""
    frame = pd.DataFrame(rows)
    if frame.empty:
        return
    joined = frame.groupby(["file", "why"], sort=False).agg(
        sequences=("sequences", lambda counts: ", ".join(map(str, sorted(set(counts))))),
        of=("of", lambda names: ", ".join(sorted(set(names)))),
    )
    table = joined.reset_index().rename(columns={"of": "tables and figures"})
    write_table(table, out / "paper-missing", f"{_CAPTION}.", table)


def _lacking(frame: pd.DataFrame, measured: str, ratio: str) -> Iterator[tuple[dict[Any, Any], str]]:
    """The cells without a measurement, and those without a ratio to BF16's because it is of another machine."""
    for cell in frame.to_dict("records"):
        if cell["metric"] == measured and cell["status"].startswith(NOT_RUN):
            yield cell, NOT_RUN
        elif (cell["metric"], cell["status"]) == (ratio, DIFFERENT_MACHINES):
            yield cell, OF_ANOTHER


def size_of(cell: Mapping[Any, Any]) -> str:
    """The size of the model of a cell of `paper.beside`, such as 7B."""
    return str(cell["model"]).removeprefix("qwen2.5-").upper()


def settings_of(cell: Mapping[Any, Any]) -> dict[str, str]:
    """The settings of a cell, such as the batch size `bs`."""
    return dict(part.split("=") for part in cell["setting"].split("; ") if part)
