"""The device state of decoded sequences and of sampling, which a step reads and advances without the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

#: The most stop tokens that a model may have.
MAX_STOPS = 16
IDLE = -1


@dataclass(frozen=True)
class DecodeState:
    """State of `count` sequences. One more slot is always idle; padding rows of a batch use it."""

    progress: Tensor  # [2, slots + 1] int32: `position` and `drawn`, which the host reads together
    token: Tensor  # [slots + 1] int64, the last token of each sequence
    limit: Tensor  # [slots + 1] int32, number of tokens to draw
    sequence: Tensor  # [slots + 1] int64, key of the sequence's draws
    tokens: Tensor  # [slots + 1, tokens] int32, drawn so far
    logprobs: Tensor  # [slots + 1, tokens] float32, of `tokens`
    pages: Tensor  # [slots + 1, pages] int32, pages of each sequence in the cache; page 0 belongs to none

    @classmethod
    def empty(cls, count: int, tokens: int, pages: int, device: torch.device) -> DecodeState:
        """`count` idle slots for up to `tokens` drawn tokens and `pages` pages each."""
        rows = count + 1
        return cls(
            progress=torch.tensor([[IDLE], [0]], dtype=torch.int32, device=device).repeat(1, rows),
            token=torch.zeros(rows, dtype=torch.int64, device=device),
            limit=torch.zeros(rows, dtype=torch.int32, device=device),
            sequence=torch.zeros(rows, dtype=torch.int64, device=device),
            tokens=torch.zeros(rows, tokens, dtype=torch.int32, device=device),
            logprobs=torch.zeros(rows, tokens, dtype=torch.float32, device=device),
            pages=torch.zeros(rows, pages, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        """The number of slots for sequences, which is also the index of the idle slot."""
        return len(self.token) - 1

    @property
    def position(self) -> Tensor:
        """Position of the last token of each slot, or IDLE, [slots + 1] int32."""
        return self.progress[0]

    @property
    def drawn(self) -> Tensor:
        """Tokens drawn so far in each slot, including those before an interruption, [slots + 1] int32."""
        return self.progress[1]


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters on the device, so that a captured graph reads their present values."""

    scale: Tensor  # [2] float32: 1 / temperature, and the weight of the noise (0: greedy)
    seed: Tensor  # [1] int64
    top_p: Tensor  # [1] float32
    top_k: Tensor  # [1] int64; the largest integer without truncation
    stops: Tensor  # [MAX_STOPS] int32, padded with -1

    @classmethod
    def empty(cls, device: torch.device) -> SamplingState:
        """A state with default values, which `set` then changes."""
        return cls(
            scale=torch.ones(2, device=device),
            seed=torch.zeros(1, dtype=torch.int64, device=device),
            top_p=torch.ones(1, device=device),
            top_k=torch.ones(1, dtype=torch.int64, device=device),
            stops=torch.full((MAX_STOPS,), -1, dtype=torch.int32, device=device),
        )

    def set(self, *, temperature: float, seed: int, top_p: float, top_k: int, stops: Collection[int]) -> None:
        """Set the parameters. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 don't truncate."""
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"the model has {len(stops)} stop tokens, but the native engine supports {MAX_STOPS}; use engine=vllm"
            )
        self.scale.copy_(torch.tensor([1 / (temperature or 1.0), float(temperature > 0)]))
        self.seed.fill_(as_signed(seed))
        self.top_p.fill_(max(top_p, torch.finfo(torch.float32).tiny))  # rounded to 0 it would keep no token
        self.top_k.fill_(top_k or torch.iinfo(torch.int64).max)
        padded = [*sorted(stops), *[-1] * (MAX_STOPS - len(stops))]
        self.stops.copy_(torch.tensor(padded, dtype=torch.int32))


def as_signed(value: int) -> int:
    """The signed 64-bit integer with the lowest 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63
