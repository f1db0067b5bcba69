"""Attention over packed sequences: one row of tokens, no padding, a prompt once before all its completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

#: torch 2.11 takes fewer heads of keys than of queries without being told.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Packing:
    """The pieces of a row, in order: a prompt, or a completion behind the prompt `prompts` names by its place."""

    lengths: tuple[int, ...]
    prompts: tuple[int | None, ...]
    queries_ends: Tensor  # [pieces + 1] int32, where each piece's queries end, from 0
    keys_ends: Tensor  # [pieces + 1] int32, where its keys end once its prompt's stand before its own

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Sequence[int | None], device: torch.device) -> Packing:
        """The packing of pieces that have at least one token each."""
        widths = _widths(lengths, prompts)
        queries, keys = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (lengths, widths))
        return cls(tuple(lengths), tuple(prompts), queries, keys)

    @property
    def widths(self) -> list[int]:
        """Keys of each piece."""
        return _widths(self.lengths, self.prompts)

    def parts(self, row: Tensor, dim: int) -> list[list[Tensor]]:
        """What the keys or values of each piece consist of, out of a `row` of all along dimension `dim`.

        All copies of a prompt come from one `expand`, whose backward pass adds their gradients up at once. Added one by
        one in 16 bits, they would be rounded each time.
        """
        pieces = row.split(self.lengths, dim)
        copies: dict[int, Iterator[Tensor]] = {}
        parts = []
        for place, (piece, prompt) in enumerate(zip(pieces, self.prompts, strict=True)):
            if prompt is None:
                copies[place] = iter(piece.expand(1 + self.prompts.count(place), *piece.shape).unbind(0))
                parts.append([next(copies[place])])
            else:
                parts.append([next(copies[prompt]), piece])
        return parts

    def keys(self, row: Tensor, dim: int) -> list[Tensor]:
        """The keys or values of each piece out of a `row` of all, along dimension `dim`."""
        return [torch.cat(parts, dim) if len(parts) > 1 else parts[0] for parts in self.parts(row, dim)]

    def all_keys(self, row: Tensor) -> Tensor:
        """The keys or values of all pieces, one piece behind the other along dimension 0, written once."""
        return torch.cat([part for parts in self.parts(row, 0) for part in parts])


def _widths(lengths: Sequence[int], prompts: Sequence[int | None]) -> list[int]:
    return [n if p is None else lengths[p] + n for n, p in zip(lengths, prompts, strict=True)]


def attend_packed(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Each token of query [L, heads, D] sees its prompt and what comes before it in its own piece; [L, heads, D].

    key and value are [L, KV heads, D]. Flash attention on a GPU in 16 bits, SDPA piece by piece elsewhere.
    """
    flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    return (_flash if flash else _by_piece)(query, key, value, packing, scale)


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """One call over all pieces; its causal mask is aligned so that the last query of a piece sees its last key."""
    out = varlen_attn(
        query,
        packing.all_keys(key),
        packing.all_keys(value),
        packing.queries_ends,
        packing.keys_ends,
        max(packing.lengths),
        max(packing.widths),
        scale=scale,
        window_size=(-1, 0),
        **_GQA,
    )
    assert isinstance(out, Tensor)
    return out


def _by_piece(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    query, key, value = (row.transpose(0, 1)[None] for row in (query, key, value))
    if query.is_cuda:  # whose kernels take a mask only for as many heads of keys; else all weights are kept
        key, value = (row.repeat_interleave(query.shape[1] // row.shape[1], 1) for row in (key, value))
    pieces = zip(query.split(packing.lengths, 2), packing.keys(key, 2), packing.keys(value, 2), strict=True)
    outs = []
    for q, k, v in pieces:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        outs.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(outs, 2).squeeze(0).transpose(0, 1)
