"""Attention over packed sequences: one row of tokens without padding, each prompt once before all its completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

#: Features that are added to heads with sinks; kernels of GPUs need a multiple of it.
SINK_FEATURES = 8


@dataclass(frozen=True)
class Packing:
    """The pieces of a row, in order. `prompts` is None for a prompt, and for a completion its prompt's index."""

    lengths: tuple[int, ...]
    prompts: tuple[int | None, ...]
    queries_ends: Tensor  # [pieces + 1] int32, cumulative lengths of the pieces' queries, from 0
    keys_ends: Tensor  # [pieces + 1] int32, cumulative lengths of the pieces' keys, prompts' keys included

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Sequence[int | None], device: torch.device) -> Packing:
        """The packing of pieces with at least one token each."""
        widths = _widths(lengths, prompts)
        queries, keys = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (lengths, widths))
        return cls(tuple(lengths), tuple(prompts), queries, keys)

    @property
    def widths(self) -> list[int]:
        """Number of keys of each piece, its prompt's included."""
        return _widths(self.lengths, self.prompts)

    def padded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The row as a padded batch of whole sequences, for attention that takes no packed rows.

        Returns the tokens of the row [B, T], with 0 as padding. Returns bool [B, T] too, which of them are no padding,
        and the place [L] of each token in the flat batch. Of the copies of a prompt the last one counts.
        """
        ends = [0, *accumulate(self.lengths)]
        pieces = [np.arange(first, end) for first, end in pairwise(ends)]
        sequences = [
            piece if prompt is None else np.concatenate([pieces[prompt], piece])
            for number, (piece, prompt) in enumerate(zip(pieces, self.prompts, strict=True))
            if number not in self.prompts
        ]
        tokens = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
        mask, places = np.zeros(tokens.shape, dtype=bool), np.empty(ends[-1], dtype=np.int64)
        for number, sequence in enumerate(sequences):
            tokens[number, : len(sequence)], mask[number, : len(sequence)] = sequence, True
            places[sequence] = number * tokens.shape[1] + np.arange(len(sequence))
        return tokens, mask, places

    @property
    def longest(self) -> int:
        """The most queries of a piece."""
        return max(self.lengths)

    @property
    def widest(self) -> int:
        """The most keys of a piece."""
        return max(self.widths)

    @cached_property
    def copies(self) -> KeyPlaces:
        """The places of the pieces' keys."""
        return KeyPlaces.of(self.lengths, self.prompts, self.keys_ends.device)


@dataclass(frozen=True)
class FixedPacking:
    """A packing of tensors that a CUDA graph reads, which are filled for each row; flash attention alone serves it."""

    longest: int  # at least the queries of the longest piece
    widest: int  # at least the keys of the widest piece
    queries_ends: Tensor  # [pieces + 1] int32, as in `Packing`; further pieces are empty
    keys_ends: Tensor
    copies: KeyPlaces


@dataclass(frozen=True)
class KeyPlaces:
    """Places of a row's tokens among the keys of all pieces; index tensors are int64."""

    sources: Tensor  # [keys] the token of each key
    own: Tensor  # [L] the key of each token in its own piece
    shared: Tensor  # [S] the tokens of prompts
    places: Tensor  # [copies, S] the keys of these tokens, in order; the first one where there are fewer copies
    missing: Tensor | None  # [copies, S] bool, where there are fewer copies; None if nowhere

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Sequence[int | None], device: torch.device) -> KeyPlaces:
        """The places of the keys of pieces, as in `Packing.of`."""
        keys = [0, *accumulate(_widths(lengths, prompts))]
        tokens = [np.arange(first, end) for first, end in pairwise([0, *accumulate(lengths)])]
        sources: list[np.ndarray] = []
        copies = {piece: [keys[piece]] for piece, prompt in enumerate(prompts) if prompt is None}
        for piece, prompt in enumerate(prompts):
            if prompt is not None:
                sources.append(tokens[prompt])
                copies[prompt].append(keys[piece])
            sources.append(tokens[piece])
        own = [np.arange(end - length, end) for end, length in zip(keys[1:], lengths, strict=True)]
        most = max(map(len, copies.values()))
        places, missing = [], []
        for prompt, firsts in copies.items():
            padded = np.array([*firsts, *firsts[:1] * (most - len(firsts))])
            places.append(padded[:, None] + np.arange(lengths[prompt]))
            missing.append(np.repeat((np.arange(most) >= len(firsts))[:, None], lengths[prompt], 1))
        uneven = any(part.any() for part in missing)
        return cls(
            sources=torch.from_numpy(np.concatenate(sources)).to(device),
            own=torch.from_numpy(np.concatenate(own)).to(device),
            shared=torch.from_numpy(np.concatenate([tokens[prompt] for prompt in copies])).to(device),
            places=torch.from_numpy(np.hstack(places)).to(device),
            missing=torch.from_numpy(np.hstack(missing)).to(device) if uneven else None,
        )


