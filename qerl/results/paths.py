"""Paths and names of all files in the folder of a configuration's results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN = "run.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
SAMPLES = "samples.jsonl"
REPORT = "report.json"
PRETRAIN = "pretrain.json"
MEASURED = "measured.json"
VERDICT = "verdict.json"
#: What a run trained, in its folder, and a base in one format, in that of its report.
POLICY = "policy"
CHECKPOINT = "checkpoint"
#: Of a measurement and of a file of the speed grid: the folder tells them from other JSON files.
PROFILE = "profile"
POINTS = "points"
#: A file that each task of the workflow leaves: the paths of the results that tables are made of.
LISTED = "results.txt"


@dataclass(frozen=True)
class ResultPaths:
    """The files in one folder of results. A name may be a wildcard of a rule."""

    root: Path

    @staticmethod
    def of(name: str) -> ResultPaths:
        """The folder of the configuration called `name`."""
        return ResultPaths(Path("results") / name)

    def data(self, dataset: str) -> Path:
        """A prepared data set."""
        return self.root / "data" / dataset

    def model(self, model: str) -> Path:
        """An unquantized model that was trained or downloaded."""
        return self.root / "models" / model

    def checkpoint(self, checkpoint: str) -> Path:
        """A base in one format."""
        return self.root / "quantize" / checkpoint / CHECKPOINT

    def quantization(self, checkpoint: str) -> Path:
        """The report on a base in one format."""
        return self.root / "quantize" / checkpoint / REPORT

    def checked(self, check: str) -> Path:
        """An empty file, which states that a model fits its problems."""
        return self.root / "checked" / check

    def policy(self, run: str) -> Path:
        """The trained policy of a run."""
        return self.root / "train" / run / POLICY

    def metrics(self, run: str) -> Path:
        """The metrics of a run, one row per step."""
        return self.root / "train" / run / METRICS

    def run(self, run: str) -> Path:
        """The settings, stamp and cost of a run."""
        return self.root / "train" / run / RUN

    def evaluation(self, evaluation: str) -> Path:
        """The scores of a policy."""
        return self.root / "evaluate" / evaluation / RESULT

    def samples(self, evaluation: str) -> Path:
        """The completions beside the scores, one per row."""
        return self.root / "evaluate" / evaluation / SAMPLES

    def bench(self, bench: str) -> Path:
        """A measurement."""
        return self.root / PROFILE / f"{bench}.json"

    def point(self, point: str) -> Path:
        """A file of the speed grid."""
        return self.root / POINTS / f"{point}.json"

    def table(self, name: str, ending: str) -> Path:
        """A table in one of its forms."""
        return self.root / "tables" / f"{name}.{ending}"

    def figure(self, name: str, ending: str) -> Path:
        """A figure in one of its forms."""
        return self.root / "figures" / f"{name}.{ending}"

    def gate(self, name: str) -> Path:
        """A file of the gates."""
        return self.root / "gates" / name
