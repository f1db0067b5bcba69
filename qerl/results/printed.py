"""The paper's printed numbers (the files in `paper`), and its tables and figures for which a configuration has results.

A row of a table's file is one printed number. Model, weights, method, noise, rank, setting (such as `bs=8; gc=on`) and
metric identify it. An empty column isn't stated in the paper or doesn't apply. `inconsistent` says how the paper
contradicts the number. This module imports neither torch nor pandas, because the plan imports it.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "paper"
#: The file of points read off the paper's plots, which isn't in `TABLES`.
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
    """One printed number."""

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


@dataclass(frozen=True)
class Series:
    """A curve of a figure."""

    label: str
    asked: Asked


@dataclass(frozen=True)
class Panel:
    """Curves of one metric, by step."""

    title: str
    metric: str
    series: Sequence[Series]


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


def _arms(model: str, data: str, *names: str) -> list[Series]:
    arms = {
        "BF16 Full": Asked(model, "bf16", "full", "off", None, {"data": data}),
        "BF16 LoRA": Asked(model, "bf16", "lora", "off", 32, {"data": data}),
        "NF4 LoRA": Asked(model, "nf4", "lora", "off", 32, {"data": data}),
        "MXFP4 LoRA": Asked(model, "mxfp4", "lora", "off", 32, {"data": data}),
        "NVFP4 LoRA": Asked(model, "nvfp4", "lora", "off", 32, {"data": data}),
        "NVFP4 LoRA + AQN": Asked(model, "nvfp4", "lora", "exponential", 32, {"data": data}),
    }
    return [Series(name, arms[name]) for name in names]


def _rates(weights: str, noise: str) -> list[Series]:
    asked = {rate: {"data": "gsm8k", "lr": rate} for rate in ("3e-05", "5e-06")}
    return [Series(f"rate {rate}", Asked(MODELS[1], weights, "lora", noise, 32, s)) for rate, s in asked.items()]


_FORMATS = ("NVFP4 LoRA", "MXFP4 LoRA", "NF4 LoRA", "BF16 LoRA")
_QERL = "NVFP4 LoRA + AQN"
_REWARD, _ENTROPY = "reward/correct", "entropy"
_3B, _7B, _14B, _32B = MODELS

#: Figures of curves by step.
CURVE_FIGURES: dict[str, Sequence[Panel]] = {
    "figure4": [
        Panel("7B, GSM8K, GRPO", _REWARD, _arms(_7B, "gsm8k", *_FORMATS, "BF16 Full")),
        Panel("7B, BigMath, DAPO", _REWARD, _arms(_7B, "bigmath-3-5", *_FORMATS, "BF16 Full")),
    ],
    "figure5": [Panel("7B, GSM8K", _ENTROPY, _arms(_7B, "gsm8k", *_FORMATS))],
    "figure7": [
        Panel(f"{size}, BigMath", _REWARD, _arms(model, "bigmath-3-5", "BF16 Full", _QERL, "BF16 LoRA"))
        for size, model in (("7B", _7B), ("14B", _14B))
    ],
    "figure8": [
        Panel("3B, GSM8K", _REWARD, _arms(_3B, "gsm8k", _QERL, "NVFP4 LoRA")),
        Panel("7B, BigMath", _REWARD, _arms(_7B, "bigmath-3-5", _QERL, "NVFP4 LoRA")),
    ],
    "figure9": [
        Panel(
            "3B, GSM8K, noise schedules",
            _REWARD,
            [
                Series(name, Asked(_3B, "nvfp4", "lora", name, 32, {"data": "gsm8k", "sigma": "0.05"}))
                for name in DECAYS
            ],
        )
    ],
    "figure10": [
        Panel(
            "3B, GSM8K, LoRA ranks",
            _REWARD,
            [
                Series(f"rank {rank}", Asked(_3B, "nvfp4", "lora", "exponential", rank, {"data": "gsm8k"}))
                for rank in (16, 32, 64, 128)
            ],
        )
    ],
    "figure12": [Panel("7B, BigMath 3 to 5", _REWARD, _arms(_7B, "bigmath-3-5", _QERL, "BF16 LoRA"))],
    "figure13": [Panel("32B, BigMath 4 to 5", _REWARD, _arms(_32B, "bigmath-4-5", _QERL, "BF16 LoRA"))],
    "figure14": [Panel("14B, BigMath 3 to 5", _ENTROPY, _arms(_14B, "bigmath-3-5", _QERL, "BF16 LoRA"))],
    "figure16": [Panel("7B, GSM8K, QeRL's learning rates", _REWARD, _rates("nvfp4", "exponential"))],
    "figure17": [Panel("7B, GSM8K, LoRA's learning rates", _REWARD, _rates("bf16", "off"))],
}

#: All tables and figures that are compared with the paper's, and their category in the report.
NAMES = {*TABLES, *BARS, *CURVE_FIGURES, SCHEDULES}
CATEGORY = "4 Paper beside ours"


def read_cells(file: Path) -> list[Cell]:
    """The printed numbers of one file."""
    with file.open(newline="", encoding="utf-8") as rows:
        return [_cell(row) for row in csv.DictReader(rows)]


def _cell(row: dict[str, str]) -> Cell:
    pairs = (part.strip().partition("=") for part in row.pop("setting").split(";") if part)
    rank = row.pop("rank")
    return Cell(**row, rank=int(rank) if rank else None, setting={key: value for key, _, value in pairs})  # type: ignore[arg-type]


def tables_fed(covered: Collection[tuple[str, str]]) -> list[str]:
    """The paper's tables with a result for some number. `covered` has (`Cell.kind`, model) of the results."""
    return [name for name in TABLES if _feeds(read_cells(FOLDER / f"{name}.csv"), covered)]


def figures_fed(covered: Collection[tuple[str, str]]) -> list[str]:
    """The paper's figures with a result. The kind of a curve is `data=` and the training set."""
    bars = [
        name
        for name, files in BARS.items()
        if any(_feeds(read_cells(FOLDER / f"{file}.csv"), covered) for file in files)
    ]
    curves = [
        name
        for name, panels in CURVE_FIGURES.items()
        if any(
            (f"data={series.asked.setting['data']}", series.asked.model) in covered
            for panel in panels
            for series in panel.series
        )
    ]
    schedules = [SCHEDULES] if curves else []
    return sorted([*bars, *curves, *schedules], key=lambda name: int(name.removeprefix("figure")))


def _feeds(cells: Sequence[Cell], covered: Collection[tuple[str, str]]) -> bool:
    asked = {(cell.kind, model) for cell in cells for model in ([cell.model] if cell.model else MODELS)}
    return bool(asked & set(covered))
