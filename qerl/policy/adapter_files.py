"""Files of an adapter in PEFT's layout, by the names with which stock PEFT loads it on its base.

In memory an adapter's tensors have the names of the text model. Stock classes have that within the whole where the base
is a model of images and text (`qerl.checkpoints.text_models`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from qerl.checkpoints.folder import ADAPTER, ADAPTER_CONFIG, whole_model
from qerl.checkpoints.tensors import write_tensors
from qerl.checkpoints.text_models import own_name

_PREFIX = "base_model.model."


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by the text model's names."""
    stored = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / ADAPTER).items()}
    return {own_name(name) or name: tensor for name, tensor in stored.items()}


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
