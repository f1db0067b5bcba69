"""The names that identify a result: weights, training and the grid's values. This module imports no large library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from qerl.settings.models import Recipe, WeightFormat
from qerl.settings.rollout import Kernels

#: Columns that identify an arm, apart from its seeds.
KEY = ["model", "experiment", "arm", "variant", "weights", "training"]


def weights_name(weights: str, recipe: Recipe = "rtn", pack_delta_nets: bool = False) -> str:
    """A weight format with its recipe, unless that is rounding to nearest: nvfp4 or nvfp4-awq.

    With packed delta nets it is nvfp4-delta-nets.
    """
    return weights + ("" if recipe == "rtn" else f"-{recipe}") + ("-delta-nets" if pack_delta_nets else "")


def weights_names() -> list[str]:
    """All names of weights, in the order of tables."""
    options = [*((recipe, False) for recipe in get_args(Recipe)), ("rtn", True)]
    return [weights_name(weights, *option) for weights in get_args(WeightFormat) for option in options]


def without_folders(value: Any) -> Any:
    """A setting, or settings in lists and mappings, in which an absolute path of this machine is its last name."""
    match value:
        case str() if Path(value).is_absolute():
            return Path(value).name
        case Mapping():
            return {key: without_folders(of_key) for key, of_key in value.items()}
        case list() | tuple():
            return [without_folders(each) for each in value]
    return value


def variant(varied: dict[str, Any]) -> str:
    """The values of the grid besides the seed, such as "adapter.rank=16"."""
    return ", ".join(f"{key}={value}" for key, value in varied.items() if key != "seed")


def training_name(method: str, schedule: str) -> str:
    """The training of a run, named as in the paper's Table 1: full, lora, lora+aqn or full+aqn."""
    return method + ("" if schedule == "off" else "+aqn")


def with_kernels(system: str, kernels: Kernels) -> str:
    """An engine or a system with its kernels, unless the GPU chooses them: native or native-portable."""
    return system if kernels == "auto" else f"{system}-{kernels}"


def decode_name(engine: str, size: str, weights: str, rank: int, prompt: int, tokens: int) -> str:
    """The name of a file of decode points; prompt and decoded tokens are per sequence.

    engine: with its kernels, by `with_kernels`.
    """
    return f"decode-{engine}-{size}-{weights}-r{rank}-{prompt}x{tokens}"


def step_name(system: str, size: str, weights: str, rank: int, work: str, variant: str) -> str:
    """The name of a file of GRPO steps.

    system: with its kernels, by `with_kernels`. work: prompts, completions of each, and their tokens, as in
    "1x8-256x2048". variant: what is recomputed, and limits.
    """
    return f"step-{system}-{size}-{weights}-r{rank}-{work}-{variant}"
