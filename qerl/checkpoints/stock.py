"""How stock transformers loads a checkpoint, so that stock PEFT can add an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerl.checkpoints.folder import quantization_of, read_headers, weights_format_of, whole_model
from qerl.checkpoints.text_models import TEXT_LOADER


@dataclass(frozen=True)
class StockLoading:
    """What the code that loads a base by transformers names."""

    loader: str = TEXT_LOADER
    """transformers' class that makes the model on which PEFT loads an adapter."""
    unpacked_by: Literal["CompressedTensorsConfig", "Mxfp4Config", "qerl"] | None = None
    """transformers' settings that unpack the weights, or this package, which writes them unpacked; None if PEFT adapts
    the layers as they are."""


def stock_loading(folder: Path) -> StockLoading:
    """How stock transformers loads a checkpoint.

    It stacks experts while it loads them. By transformers 5.17, experts in NVFP4 lose their global scales so, without
    an error, and those in NF4 fail.
    """
    whole, weights = whole_model(folder), weights_format_of(folder)
    loader = TEXT_LOADER if whole is None else whole.loader
    if weights in ("nvfp4", "nf4") and any(".experts." in name for name in read_headers(folder)):
        return StockLoading(loader, "qerl")
    if weights not in ("nvfp4", "mxfp4"):
        return StockLoading(loader)
    published = quantization_of(folder)["quant_method"] == "mxfp4"
    return StockLoading(loader, "Mxfp4Config" if published else "CompressedTensorsConfig")
