"""Jobs that make data sets and bases, and that check them before any long work."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

from qerl.host.imports import OPTIONAL
from qerl.jobs.base import Job, Part
from qerl.settings.data import DatasetSettings
from qerl.settings.evaluation import EvaluationSettings
from qerl.settings.models import CalibrationSettings, PretrainSettings, RandomErrorSettings
from qerl.settings.run import RunSettings

#: The settings of a run that must fit the model's structure.
FITTED: Any = {
    "weights": True,
    "recipe": True,
    "pack_delta_nets": True,
    "method": True,
    "adapter": {"targets", "train_norms", "dropout"},
    "noise": {"schedule", "norms"},
    "rollout": {"engine"},
}
#: With those by which the lengths of its problems are checked, all that the check of a run reads.
CHECKED: Any = {
    **FITTED,
    "model": True,
    "dataset": True,
    "rollout": {
        "engine": True,
        "max_prompt_tokens": True,
        "sampling": {"max_tokens"},
        "vllm": {"max_model_len", "url", "adapters"},
    },
}


class DataJob(Job):
    """Prepare a data set: generated, from a local file or from the hub."""

    kind: Literal["data"] = "data"
    settings: DatasetSettings
    lock_file: Path | None
    """Compare the hub's files with this lock file."""


class CheckJob(Job):
    """Check settings, tokenizer and problems with the model, before any long work."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["check"] = "check"
    model: Path
    runs: list[RunSettings]
    """With the values of `CHECKED`, and otherwise default values."""
    evaluation: EvaluationSettings
    data: dict[str, Path]
    """The folder of each prepared data set."""


class PretrainJob(Job):
    """Train the miniature base policy from scratch."""

    without: ClassVar[Collection[str]] = OPTIONAL
    kind: Literal["pretrain"] = "pretrain"
    settings: PretrainSettings
    data: dict[str, Path]

    @property
    def gpus(self) -> int:
        """One, where there is any."""
        return 1


class FetchJob(Job):
    """Download a model of the hub at a pinned revision."""

    kind: Literal["fetch"] = "fetch"
    repo: str
    revision: str
    lock_file: Path | None


class CalibratedOn(Part):
    """The texts on which AWQ measures activations."""

    settings: CalibrationSettings
    data: Path


class QuantizeJob(Job):
    """Make a base in one weight format, with a report on size and error."""

    kind: Literal["quantize"] = "quantize"
    model: str
    weights: str
    source: Path
    calibration: CalibratedOn | None
    """None: rounded to nearest."""
    error: RandomErrorSettings | None
    """None: the weights have no random error."""
    pack_delta_nets: bool

    @property
    def gpus(self) -> int:
        """One, where there is any."""
        return 1
