"""What mixes the tokens of a sequence in a block: attention, which reads pages of a cache, or a gated delta net."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from qerl.kernels.decode_state import DecodeState
from qerl.kernels.delta_state import DeltaHeads, DeltaState
from qerl.kernels.geometry import Heads
from qerl.kernels.operations import Operations
from qerl.kernels.prompts import PromptRow
from qerl.layers.adapters import unwrap
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.narrow_linear import NarrowLinear
from qerl.layers.packed_linear import PackedLinear
from qerl.rollout.engine.mlps import projections
from qerl.rollout.engine.norms import norm_of
from qerl.settings.rollout import Kernels

#: Cosines and sines of each kind of attention.
Ropes = Mapping[str | None, tuple[Tensor, Tensor]]


class Tokens(Protocol):
    """The tokens of a pass: one of each slot, or those of prompts."""

    def attend(self, qkv: Tensor, cache: Any, heads: Heads, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attention [n, Hq * D] of q, k and v [n, `heads.width`], which a block's cache gets."""
        ...

    def recur(self, parts: Sequence[Tensor], heads: DeltaHeads, net: DeltaState) -> Tensor:
        """Outputs [n, H * V] of a delta net's inputs, gates z, b and a; `net` gets the new states."""
        ...


@dataclass(frozen=True)
class StepTokens:
    """The last token of the slots `rows`."""

    operations: Operations
    state: DecodeState
    rows: Tensor
    splits: int
    drafted: bool

    def attend(self, qkv: Tensor, cache: Any, heads: Heads, rope: tuple[Tensor, Tensor]) -> Tensor:
        """See `Tokens`."""
        return self.operations.attend(qkv, cache, self.state, self.rows, rope, heads, self.splits, self.drafted)

    def recur(self, parts: Sequence[Tensor], heads: DeltaHeads, net: DeltaState) -> Tensor:
        """See `Tokens`."""
        return self.operations.delta_step(*parts, heads, net, self.state, self.rows)


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of prompts in a row."""

    operations: Operations
    row: PromptRow

    def attend(self, qkv: Tensor, cache: Any, heads: Heads, rope: tuple[Tensor, Tensor]) -> Tensor:
        """See `Tokens`."""
        return self.operations.attend_prompts(qkv, cache, self.row, rope, heads)

    def recur(self, parts: Sequence[Tensor], heads: DeltaHeads, net: DeltaState) -> Tensor:
        """See `Tokens`."""
        return self.operations.delta_prompts(*parts, heads, net, self.row)


@dataclass(frozen=True)
class Attention:
    """Attention of a block. `out` is the projection of its results."""

    heads: Heads
    #: The kind of the attention, where rotary positions differ by it.
    kind: str | None
    qkv: FusedLinear
    out: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        """The products."""
        return [self.qkv, self.out]

    def __call__(self, x: Tensor, tokens: Tokens, cache: Any, ropes: Ropes) -> Tensor:
        """What `out` reads [n, Hq * D], from normalised hidden states x [n, hidden] and the block's cache."""
        qkv = x.new_empty(len(x), self.qkv.out_features)
        self.qkv(x, qkv)
        return tokens.attend(qkv, cache, self.heads, ropes[self.kind])


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net of a block. `out` is the projection of its results."""

    heads: DeltaHeads
    #: The products that give the convolution's inputs, z, b and a, and the widths of each one's parts.
    projections: Sequence[tuple[FusedLinear, Sequence[int]]]
    out: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        """The products."""
        return [*(linear for linear, _ in self.projections), self.out]

    def __call__(self, x: Tensor, tokens: Tokens, net: DeltaState, ropes: Ropes) -> Tensor:
        """What `out` reads [n, H * V], from normalised hidden states x [n, hidden] and the net's states."""
        del ropes
        parts: list[Tensor] = []
        # The narrow product is first: while it runs, the packed one after it copies its first weights.
        for linear, widths in reversed(self.projections):
            joint = x.new_empty(len(x), linear.out_features)
            linear(x, joint)
            parts = [*joint.split(list(widths), 1), *parts]
        return tokens.recur(parts, self.heads, net)


def attention_of(
    attention: Any, config: Any, kind: str | None, window: int | None, dtype: torch.dtype, kernels: Kernels
) -> Attention:
    """The attention of a block, by transformers' module of it."""
    heads = _heads(attention, config, window)
    layers = projections(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")
    qkv = fuse(layers, dtype, kernels=kernels)
    heads = replace(heads, gated=qkv.out_features > heads.width)
    return Attention(heads, kind, qkv, fuse([attention.o_proj], dtype, kernels=kernels))


def delta_net_of(net: Any, dtype: torch.dtype, kernels: Kernels) -> DeltaNet:
    """The delta net of a block, by transformers' module of it."""
    heads = DeltaHeads(
        key=net.num_k_heads,
        value=net.num_v_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
        convolution=net.conv1d.weight.squeeze(1),
        log_rate=net.A_log,
        rate_bias=net.dt_bias,
        norm=net.norm.weight,
        eps=net.norm.variance_epsilon,
    )
    wide, narrow = [net.in_proj_qkv, net.in_proj_z], [net.in_proj_b, net.in_proj_a]
    widths = [heads.channels, heads.parts[2]], [heads.value] * 2
    if any(isinstance(unwrap(layer).base, PackedLinear) for layer in wide + narrow):
        # Layers in several formats have no common kernel, and b and a are too narrow to be packed.
        products = [(fuse(wide, dtype, kernels=kernels), widths[0]), (NarrowLinear(narrow, dtype), widths[1])]
    else:
        products = [(fuse(wide + narrow, dtype, kernels=kernels), widths[0] + widths[1])]
    return DeltaNet(heads, products, fuse([net.out_proj], dtype, kernels=kernels))


def _heads(attention: Any, config: Any, window: int | None) -> Heads:
    heads = Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        attention.scaling,
        window=window,
        sinks=getattr(attention, "sinks", None),
    )
    if not hasattr(attention, "q_norm"):
        return heads
    q_norm, k_norm = norm_of(attention.q_norm), norm_of(attention.k_norm)
    return replace(heads, q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps, norm_offset=q_norm.offset)
