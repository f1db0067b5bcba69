"""Schemas of preparation: a data set's dataset.json, a quantization's report.json, and a base's pretrain.json."""

from __future__ import annotations

import datetime
from typing import Any

from pydantic import Field

from qerl.results.schema.stored import Number, Provenance, Stored
from qerl.settings.data import AnswerForm, RecordFormat, Split
from qerl.settings.models import WeightFormat


class PreparedDataset(Stored):
    """data/<dataset>/dataset.json: the problems' prompt and origin, and the rows and SHA-256 of each split.

    Folders that were prepared before data sets had units, thinking and date lack them. `date` is the one that chat
    templates state. It has no stamp, so that equal problems and dates give equal files.
    """

    format: RecordFormat
    instruction: str
    answer: AnswerForm
    units: list[str] = Field([])
    thinking: tuple[str, str] | None = None
    date: datetime.date | None = None
    rows: dict[Split, int]
    sha256: dict[Split, str]
    columns: dict[str, str]
    filter: dict[str, Any]
    origin: dict[str, Any]
    repository_files: dict[str, str]


class QuantizationReport(Stored):
    """quantize/<checkpoint>/report.json; `relative_error` by layer type, `calibration` of AWQ, a random error."""

    model: str
    weights: WeightFormat
    weights_format: WeightFormat | None = None
    method: str
    pack_delta_nets: bool = False
    size_bytes: Number
    bits_per_weight: Number
    bits_per_weight_model: Number
    relative_error: dict[str, float]
    versions: dict[str, str] = Field({})
    calibration: dict[str, Any] | None = None
    random_error: dict[str, Any] | None = None
    provenance: Provenance


class PretrainCheck(Stored):
    """A check of a base during its training."""

    step: int
    loss: float
    accuracy: float


class PretrainReport(Stored):
    """models/<model>/pretrain.json; `accuracy` by data set."""

    steps: int
    parameters: int
    checks: list[PretrainCheck]
    accuracy: dict[str, float]
    provenance: Provenance