# flex_attention would compile anew for new shapes. Each completion's keys are gathered as the prompt's and its own,
# and the causal mask is aligned to the last key.
def all_keys(row: Tensor, copies: KeyPlaces) -> Tensor:
    """The keys or values of all pieces, concatenated along dimension 0 in one write.

    The gradients of a prompt's copies are summed in one operation: to add them one by one in 16 bits would round each
    time.
    """
    return _AllKeys.apply(row, copies)


class _AllKeys(torch.autograd.Function):
    """See `all_keys`. One operation in place of one a piece: pieces are many, and short in small policies."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, copies: KeyPlaces) -> Tensor:
        ctx.copies = copies
        return row.index_select(0, copies.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        copies: KeyPlaces = ctx.copies
        grad_row = grad.index_select(0, copies.own)
        shared = grad.index_select(0, copies.places.flatten()).unflatten(0, copies.places.shape)
        if copies.missing is not None:
            shared.masked_fill_(copies.missing[..., None, None], 0.0)
        return grad_row.index_copy_(0, copies.shared, shared.sum(0)), None


def _widths(lengths: Sequence[int], prompts: Sequence[int | None]) -> list[int]:
    return [n if p is None else lengths[p] + n for n, p in zip(lengths, prompts, strict=True)]


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing | FixedPacking,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention [L, heads, D] of query [L, heads, D] over each token's prompt and earlier tokens of its piece.

    With a `window`, a token sees that many tokens, itself included. key and value are [L, KV heads, D]. `sinks` [heads]
    are scores of a further key without a value. It uses flash attention on a GPU in 16 bits, and SDPA piece by piece
    elsewhere and with sinks.
    """
    if isinstance(packing, FixedPacking) or (
        sinks is None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    ):
        # One call over all pieces; its causal mask aligns the last query of a piece with its last key. There is no soft
        # cap of scores: flash attention has none, and Gemma 3 and later models don't need it.
        keys, values = all_keys(key, packing.copies), all_keys(value, packing.copies)
        out: Tensor = _FlashAttention.apply(query, keys, values, packing, scale, window)
        return out
    return _by_piece(query, key, value, packing, scale, window, sinks)


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """SDPA [B, heads, Q, D] of query [B, heads, Q, D] over key and value [B, KV heads, K, D] that are `seen`.

    A sink becomes the score of a further key: one more feature of queries has it, which that key alone reads.
    """
    if sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    size = query.shape[-1]
    scores = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = pad(torch.cat([query, scores], -1), (0, SINK_FEATURES - 1))
    unit = pad(key.new_ones(1), (size, SINK_FEATURES - 1))
    key = torch.cat([unit.expand(*key.shape[:2], 1, -1), pad(key, (0, SINK_FEATURES))], 2)
    value, seen = pad(value, (0, SINK_FEATURES, 1, 0)), pad(seen, (1, 0), value=True)
    out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[..., :size]


class _FlashAttention(torch.autograd.Function):
    """PyTorch's flash attention over sequences of variable length, with a backward pass that repeats to the bit."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing | FixedPacking,
        scale: float,
        window: int | None,
    ) -> Tensor:
        ends = packing.queries_ends, packing.keys_ends
        # Flash attention's causal mask and a window exclude each other; a window without later keys is causal too.
        ctx.options = packing.longest, packing.widest, 0.0, window is None
        ctx.named = {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ends, *ctx.options, False, **ctx.named
        )
        ctx.save_for_backward(query, key, value, out, lse, *ends, state, unused)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, state, unused = ctx.saved_tensors
        # The usual backward pass adds each block of keys' share of the queries' gradient atomically. With three blocks,
        # some 300 keys, the order of the sums changes the last bits, and no run repeats. `varlen_attn` can't choose the
        # other algorithm, which PyTorch takes from a global switch, without its effect on all other operations.
        with _deterministic():
            grads = torch.ops.aten._flash_attention_backward(
                grad.contiguous(), *tensors, *ctx.options, state, unused, **ctx.named
            )
        return *grads, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """PyTorch's switch of deterministic algorithms, for single operations."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _by_piece(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    if query.is_cuda:  # fused kernels take a mask only with as many key as query heads; others keep all weights
        key, value = (row.repeat_interleave(query.shape[1] // row.shape[1], 1) for row in (key, value))
    keys, values = (all_keys(row, packing.copies).split(packing.widths) for row in (key, value))
    outs = []
    for piece in zip(query.split(packing.lengths), keys, values, strict=True):
        q, k, v = (row.transpose(0, 1)[None] for row in piece)
        last = k.shape[2] - q.shape[2]  # the last key that the first query sees
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(last)
        if window is not None:
            seen = seen.triu(last - window + 1)
        outs.append(attend_masked(q, k, v, seen, scale, sinks))
    return torch.cat(outs, 2).squeeze(0).transpose(0, 1)
