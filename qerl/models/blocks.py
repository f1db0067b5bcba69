"""The parts of a block around its linear layers: norms with noise, and attention over packed sequences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from qerl.kernels.packed_sequences import FixedPacking, Packing, attend_masked, attend_packed
from qerl.models.lora import products
from qerl.models.structure import Structure, epsilon_of, structure_of

# RMSNorm of a block with noise `z` on its weight `w`; `qerl.rl.noise` draws the noise.
#
# The noise is in a separate buffer, so it never accumulates.

#: What reads a norm's output: the projections of a block's attention, or the MLP's.
ROLES = ("attention", "mlp")


def _forward(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qerl.kernels.triton.norms.norm_forward`.

    Products of a 16-bit and a float32 tensor are computed in float32 and rounded when they are written, which saves
    separate casts.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide)
    inverse = torch.rsqrt(norm.square() / hidden.shape[-1] + epsilon)
    return torch.mul(hidden * inverse, weight, out=torch.empty_like(hidden)), inverse


def _backward(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, needs_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `qerl.kernels.triton.norms.norm_backward`."""
    normed = hidden * inverse
    product = grad * normed
    grad_weight = product.flatten(0, -2).sum(0) if needs_weight else None
    along = (product @ weight)[..., None] / hidden.shape[-1]
    grad_hidden = (grad * weight).addcmul_(normed, along, value=-1)
    return torch.mul(grad_hidden, inverse, out=torch.empty_like(hidden)), grad_weight


