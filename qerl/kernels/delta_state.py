"""What a gated delta net is made of, and what it keeps of each sequence: a few inputs and a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a delta net: `key` heads for queries and keys of `key_dim`, `value` heads of `value_dim`.

    Channels C are queries, keys and values. Consecutive value heads share a query and a key head.
    """

    key: int
    value: int
    key_dim: int
    value_dim: int
    convolution: Tensor  # [C, taps], of the newest token last
    log_rate: Tensor  # [value], logarithm of the decay's rate
    rate_bias: Tensor  # [value]
    norm: Tensor  # [value_dim], weight of the norm of each head's output
    eps: float

    @property
    def channels(self) -> int:
        """C, the inputs of the convolution."""
        return 2 * self.key * self.key_dim + self.value * self.value_dim

    @property
    def taps(self) -> int:
        """Tokens that the convolution reads, the present one included."""
        return self.convolution.shape[1]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        return self.key * self.key_dim, self.key * self.key_dim, self.value * self.value_dim


@dataclass(frozen=True)
class DeltaState:
    """What one delta net keeps of the sequences in R rows."""

    recent: Tensor  # [R, taps - 1, C], inputs of the convolution at the last tokens, zeros before the first one
    recurrent: Tensor  # [R, value, key_dim, value_dim] float32


@dataclass(frozen=True)
class DeltaStates:
    """The states of all delta nets of a model: a row for each slot, one that is idle, and one that is held.

    The held row has the state after a prompt for completions of its group that still wait for a slot.
    """

    recent: Tensor  # [nets, slots + 2, taps - 1, C]
    recurrent: Tensor  # [nets, slots + 2, value, key_dim, value_dim] float32

    @classmethod
    def empty(cls, heads: DeltaHeads, nets: int, slots: int, dtype: torch.dtype, device: torch.device) -> DeltaStates:
        """Zeros for `slots` sequences; `dtype` is that of the model."""
        recent = torch.zeros(nets, slots + 2, heads.taps - 1, heads.channels, dtype=dtype, device=device)
        size = (nets, slots + 2, heads.value, heads.key_dim, heads.value_dim)
        return cls(recent, torch.zeros(size, dtype=torch.float32, device=device))

    @property
    def held(self) -> int:
        """The row of a waiting group."""
        return self.recent.shape[1] - 1

    @property
    def idle(self) -> int:
        """The row of the idle slot."""
        return self.held - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.recent.nbytes + self.recurrent.nbytes

    def nets(self) -> Iterator[DeltaState]:
        """The states of each net."""
        return map(DeltaState, self.recent, self.recurrent)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` [n] to rows `target` [n]; all are read before one is written."""
        for net in self.nets():
            net.recent[target] = net.recent[source]
            net.recurrent[target] = net.recurrent[source]


def state_bytes(heads: DeltaHeads, dtype: torch.dtype) -> int:
    """Bytes of a sequence's state in one net."""
    recurrent = heads.value * heads.key_dim * heads.value_dim * torch.float32.itemsize
    return recurrent + (heads.taps - 1) * heads.channels * dtype.itemsize
