"""Files of an adapter in PEFT's layout, by the names with which stock PEFT loads it on its base.

In memory an adapter's tensors have the names of the text model. Stock classes have that within the whole where the base
is a model of images and text (`qerl.checkpoints.text_models`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from qerl.checkpoints.folder import ADAPTER, ADAPTER_CONFIG, CheckpointError, whole_model
from qerl.checkpoints.tensors import write_tensors
from qerl.checkpoints.text_models import own_name
from qerl.host.limits import SECONDS, patterns_end
from qerl.layers.empty_model import MISFITS

_PREFIX = "base_model.model."
#: The highest rank of an adapter without matrices, and the bound of a scale.
_MOST_RANK = 2**16
_MOST_ALPHA = 1e30


#: Keys of an adapter's configuration by which PEFT computes more than LoRA, or imports a module that they name.
_REFUSED = ("arrow_config", "layer_replication", "megatron_config")


def adapter_config(folder: Path, names: Iterable[str]) -> LoraConfig:
    """PEFT's configuration of a stored adapter, for a model whose modules have these `names`.

    Raises `CheckpointError` as `adapter_values` does, and for regular expressions that are invalid or have no end.
    """
    values = adapter_values(folder)
    _check_patterns(folder / ADAPTER_CONFIG, values, names)
    try:
        return cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    except MISFITS as error:
        raise misfit(folder, error) from None


def adapter_values(folder: Path) -> dict[str, Any]:
    """The values of a stored adapter's configuration.

    Raises `CheckpointError` for values that PEFT fails on, and for ranks beyond those of the file's matrices.
    """
    path = folder / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    if refused := [key for key in _REFUSED if values.get(key)]:
        raise CheckpointError(f"{path} has {refused[0]}, which isn't supported; take an adapter of plain LoRA")
    patterns = [values.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise CheckpointError(f"{path} has a rank_pattern or alpha_pattern that is no mapping; save the adapter again")
    ranks, alphas = patterns
    shapes = _shapes(folder)
    rows = [shape[0] for name, shape in shapes.items() if ".lora_A" in name or ".lora_embedding_A" in name]
    for rank in (values.get("r", 8), *ranks.values()):
        if type(rank) is not int or not 1 <= rank <= max(rows, default=_MOST_RANK):
            raise CheckpointError(
                f"{path} has the rank {str(rank)[:40]}, and the matrices of {ADAPTER} have at most "
                f"{max(rows, default=_MOST_RANK)}; save the adapter again"
            )
    for alpha in (values.get("lora_alpha", 8), *alphas.values()):
        if type(alpha) not in (int, float) or not abs(alpha) < _MOST_ALPHA:
            raise CheckpointError(f"{path} has lora_alpha={str(alpha)[:40]}, which is no finite number; correct it")
    for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_pattern"):
        if not _is_names(values.get(key), one=key not in ("modules_to_save", "target_parameters")):
            raise CheckpointError(f"{path} has {key}={str(values[key])[:80]!r}, which lists no names; correct it")
    return {"r": 8, "lora_alpha": 8, **values}  # PEFT's defaults


def misfit(folder: Path, error: Exception) -> CheckpointError:
    """The refusal of an adapter that PEFT raised `error` for."""
    return CheckpointError(
        f"{folder} holds an adapter that doesn't fit the model ({' '.join(str(error).split())[:300]}); give the model "
        "that it was trained on"
    )


def _is_names(value: Any, one: bool) -> bool:
    many = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return value is None or many or (one and isinstance(value, str))


def _check_patterns(path: Path, values: dict[str, Any], names: Iterable[str]) -> None:
    """Raise `CheckpointError` for a regular expression that is invalid, or takes PEFT too long."""
    parts = values.get("layers_pattern") or []
    patterns = [value for key in ("target_modules", "exclude_modules") if isinstance(value := values.get(key), str)]
    patterns += [rf".*\.{part}\.(\d+)\." for part in ([parts] if isinstance(parts, str) else parts)]
    patterns += [
        rf"(.*\.)?({key})$" for option in ("rank_pattern", "alpha_pattern") for key in values.get(option) or ()
    ]
    if patterns and not patterns_end(patterns, names):
        raise CheckpointError(
            f"{path} has a regular expression among {', '.join(patterns)[:200]!r} that is invalid, or isn't done with "
            f"the names of the model's layers after {SECONDS} s; list the last parts of the names instead"
        )


def check_taken(model: PeftModel, folder: Path) -> None:
    """Raise `CheckpointError` if PEFT took another set of matrices into the model than a folder's adapter has."""
    expected = {_own(name) for name in get_peft_model_state_dict(model, save_embedding_layers=False)}
    stored = set(map(_own, _shapes(folder)))
    if missing := sorted(expected - stored):
        raise CheckpointError(f"{folder / ADAPTER} lacks {missing[0]}, which {ADAPTER_CONFIG} calls for; save it again")
    if left := sorted(name for name in stored - expected if ".lora_" in name):
        raise CheckpointError(
            f"{folder / ADAPTER} holds {left[0]}, which {ADAPTER_CONFIG} doesn't name or the model lacks; give the "
            "adapter's own model, or save it again"
        )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor of an adapter by its name in the file."""
    with safe_open(folder / ADAPTER, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.offset_keys()}


def _own(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    return own_name(name) or name


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by the text model's names."""
    return {_own(name): tensor for name, tensor in load_file(folder / ADAPTER).items()}


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], checkpoint: Path) -> None:
    """Write an adapter of the base `checkpoint`, whose `tensors` have the text model's names."""
    folder.mkdir(exist_ok=True)
    whole = whole_model(checkpoint)
    if whole is not None:
        tensors = {whole.adapter_name(name): tensor for name, tensor in tensors.items()}
        config = config | ({"exclude_modules": whole.excluded} if whole.excluded else {})
    named = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    write_tensors(named, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def name_for_stock(folder: Path, checkpoint: Path) -> None:
    """Give the tensors that PEFT has saved in `folder` the names in which it loads them on `checkpoint`."""
    if whole_model(checkpoint) is not None:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        write_adapter(folder, read_adapter(folder), config, checkpoint)
