"""The attention of a block over packed sequences; with kernels for the device it needs no transposed views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from qerl.kernels.packed_sequences import FixedPacking, Packing, attend_packed
from qerl.layers.lora import products


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
        query, key, value = (self._normed(name, one) for name, one in zip("qkv", heads, strict=True))
        cos, sin = position_embeddings
        query, key = rotate(query, key, cos[0], sin[0])
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out = attend_packed(query, key, value, packing, self.scaling, window)
        return self.get_submodule("o_proj")(out.flatten(1)[None]), None

    def _normed(self, name: str, heads: Tensor) -> Tensor:
        """Queries, keys or values [L, heads, D], normalised if the class has a norm for them."""
        norm = getattr(self, f"{name}_norm", None)
        return heads if norm is None else norm(heads)


class PackedQwen2Attention(PackedAttention, Qwen2Attention):
    """Attention of Qwen2 and Qwen2.5."""


class PackedQwen3Attention(PackedAttention, Qwen3Attention):
    """Attention of Qwen3, which normalises queries and keys."""


class PackedLlamaAttention(PackedAttention, LlamaAttention):
    """Attention of Llama."""


class PackedMistralAttention(PackedAttention, MistralAttention):
    """Attention of Mistral."""


#: transformers' classes that only project, normalise, rotate, attend and project.
_PACKED: dict[type, type[PackedAttention]] = {
    Qwen2Attention: PackedQwen2Attention,
    Qwen3Attention: PackedQwen3Attention,
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
