"""Prompts through the policy's own forward pass, their keys and values into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from qerl.models.policy import Policy


class _PagedLayer(CacheLayerMixin):
    """Hands keys and values of a prompt on to attention as they are, and puts them into their pages."""

    def __init__(self, cache: Tensor, page: Tensor, place: Tensor) -> None:
        """cache [pages, 2, Hkv, PAGE, D]; page and place in it [B, L] of each token."""
        super().__init__()
        self._cache, self._page, self._place = cache, page, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, L, D]."""
        self._cache[self._page, 0, :, self._place] = key_states.transpose(1, 2)
        self._cache[self._page, 1, :, self._place] = value_states.transpose(1, 2)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys: a prompt attends to itself alone."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the prompt."""
        return 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


@torch.no_grad()
def prefill(policy: Policy, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], cache: Tensor) -> Tensor:
    """Logits [prompts, V] after each prompt; `cache` [layers, pages, 2, Hkv, PAGE, D] then holds it in its `pages`.

    Prompts are padded on the right, where a causal model doesn't look; the padding's keys go to page 0.
    """
    device, size = policy.device, cache.shape[-2]
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    held = -(-longest // size)
    table = torch.tensor([[*own, *[0] * (held - len(own))] for own in pages], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device)
    inside = positions < lengths[:, None]
    page = torch.where(inside, table[:, positions // size], 0)
    place = (positions % size).expand_as(page)
    layers: list[Any] = [_PagedLayer(layer, page, place) for layer in cache]
    with policy.autocast():
        hidden = policy.lm.model(ids, past_key_values=Cache(layers=layers), use_cache=True).last_hidden_state
        return policy.lm.get_output_embeddings()(hidden[torch.arange(len(prompts), device=device), lengths - 1])
