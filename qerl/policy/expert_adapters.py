"""Adapters of experts in PEFT's layout: two matrices of plain LoRA for each projection of each expert.

The hub's checkpoints of Qwen3-MoE have these layers. PEFT stacks such an adapter itself where transformers stacks the
experts, and its class for stacks has no file format that other engines read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl.checkpoints.folder import ADAPTER, CheckpointError
from qerl.layers.adapted_experts import adapted_experts


def name_by_expert(model: nn.Module, folder: Path) -> None:
    """Replace the adapters of all experts, which PEFT wrote to `folder`, by those of each; nothing without any."""
    adapters = adapted_experts(model)
    if not adapters:
        return
    stacks = tuple(f"{name}.lora_" for name in adapters)
    tensors = {key: tensor for key, tensor in load_file(folder / ADAPTER).items() if not key.startswith(stacks)}
    for name, experts in adapters.items():
        for side, projection in _matrices(experts.projections):
            for number, matrix in enumerate(experts.adapter(side, projection).detach()):
                tensors[_key(name, number, projection, side)] = matrix
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})


@torch.no_grad()
def fill_experts(model: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copy the adapters of experts out of the tensors of an adapter's folder, and return the other tensors.

    Raises `CheckpointError` if one is missing or has another shape.
    """
    others = dict(stored)
    for name, experts in adapted_experts(model).items():
        for side, projection in _matrices(experts.projections):
            for number, target in enumerate(experts.adapter(side, projection)):
                key = _key(name, number, projection, side)
                target.copy_(_matching(key, target, others.pop(key, None), folder))
    return others


def _matching(key: str, target: Tensor, matrix: Tensor | None, folder: Path) -> Tensor:
    """The matrix, if it has the shape of its target."""
    if matrix is None or matrix.shape != target.shape:
        stored = "lacks it" if matrix is None else f"has {list(matrix.shape)}"
        raise CheckpointError(
            f"the adapter needs {key} {list(target.shape)}, and {folder / ADAPTER} {stored}; take the adapter of this "
            "model, with one for every expert"
        )
    return matrix


def _matrices(projections: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Side and projection of each matrix of an expert."""
    return ((side, projection) for side in "AB" for projection in projections)


def _key(experts: str, number: int, projection: str, side: str) -> str:
    return f"{experts}.{number}.{projection}.lora_{side}.weight"
