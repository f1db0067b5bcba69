"""Gated delta nets, which mix tokens by a short convolution and a recurrent state in place of attention.

In a packed row each piece has its own state: a prompt's starts from zero, and a completion's from that of its prompt.
transformers' functions compute the convolution and steps of one token, and `qerl.layers.delta_rule` more tokens. On a
GPU, kernels of causal-conv1d and flash-linear-attention take their places where these are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from qerl.kernels.packed_sequences import Packing
from qerl.layers import delta_library
from qerl.layers.delta_rule import gated_delta_rule


class Functions(NamedTuple):
    """The convolution of a delta net, its rule for chunks of tokens, and its rule for one token."""

    convolve: Callable[..., Any]
    chunks: Callable[..., Any]
    step: Callable[..., Any]


#: Functions in PyTorch, whatever is installed.
PLAIN = Functions(unwrap(causal_conv1d_fn), gated_delta_rule, unwrap(torch_recurrent_gated_delta_rule))
#: transformers' functions, which a library replaces where it is installed.
INSTALLED = Functions(causal_conv1d_fn, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule)


def functions_for(x: Tensor) -> Functions:
    """The functions that take x: kernels of the libraries take 16-bit tensors on a GPU alone."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return PLAIN
    usable = delta_library.is_installed() and (not torch.is_grad_enabled() or delta_library.trains_on(x.device))
    return INSTALLED if usable else INSTALLED._replace(chunks=PLAIN.chunks)


#: The linear layers of a delta net that are wide enough to be packed. The others give b and a, a number for each head.
PACKABLE = ("in_proj_qkv", "in_proj_z", "out_proj")


class PackedDeltaNet(nn.Module):
    """A mixin for transformers' gated delta nets that computes packed rows too.

    The recurrence is float32, unless a library's kernels compute it (`functions_for`).
    In the shapes P are pieces or sequences, T tokens, C channels of the convolution, H heads and D features of a value.
    """

    # Attributes of the base class, whose types transformers doesn't tell.
    A_log: Any
    dt_bias: Any
    conv1d: Any
    conv_kernel_size: Any
    activation: Any
    norm: Any
    layer_idx: Any
    key_dim: Any
    value_dim: Any
    head_k_dim: Any
    head_v_dim: Any

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """Map hidden_states [P, T, hidden] to the same shape; `attention_mask` [P, T] is 0 on padding.

        Zero inputs leave a state at zero, so padding before a prompt doesn't count.
        """
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        mixed, z, b, a = (self.get_submodule(f"in_proj_{part}")(hidden_states) for part in ("qkv", "z", "b", "a"))
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias)
        packing = settings.get("packing")
        if isinstance(packing, Packing):
            out = self._over_row(mixed[0], decay[0], b[0].sigmoid(), packing)
        else:
            out = self._after_cache(mixed, decay, b.sigmoid(), cache_params)
        normed = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.get_submodule("out_proj")(normed.reshape(*hidden_states.shape[:-1], -1))

    def _after_cache(self, mixed: Tensor, decay: Tensor, beta: Tensor, cache: Any) -> Tensor:
        """The outputs [P, T, H, D] of tokens that follow those in a cache, which gets the new states."""
        if cache is None:
            return self._mix(mixed, decay, beta, None)[0]
        follows = cache.has_previous_state(self.layer_idx, state_idx=0)
        state = cache.layers[self.layer_idx].recurrent_states[0] if follows else None
        row = cache.update_conv_state(mixed.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        out, state = self._mix(row.transpose(1, 2), decay, beta, state)
        cache.update_recurrent_state(state, self.layer_idx)
        return out

    def _over_row(self, mixed: Tensor, decay: Tensor, beta: Tensor, packing: Packing) -> Tensor:
        """The outputs [L, H, D] of a row, whose pieces are computed in padded batches.

        Padding has no decay and no beta, so it doesn't change a state.
        """
        rows = [row.split(packing.lengths) for row in (mixed, decay, beta)]
        outs: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        for places in _similar(packing):
            mixed, decay, beta = (pad_sequence([row[place] for place in places], batch_first=True) for row in rows)
            prompts = [prompt for place in places if (prompt := packing.prompts[place]) is not None]
            if prompts:
                mixed = torch.cat([torch.stack([self._end(rows[0][prompt]) for prompt in prompts]), mixed], 1)
            state = torch.stack([states[prompt] for prompt in prompts]) if prompts else None
            out, last = self._mix(mixed, decay, beta, state)
            outs |= dict(zip(places, out, strict=True))
            states |= dict(zip(places, last, strict=True))
        return torch.cat([outs[place][:length] for place, length in enumerate(packing.lengths)])

    def _end(self, piece: Tensor) -> Tensor:
        """The last tokens of a piece [T, C] that the convolution of its successor reads, after zeros if it is short."""
        width = self.conv_kernel_size - 1
        return pad(piece[-width:], (0, 0, width - min(width, len(piece)), 0))

    def _mix(self, mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [P, T, H, D] and the last states of T tokens; `decay` and `beta` are [P, T, H].

        mixed [P, T, C] may have earlier tokens too, which the convolution reads. Without them it reads zeros.
        """
        tokens, functions = decay.shape[1], functions_for(mixed)
        with nullcontext() if mixed.is_meta else torch.autocast(mixed.device.type, enabled=False):
            weight = self.conv1d.weight.squeeze(1)
            row = functions.convolve(mixed.transpose(1, 2), weight, self.conv1d.bias, activation=self.activation)
            parts = row[..., -tokens:].transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], -1)
            sizes = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
            query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
            rule = functions.chunks if state is None or tokens > 1 else functions.step
            if rule is not gated_delta_rule:  # it alone takes fewer heads of keys than of values
                query, key = (heads.repeat_interleave(value.shape[2] // heads.shape[2], 2) for heads in (query, key))
            out, last = rule(
                query,
                key,
                value,
                g=decay,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        return out, last


def _similar(packing: Packing) -> list[list[int]]:
    """The pieces in batches, prompts first; the longest of a batch has less than twice the tokens of the shortest."""
    kinds = [(prompt is not None, n.bit_length()) for n, prompt in zip(packing.lengths, packing.prompts, strict=True)]
    return [[place for place, one in enumerate(kinds) if one == kind] for kind in sorted(set(kinds))]


class PackedQwen3_5DeltaNet(PackedDeltaNet, Qwen3_5GatedDeltaNet):
    """The gated delta net of Qwen3.5."""


class PackedQwen3_5MoeDeltaNet(PackedDeltaNet, Qwen3_5MoeGatedDeltaNet):
    """The gated delta net of Qwen3.5 with experts, which computes the same."""


_PACKED: dict[type, type[PackedDeltaNet]] = {
    Qwen3_5GatedDeltaNet: PackedQwen3_5DeltaNet,
    Qwen3_5MoeGatedDeltaNet: PackedQwen3_5MoeDeltaNet,
}


def pack_delta_nets(model: nn.Module) -> None:
    """Change every gated delta net of a known class to its subclass for packed rows; weights and names stay."""
    for module in model.modules():
        if type(module) in _PACKED:
            module.__class__ = _PACKED[type(module)]
