"""Packed attention, registered with transformers, whose blocks call it.

A forward pass with a `Packing` uses packed attention, any other transformers' SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl.kernels.packed_sequences import Packing, attend_packed

NAME = "qerl"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention: query [1, heads, L, D], key and value [1, KV heads, L, D] -> [1, L, heads, D]."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if settings.get("dropout") or settings.get("sliding_window"):
        raise ValueError(
            "packed attention has neither dropout nor a sliding window; set attention_dropout=0 and "
            "use_sliding_window=false in the model's config.json"
        )
    # squeeze instead of [0], whose backward pass copies the gradient into zeros.
    query, key, value = (row.squeeze(0).transpose(0, 1) for row in (query, key, value))
    return attend_packed(query, key, value, packing, settings["scaling"])[None], None


def packed_hidden(lm: PreTrainedModel, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """The last hidden states [1, L, H] of packed `ids` [1, L] at `positions` [1, L]."""
    if lm.config._attn_implementation != NAME:
        lm.set_attn_implementation(NAME)
    # transformers uses a 4-dimensional mask as it is, so this empty one keeps it from building a mask.
    made = ids.new_empty(1, 1, 0, 0, dtype=torch.bool)
    output = lm.model(input_ids=ids, position_ids=positions, attention_mask=made, use_cache=False, packing=packing)
    return output.last_hidden_state


AttentionInterface.register(NAME, attend)


AttentionMaskInterface.register(NAME, sdpa_mask)