def _passes(hidden: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward pass, by Triton on a GPU, and by PyTorch elsewhere and for float64."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return _forward, _backward
    from qerl.kernels.triton.norms import norm_backward, norm_forward

    return norm_forward, norm_backward


class _ScaledNorm(torch.autograd.Function):
    """w x / rms(x), computed in float32. It saves the input for the backward pass, without float32 copies."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out, inverse = _passes(hidden)[0](hidden, weight, epsilon)
        ctx.save_for_backward(hidden, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, inverse = ctx.saved_tensors
        grads = _passes(hidden)[1](grad, hidden, weight, inverse, ctx.needs_input_grad[1])
        return *grads, None


class NoisyRMSNorm(nn.Module):
    """RMSNorm with weight `w + z`, computed in float32 for any dtype of the input.

    A norm of the form (1 + w) x / rms(x) has the `offset` 1. `layer` and `role` say where it is.
    """

    noise: torch.Tensor

    def __init__(
        self, weight: nn.Parameter, variance_epsilon: float, offset: float = 0.0, layer: int = 0, role: str = ROLES[0]
    ) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = variance_epsilon
        self.offset = offset
        self.layer = layer
        self.role = role
        self.register_buffer("noise", torch.zeros_like(weight, dtype=torch.float32), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden` [..., features] over the last dimension, and return the same dtype."""
        weight = self.weight.float() + self.noise
        return _ScaledNorm.apply(hidden, weight + self.offset if self.offset else weight, self.variance_epsilon)


def make_noisy(model: nn.Module, structure: Structure) -> None:
    """Replace the norms that feed a block's projections by `NoisyRMSNorm`; their weights stay the same parameters."""
    for name, (layer, role) in structure.noisy_norms().items():
        norm = model.get_submodule(name)
        if not isinstance(norm, NoisyRMSNorm):
            weight, offset = norm.get_parameter("weight"), structure.offset or 0.0
            model.set_submodule(name, NoisyRMSNorm(weight, epsilon_of(norm), offset, layer, role))


def noisy_norms(model: nn.Module) -> dict[tuple[int, str], list[NoisyRMSNorm]]:
    """The noisy norms by layer and role, in order. With PEFT they are the original and its trained copy."""
    places: dict[tuple[int, str], list[NoisyRMSNorm]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, NoisyRMSNorm):
            places[module.layer, module.role].append(module)
    return dict(sorted(places.items()))


def noise_norm(model: nn.Module) -> float:
    """The norm of all present z of `model` concatenated; 0 without noise."""
    noises = (module.noise for module in model.modules() if isinstance(module, NoisyRMSNorm))
    return math.sqrt(sum(float(noise.double().square().sum()) for noise in noises))


# Packed attention, registered with transformers, whose blocks call it.
#
# A forward pass with a `Packing` uses packed attention, any other transformers' SDPA.

NAME = "qerl"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | FixedPacking | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention: query [1, heads, L, D], key and value [1, KV heads, L, D] -> [1, L, heads, D]."""
    sinks, cap = settings.get("s_aux"), settings.get("softcap")
    if packing is None and (sinks is not None or cap is not None):
        queries, keys = query.shape[2], key.shape[2]
        seen = attention_mask
        if seen is None:
            seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        scale = settings["scaling"]
        if cap is None:
            out = attend_masked(query, key, value, seen, scale, sinks)
        else:
            out = _attend_capped(query, key, value, seen, scale, cap, settings.get("dropout", 0.0))
        return out.transpose(1, 2).contiguous(), None
    if packing is None:
        if _shares_heads(query, attention_mask, settings):
            scale = settings.get("scaling")
            out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if settings.get("dropout"):
        raise ValueError("packed attention has no dropout; set attention_dropout=0 in the model's config.json")
    # squeeze instead of [0], whose backward pass copies the gradient into zeros.
    query, key, value = (row.squeeze(0).transpose(0, 1) for row in (query, key, value))
    window = settings.get("sliding_window")
    return attend_packed(query, key, value, packing, settings["scaling"], window, sinks)[None], None


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float, dropout: float
) -> Tensor:
    """Attention [B, heads, Q, D] as `attend_masked`, with scores s replaced by cap tanh(s / cap)."""
    query = query.unflatten(1, (key.shape[1], -1))
    scores = cap * (query @ key[:, :, None].mT * (scale / cap)).tanh()
    # Not by infinity: no key is seen from padding.
    scores = scores.masked_fill(~seen[:, :, None], torch.finfo(scores.dtype).min)
    weights = softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (nn.functional.dropout(weights, dropout) @ value[:, :, None]).flatten(1, 2)


def _shares_heads(query: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> bool:
    """Whether query heads can read the KV head that they share in place."""
    # transformers copies keys and values for each query head if there is a mask, which kernels of GPUs need. PyTorch's
    # kernel for CPUs makes the same bits without the copies, which took more time than the attention. With gradients
    # the order of their sums would be another one.
    plain = not settings.get("dropout") and settings.get("position_bias") is None
    return query.device.type == "cpu" and mask is not None and plain and not torch.is_grad_enabled()


def use_attend(lm: PreTrainedModel) -> None:
    """Make the blocks of a model call `attend`."""
    if lm.config._attn_implementation != NAME:
        lm.set_attn_implementation(NAME)


def token_hidden(lm: PreTrainedModel, ids: Tensor, positions: Tensor, packing: Packing | FixedPacking) -> Tensor:
    """The last hidden states [1, L, H] of packed `ids` [1, L] at `positions` [1, L].

    Where attention takes no packed rows they are computed as a padded batch.
    """
    use_attend(lm)  # pretraining makes models in its own way
    if not structure_of(lm.config).takes_packed_rows:
        assert isinstance(packing, Packing)  # CUDA graphs serve packed attention alone
        return _padded_hidden(lm, ids[0], positions[0], packing)
    # transformers uses a 4-dimensional mask as it is, so this empty one keeps it from building a mask.
    mask = ids.new_empty(1, 1, 0, 0, dtype=torch.bool)
    output = lm.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, packing=packing)
    return output.last_hidden_state


def _padded_hidden(lm: PreTrainedModel, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """The hidden states [1, L, H] of a row [L], by a batch in which each completion has a copy of its prompt."""
    tokens, mask, places = (torch.from_numpy(part).to(ids.device) for part in packing.padded())
    output = lm.base_model(input_ids=ids[tokens], position_ids=positions[tokens], attention_mask=mask, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)[None, places]


AttentionInterface.register(NAME, attend)


AttentionMaskInterface.register(NAME, sdpa_mask)


# The attention of a block over packed sequences; with kernels for the device it needs no transposed views.


class _Rotation(torch.autograd.Function):
    """Norms of heads by frozen weights, if there are any, then rotary embeddings, by Triton.

    Without norms only cos and sin, which all blocks share, are saved for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, ...], eps: float
    ) -> tuple[Tensor, Tensor]:
        from qerl.kernels.triton.norms import rotate

        ctx.save_for_backward(cos, sin, *weights, *((query, key) if weights else ()))
        ctx.eps = eps
        return rotate(query, key, cos, sin, weights, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from qerl.kernels.triton.norms import rotate

        cos, sin, *saved = ctx.saved_tensors
        query, key = saved[2:] or grads  # without norms their values don't count
        return *rotate(query, key, cos, sin, saved[:2], ctx.eps, grads), None, None, None, None


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: Sequence[nn.Module] = ()
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys [L, heads, D], by transformers' cosines and sines [L, D]; on a GPU.

    The two `norms` of their heads, whose weights are frozen, come first.
    """
    weights = tuple(norm.get_parameter("weight") for norm in norms)
    return _Rotation.apply(query, key, cos, sin, weights, epsilon_of(norms[0]) if norms else 0.0)


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
        drops = self.training and self.attention_dropout > 0  # which `attend` refuses
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
            return rotate(query, key, cos, sin, norms)
        query, key = (norm(x) for norm, x in zip(norms, (query, key), strict=True)) if norms else (query, key)
        return rotate(query, key, cos, sin)


#: Subclasses for packed rows of transformers' classes that only project, normalise, rotate, attend and project.
_PACKED: dict[type, type[PackedAttention]] = {
    kind: type(f"Packed{kind.__name__}", (PackedAttention, kind), {})
    for kind in (Qwen2Attention, Qwen3Attention, Qwen3MoeAttention, LlamaAttention, MistralAttention)
}


def fuse_attentions(model: nn.Module) -> None:
    """Change every attention module of a known class to its subclass for packed sequences on a GPU.

    Only the module's class changes, so its weights, their names, hooks and configuration stay.
    """
    for module in model.modules():
        if type(module) in _PACKED:
            module.__class__ = _PACKED[type(module)]
