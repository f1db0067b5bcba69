"""The attention of a block over packed sequences; with kernels for the device it needs no transposed views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from qerl.kernels.packed_sequences import FixedPacking, Packing, attend_packed
from qerl.layers.lora import products
from qerl.layers.structure import epsilon_of


class _Rotation(torch.autograd.Function):
    """Rotary embeddings by Triton. Only cos and sin, which all blocks share, are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from qerl.kernels.rope import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from qerl.kernels.rope import rotate

        return *rotate(of_query, of_key, *ctx.saved_tensors, back=True), None, None


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys [L, heads, D], by transformers' cosines and sines [L, D]; on a GPU."""
    return _Rotation.apply(query, key, cos, sin)


class _NormedRotation(torch.autograd.Function):
    """Norms of heads by frozen weights, then rotary embeddings, by Triton. Only the inputs are saved."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        from qerl.kernels.normed_rope import rotate_normed

        ctx.save_for_backward(query, key, *weights, cos, sin)
        ctx.eps = eps
        return rotate_normed(query, key, weights, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from qerl.kernels.normed_rope import rotate_normed

        query, key, query_weight, key_weight, cos, sin = ctx.saved_tensors
        weights = query_weight, key_weight
        return *rotate_normed(query, key, weights, ctx.eps, cos, sin, (grads[0], grads[1])), None, None, None, None


def rotate_normed(
    query: Tensor, key: Tensor, norms: Sequence[nn.Module], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys as `rotate` has them, after the two `norms` of their heads, whose weights are frozen."""
    weights = norms[0].get_parameter("weight"), norms[1].get_parameter("weight")
    return _NormedRotation.apply(query, key, weights, epsilon_of(norms[0]), cos, sin)


def _kernel_serves(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype != torch.float64


class PackedAttention(nn.Module):
    """A mixin for transformers' attention that computes packed sequences on a GPU; otherwise it calls `super`."""

    # Attributes of the base class, whose types differ between transformers' classes.
    config: Any
    head_dim: Any
    scaling: Any
    attention_dropout: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **settings: Any,
    ) -> tuple[Tensor, Any]:
        """Map hidden_states [1, L, H] to the same shape, and None for the weights; cos and sin are [1, L, D]."""
        packing: Packing | FixedPacking | None = settings.get("packing")
        drops = self.training and self.attention_dropout > 0  # which `qerl.layers.attention.attend` refuses
        if packing is None or past_key_values is not None or not _kernel_serves(hidden_states) or drops:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **settings)
        layers = [self.get_submodule(f"{name}_proj") for name in "qkv"]
        # squeeze instead of [0], whose backward pass copies the gradient into zeros.
        heads = (out.squeeze(0).unflatten(-1, (-1, self.head_dim)) for out in products(hidden_states, layers))
        query, key, value = heads
        query, key = self._rotated(query, key, *(part[0] for part in position_embeddings))
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out = attend_packed(query, key, value, packing, self.scaling, window)
        return self.get_submodule("o_proj")(out.flatten(1)[None]), None

    def _rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [L, heads, D], normalised before if the class has norms for them."""
        norms = [norm for name in "qk" if (norm := getattr(self, f"{name}_norm", None)) is not None]
        if norms and not any(parameter.requires_grad for norm in norms for parameter in norm.parameters()):
            return rotate_normed(query, key, norms, cos, sin)
        query, key = (norm(x) for norm, x in zip(norms, (query, key), strict=True)) if norms else (query, key)
        return rotate(query, key, cos, sin)


class PackedQwen2Attention(PackedAttention, Qwen2Attention):
    """Attention of Qwen2 and Qwen2.5."""


class PackedQwen3Attention(PackedAttention, Qwen3Attention):
    """Attention of Qwen3, which normalises queries and keys."""


class PackedQwen3MoeAttention(PackedAttention, Qwen3MoeAttention):
    """Attention of Qwen3-MoE, which computes what that of Qwen3 does."""


class PackedLlamaAttention(PackedAttention, LlamaAttention):
    """Attention of Llama."""


class PackedMistralAttention(PackedAttention, MistralAttention):
    """Attention of Mistral."""


#: transformers' classes that only project, normalise, rotate, attend and project.
_PACKED: dict[type, type[PackedAttention]] = {
    Qwen2Attention: PackedQwen2Attention,
    Qwen3Attention: PackedQwen3Attention,
    Qwen3MoeAttention: PackedQwen3MoeAttention,
    LlamaAttention: PackedLlamaAttention,
    MistralAttention: PackedMistralAttention,
}


def fuse_attentions(model: nn.Module) -> None:
    """Change every attention module of a known class to its subclass for packed sequences on a GPU.

    Only the module's class changes, so its weights, their names, hooks and configuration stay. The classes are named
    in this file, so copies and pickles work.
    """
    for module in model.modules():
        if type(module) in _PACKED:
            module.__class__ = _PACKED[type(module)]
