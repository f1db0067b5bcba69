"""Schemas of prepared bases: report.json of a quantization and pretrain.json of a base from scratch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from qerl.results.schema.stored import Number, Provenance, Stored
from qerl.settings.models import WeightFormat


class QuantizationReport(Stored):
    """quantize/<checkpoint>/report.json; `relative_error` by layer type, `calibration` of AWQ, a random error."""

    model: str
    weights: WeightFormat
    weights_format: WeightFormat | None = None
    method: str
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
