"""Packed attention, registered with transformers, whose blocks call it.

A forward pass with a `Packing` uses packed attention, any other transformers' SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl.kernels.packed_sequences import FixedPacking, Packing, attend_masked, attend_packed
from qerl.layers.structure import structure_of

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
    """Whether query heads can read the KV head that they share in place.

    transformers copies keys and values for each query head if there is a mask, which kernels of GPUs need. PyTorch's
    kernel for CPUs makes the same bits without the copies, which took more time than the attention. With gradients
    the order of their sums would be another one.
    """
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
    made = ids.new_empty(1, 1, 0, 0, dtype=torch.bool)
    output = lm.base_model(input_ids=ids, position_ids=positions, attention_mask=made, use_cache=False, packing=packing)
    return output.last_hidden_state


def _padded_hidden(lm: PreTrainedModel, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """The hidden states [1, L, H] of a row [L], by a batch in which each completion has a copy of its prompt."""
    tokens, mask, places = (torch.from_numpy(part).to(ids.device) for part in packing.padded())
    output = lm.base_model(input_ids=ids[tokens], position_ids=positions[tokens], attention_mask=mask, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)[None, places]


AttentionInterface.register(NAME, attend)


AttentionMaskInterface.register(NAME, sdpa_mask)
