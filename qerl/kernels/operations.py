"""What samplers and updates compute beside products with packed weights, and who computes it on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from qerl.kernels import reference
from qerl.kernels.state import (
    DecodeState,
    DeltaHeads,
    DeltaState,
    Groups,
    Heads,
    KVCache,
    Norm,
    PromptRow,
    SamplingState,
)

Rope = tuple[Tensor, Tensor]


class Operations(Protocol):
    """Functions of a module: `qerl.kernels.reference`, which says what each computes, or Triton's."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `reference.rms_norm`."""

    def add_normed(self, to: Tensor, x: Tensor, norm: Norm, next_norm: Norm) -> Tensor:
        """See `reference.add_normed`."""

    def clamped_glu(self, both: Tensor, alpha: float, limit: float) -> Tensor:
        """See `reference.clamped_glu`."""

    # Attention.

    def attend(
        self,
        qkv: Tensor,
        cache: KVCache,
        state: DecodeState,
        rows: Tensor,
        rope: Rope,
        heads: Heads,
        splits: int,
    ) -> Tensor:
        """See `reference.attend`."""

    def attend_prompts(self, qkv: Tensor, cache: KVCache, row: PromptRow, rope: Rope, heads: Heads) -> Tensor:
        """See `reference.attend_prompts`."""

    # Gated delta nets.

    def delta_step(
        self,
        mixed: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        heads: DeltaHeads,
        net: DeltaState,
        state: DecodeState,
        rows: Tensor,
    ) -> Tensor:
        """See `reference.delta_step`."""

    def delta_prompts(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, heads: DeltaHeads, net: DeltaState, row: PromptRow
    ) -> Tensor:
        """See `reference.delta_prompts`."""

    # Tokens and their log-probabilities.

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        state: DecodeState,
        sampling: SamplingState,
        truncated: bool,
        replayed: bool = False,
    ) -> None:
        """See `reference.draw`."""

    def tile_statistics(
        self, tiles: Iterable[tuple[int, Tensor]], targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference.tile_statistics`."""

    def tile_gradient(
        self,
        logits: Tensor,
        first: int,
        targets: Tensor,
        lse: Tensor,
        grad: Tensor,
        temperature: float,
        entropy: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        """See `reference.tile_gradient`."""

    # Mixtures of experts.

    def scores(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `reference.scores`."""

    def route(self, scores: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
        """See `reference.route`."""

    def group(self, numbers: Tensor, experts: int) -> Groups:
        """See `reference.group`."""

    def combine(self, y: Tensor, weights: Tensor, out: Tensor, residual: bool) -> None:
        """See `reference.combine`."""

    def combine_gradients(self, grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """See `reference.combine_gradients`."""

    def dense_product(self, weights: Tensor, x: Tensor, groups: Groups, out: Tensor) -> None:
        """See `reference.dense_product`."""

    def dense_input_gradient(
        self, weights: Tensor, grad: Tensor, groups: Groups, out: Tensor, add: bool = False
    ) -> None:
        """See `reference.dense_input_gradient`."""

    def dense_weight_gradient(self, grad: Tensor, x: Tensor, groups: Groups, experts: int) -> Tensor:
        """See `reference.dense_weight_gradient`."""


def operations_name(on_gpu: bool) -> str:
    """What implements the operations on a GPU or on a CPU."""
    return "Triton" if on_gpu else "PyTorch"


def operations(device: torch.device) -> Operations:
    """Triton's operations on a GPU, PyTorch's elsewhere."""
    if operations_name(device.type == "cuda") == "PyTorch":
        return reference
    from qerl.kernels import triton

    return triton
