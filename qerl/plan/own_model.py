"""The choice of settings for a user's model, by its checkpoint.

The choices are rules of thumb for a first run that fits into memory and learns. Keys in the configuration override
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.checkpoints.context import context_length
from qerl.checkpoints.folder import read_config, read_headers
from qerl.host.gpu_lease import devices
from qerl.settings.base import ConfigError, can_name_a_file
from qerl.settings.config import Config, merged

#: (least number of parameters, learning rate of LoRA): the paper's for large models, higher ones for smaller models.
_LEARNING_RATES = ((1e9, 1e-5), (1e8, 3e-5), (0, 1e-4))
#: The most tokens of a completion, if the context has room for them and for a prompt of the same length.
_MAX_TOKENS = 1024
_MAX_TOKENS_CPU = 256


@dataclass(frozen=True)
class Traits:
    """The properties of a model and machine on which the choices depend."""

    parameters: int
    context: int | None
    gpu: bool


def traits(folder: Path) -> Traits:
    """The traits of a checkpoint on this machine, from its headers. Raises CheckpointError for another folder."""
    context = context_length(read_config(folder))
    parameters = sum(math.prod(tensor.shape) for tensor in read_headers(folder).values())
    return Traits(parameters, context, bool(devices()))


def chosen(of: Traits) -> dict[str, Any]:
    """The chosen settings: `run` for a run, `evaluation` for the evaluation."""
    limit = _MAX_TOKENS if of.gpu else _MAX_TOKENS_CPU
    max_tokens = limit if of.context is None else min(limit, of.context // 2)
    dtype = "bfloat16" if of.gpu else "float32"
    rate = next(rate for least, rate in _LEARNING_RATES if of.parameters >= least)
    prompts, group_size, steps, tokens = (16, 8, 200, 16384) if of.gpu else (4, 4, 30, 2048)
    return {
        "run": {
            "dtype": dtype,
            "steps": steps,
            "optimizer": {"learning_rate": rate},
            "rollout": {"prompts": prompts, "group_size": group_size, "sampling": {"max_tokens": max_tokens}},
            "micro_batch_tokens": tokens,
            "gradient_checkpointing": "auto",
        },
        "evaluation": {"dtype": dtype, "sampling": {"max_tokens": max_tokens}, "repeats": 4 if of.gpu else 1},
    }


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values. With `fit_to_model`, missing ones are chosen by each experiment's model."""
    experiments = values.get("experiments")
    if values.get("fit_to_model") is not True or not isinstance(experiments, Mapping):
        return dict(values)
    if values.keys() - Config.model_fields.keys():  # validation names the key, such as a misspelt `model`
        return dict(values)
    result, shortest = dict(values), None
    fitting: dict[str, Any] = {}
    for name, experiment in experiments.items():
        folder = _folder(values, experiment)
        if not isinstance(folder, (str, Path)):  # validation names the key of a number
            return dict(values)
        of = traits(can_name_a_file(Path(folder)))
        fitting[name] = merged({"base": chosen(of)["run"]}, experiment)
        shortest = of if shortest is None or (of.context or math.inf) < (shortest.context or math.inf) else shortest
    evaluation = chosen(shortest)["evaluation"] if shortest else {}
    return {**result, "experiments": fitting, "evaluation": merged(evaluation, values.get("evaluation") or {})}


def _folder(values: Mapping[str, Any], experiment: Any) -> Any:
    base = experiment.get("base") if isinstance(experiment, Mapping) else None
    models = values.get("models")
    name = base.get("model") if isinstance(base, Mapping) else None
    model = models.get(name) if isinstance(models, Mapping) else None
    path = values.get("model") or (model.get("path") if isinstance(model, Mapping) else None)
    if not path:
        raise ConfigError(
            "fit_to_model chooses settings by a local checkpoint: give one as `model=FOLDER` (make: MODEL=FOLDER), or "
            "as the `model` of each experiment, with source: local"
        )
    return path


def described(of: Traits, settings: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the user: the checkpoint's traits, and the values of the chosen keys in `settings`."""
    where = "with a GPU" if of.gpu else "without a GPU"
    length = "a context of unknown length" if of.context is None else f"a context of {of.context} tokens"
    yield f"{of.parameters / 1e9:.3g} billion parameters, {length}, {where}; settings for that:"
    for key in _keys(chosen(of)["run"]):
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        yield f"  {key}: {value}"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
