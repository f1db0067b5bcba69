"""The words that identify a result: weights, training and what a grid varies; imports nothing heavy."""

from __future__ import annotations

from typing import Any

from qerl.settings.models import Recipe

#: What identifies an arm, apart from its seeds.
KEY = ["model", "experiment", "arm", "variant", "weights", "training"]


def weights_name(weights: str, recipe: Recipe) -> str:
    """A weight format, with the recipe where it isn't rounding to nearest: nvfp4 or nvfp4-awq."""
    return weights if recipe == "rtn" else f"{weights}-{recipe}"


def variant(varied: dict[str, Any]) -> str:
    """What the grid varies besides the seed: "adapter.rank=16"."""
    return ", ".join(f"{key}={value}" for key, value in varied.items() if key != "seed")


def training_name(method: str, schedule: str) -> str:
    """How a run was trained, in the words of the paper's Table 1: full, lora or lora+aqn (full+aqn likewise)."""
    return method + ("" if schedule == "off" else "+aqn")
