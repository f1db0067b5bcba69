"""Tables and figures from the paths of stored results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qerl.report import results, tables

CAPTIONS = {
    "accuracy": "Accuracy by weight format and training (the paper's Tables 1 and 2)",
    "memory_speed": "Size, error, time of a GRPO step and memory (the paper's Table 3)",
    "throughput": "Rollout throughput by weight format and LoRA rank (the paper's Table 9)",
    "quantization": "Size and relative error by weight format",
}


class Stored:
    """Results by kind, told apart by the names that the workflow gives them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def _named(self, name: str) -> list[Path]:
        return [path for path in self._paths if path.name == name]

    def runs(self) -> pd.DataFrame:
        """See `results.load_runs`."""
        return results.load_runs(self._named("run.json"))

    def metrics(self) -> pd.DataFrame:
        """See `results.load_metrics`."""
        return results.load_metrics(self._named("run.json"))

    def evaluations(self) -> pd.DataFrame:
        """See `results.load_evaluations`."""
        return results.load_evaluations(self._named("result.json"), self.runs())

    def accuracy_cells(self) -> pd.DataFrame:
        """See `tables.accuracy_cells`."""
        return tables.accuracy_cells(self.evaluations(), results.load_samples(self._named("result.json")))

    def quantization(self) -> pd.DataFrame:
        """See `results.load_quantization`."""
        return results.load_quantization(self._named("report.json"))

    def points(self, kind: str) -> pd.DataFrame:
        """The points of all measurements of one kind."""
        files = [path for path in self._paths if path.parent.name == "profile"]
        chosen = [path for path in files if json.loads(path.read_text())["kind"] == kind]
        return results.load_benches(chosen, kind)  # type: ignore[arg-type]


def make_table(name: str, paths: Sequence[Path], out: Path) -> None:
    """Write `out`/name.csv, .md and .tex."""
    stored = Stored(paths)
    makers: dict[str, Callable[[], tuple[pd.DataFrame, pd.DataFrame]]] = {
        "accuracy": lambda: (tables.accuracy(stored.accuracy_cells()), stored.evaluations()),
        "memory_speed": lambda: _with_records(
            lambda points: tables.memory_speed(points, stored.quantization()), stored.points("step")
        ),
        "throughput": lambda: _with_records(tables.throughput, stored.points("rollout")),
        "quantization": lambda: _with_records(tables.quantization, stored.quantization()),
    }
    frame, records = makers[name]()
    tables.write_table(frame, out / name, tables.caption_text(CAPTIONS[name], records))


def _with_records(
    make: Callable[[pd.DataFrame], pd.DataFrame], records: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    return make(records), records


def make_figure(name: str, paths: Sequence[Path], out: Path) -> None:
    """Write `out`/name.svg and .png."""
    from qerl.report import figures

    stored = Stored(paths)
    out.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], None]] = {
        "accuracy": lambda: figures.accuracy(stored.accuracy_cells(), out / name),
        "throughput": lambda: figures.throughput(tables.throughput(stored.points("rollout")), out / name),
        "reward": lambda: figures.reward(stored.metrics(), out / name),
        "entropy": lambda: figures.entropy(stored.metrics(), out / name),
        "completion_length": lambda: figures.completion_length(stored.metrics(), out / name),
        "noise": lambda: figures.noise(stored.metrics(), out / name),
    }
    makers[name]()
