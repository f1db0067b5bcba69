"""The paper's printed numbers (the files in `paper`), and its tables and figures for which a configuration has results.

A row of a table's file is a cell. Model, weights, method, noise, rank, setting (such as `bs=8; gc=on`) and metric
identify it. `printed` is empty where the paper prints nothing and ours is shown alone: seconds of steps, and GSM8K by
each reading. Ratios of throughputs that the paper doesn't print are their quotients, as `note` says. An empty column
isn't stated in the paper or doesn't apply. `inconsistent` says how the paper contradicts the number. This module
imports neither torch nor pandas, because the plan imports it.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "paper"
#: The file of points read off the paper's plots.
CURVES = "curves.csv"
#: The names that the paper's models have in a configuration.
MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
#: Tokens of prompts and of completions in the paper's tables of speed.
PROMPT, TOKENS = 256, 2048


@dataclass(frozen=True)
class Asked:
    """The properties of the results that are compared with a printed number. Empty or None matches any value."""

    model: str = ""
    weights: str = ""
    method: str = ""
    noise: str = ""
    """The noise schedule, or `off`."""
    rank: int | None = None
    setting: dict[str, str] = field(default_factory=dict)
    """data: training set; lr: learning rate; sigma: sigma_start of the noise; bs: batch size; gc: gradient
    checkpointing, on or off.
    """


@dataclass(frozen=True, kw_only=True)
class Cell(Asked):
    """A cell of a table, with its printed number."""

    table: str
    metric: str
    printed: str
    unit: str = ""
    inconsistent: str = ""
    note: str = ""

    @property
    def kind(self) -> str:
        """The kind of its result: rollout, step, run, size, or the data set of an evaluation."""
        if "." in self.metric or self.metric == "batch":
            return "run"
        name = self.metric.partition("/")[0]
        return name.partition("_")[0] if name.startswith(("rollout_", "step_")) else name


@dataclass(frozen=True, kw_only=True)
class Series(Asked):
    """A curve of a panel of a figure, by step."""

    figure: str
    panel: str
    metric: str
    label: str


#: Title of each table; its numbers are in <name>.csv.
TABLES = {
    "table1": "GSM8K after GRPO, beside the paper's Table 1",
    "table2": "MATH500, AIME and AMC after DAPO on BigMath, beside the paper's Table 2",
    "table3": "Size and speed-up of a GRPO step over BF16 LoRA, beside the paper's Table 3",
    "table4": "Hyper-parameters, beside the paper's Table 4",
    "table5": "Rollout and step with and without gradient checkpointing (GC), Qwen2.5-3B, beside the paper's Table 5",
    "table6": "Rollout and step with and without gradient checkpointing (GC), Qwen2.5-7B, beside the paper's Table 6",
    "table7": "Rollout and step with and without gradient checkpointing (GC), Qwen2.5-14B, beside the paper's Table 7",
    "table8": "Rollout and step with and without gradient checkpointing (GC), Qwen2.5-32B, beside the paper's Table 8",
    "table9": "Rollout throughput by LoRA rank, beside the paper's Table 9",
}

#: Bar charts and the files of their numbers; the first file decides which models are shown.
BARS = {"figure1": ("figure1",), "figure11": ("figure11", "table9")}
#: The figure of the noise schedules, which needs no result.
SCHEDULES = "figure15"
DECAYS = ("linear", "exponential", "cosine", "logarithmic")


def read_cells(file: Path) -> list[Cell]:
    """The printed numbers of one file."""
    return [Cell(**row) for row in _rows(file)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            setting = dict(part.strip().split("=") for part in row["setting"].split(";") if part)
            yield {**row, "rank": int(row["rank"]) if row["rank"] else None, "setting": setting}


#: The curves of each figure, in the order of panels.
CURVE_FIGURES = {
    figure: [Series(**row) for row in rows]
    for figure, rows in groupby(_rows(FOLDER / "series.csv"), key=itemgetter("figure"))
}
#: All tables and figures that are compared with the paper's, and their category in the report.
NAMES = {*TABLES, *BARS, *CURVE_FIGURES, SCHEDULES}
CATEGORY = "4 Paper beside ours"


def tables_fed(covered: Collection[tuple[str, str]]) -> list[str]:
    """The paper's tables with a result for some number. `covered` has (`Cell.kind`, model) of the results."""
    return [name for name in TABLES if _feeds(name, covered)]


def figures_fed(covered: Collection[tuple[str, str]]) -> list[str]:
    """The paper's figures with a result. The kind of a curve is `data=` and the training set."""
    bars = [name for name, files in BARS.items() if any(_feeds(file, covered) for file in files)]
    curves = [
        name
        for name, series in CURVE_FIGURES.items()
        if any((f"data={one.setting['data']}", one.model) in covered for one in series)
    ]
    schedules = [SCHEDULES] if curves else []
    return sorted([*bars, *curves, *schedules], key=lambda name: int(name.removeprefix("figure")))


def _feeds(file: str, covered: Collection[tuple[str, str]]) -> bool:
    cells = read_cells(FOLDER / f"{file}.csv")
    return any((cell.kind, model) in covered for cell in cells for model in ([cell.model] if cell.model else MODELS))
