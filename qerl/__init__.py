"""Reinforcement learning of language models on 4-bit NVFP4 weights (QeRL, arXiv 2510.11696)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from qerl.api import (
        Evaluation,
        Run,
        evaluate,
        export,
        load,
        measure_dose,
        publish,
        quantize,
        rewards,
        sample,
        train,
    )

__all__ = [
    "Evaluation",
    "Run",
    "__version__",
    "evaluate",
    "export",
    "load",
    "measure_dose",
    "publish",
    "quantize",
    "rewards",
    "sample",
    "train",
]


def __dir__() -> list[str]:
    """The documented names. Most exist only once they are used."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """The API on first use: Snakemake imports this package at every call, and must not wait for torch."""
    if name in __all__:
        return getattr(import_module("qerl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
