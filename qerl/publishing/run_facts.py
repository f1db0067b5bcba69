"""The facts of a finished run that its card states. Folders of this machine are in them by their last name only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl.checkpoints.stock import StockLoading
from qerl.results.intervals import Interval
from qerl.results.schema.evaluation import TaskScore
from qerl.results.schema.preparation import PreparedDataset
from qerl.results.schema.stored import Provenance
from qerl.results.schema.training import RunResult, StepMetrics


@dataclass(frozen=True)
class License:
    """The licence of a base as its own card states it, in the keys of a card's metadata."""

    license: str
    license_name: str | None = None
    license_link: str | None = None


@dataclass(frozen=True)
class BaseModel:
    """The model that a run started from: a repository of the hub, or a folder, of which only the name is told.

    `as_it_is`: the run trained on the model's own files; otherwise it quantized them first.
    """

    name: str
    on_hub: bool
    revision: str | None
    as_it_is: bool
    license: License | None = None


@dataclass(frozen=True)
class RunScore:
    """A score of the run's policy, or of its untrained base, on a data set; `data` is None where it isn't known."""

    label: str
    trained: bool
    score: TaskScore
    accuracy: Interval
    data: PreparedDataset | None
    provenance: Provenance


@dataclass(frozen=True)
class RunFacts:
    """Everything that a card tells of a run."""

    run: RunResult
    base: BaseModel
    data: PreparedDataset
    metrics: Sequence[StepMetrics]
    stock: StockLoading
    scores: Sequence[RunScore] = ()


def data_name(data: PreparedDataset) -> str:
    """The name of a data set: the hub's, the file's, the function's, or that of its generator."""
    origin = data.origin
    match origin["source"]:
        case "hub":
            return str(origin["repo"])
        case "local":
            return Path(origin["path"]).name
        case "python":
            return str(origin["function"])
        case generator:
            return f"{generator} (made by qerl)" if generator != "generated" else "arithmetic (made by qerl)"
