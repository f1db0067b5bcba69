"""Packed rows of a few fixed sizes, in tensors that stay in place, as CUDA graphs need them.

A row is filled up with padding tokens, in pieces of their own that no completion sees. Their outputs are read by
nothing, so their gradients are exact zeros, which change no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.packed_sequences import FixedPacking, KeyPlaces, Packing
from qerl.rl.sequence_packing import MicroBatch

_CPU = torch.device("cpu")
#: The least tokens of a row, and the least queries and keys of its longest pieces.
_LEAST_TOKENS, _LEAST_PIECE = 256, 64


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def row_tokens_of(count: int) -> int:
    """The least of the sizes 256, 384, 512, 768, 1024, ... above `count`: two an octave."""
    least = max(count + 1, _LEAST_TOKENS)
    size = _power_of_two(least)
    return 3 * size // 4 if 3 * size // 4 >= least else size


@dataclass(frozen=True)
class RowSize:
    """What the tensors of a row have room for. There are few sizes, so that graphs are few."""

    tokens: int
    states: int
    pieces: int
    keys: int
    copies: int
    longest: int
    widest: int

    @classmethod
    def of(cls, batch: MicroBatch) -> RowSize:
        """The least size for a micro-batch. There is a padding token at least, to which padding indices point."""
        packing, count = batch.packing, batch.ids.numel()
        tokens = row_tokens_of(count)
        longest = _power_of_two(max(packing.longest, _LEAST_PIECE))
        padding = tokens - count
        return cls(
            tokens=tokens,
            states=max(_power_of_two(len(batch.targets_M)), tokens),
            pieces=max(_power_of_two(len(packing.lengths) + -(-padding // longest)), tokens // 8),
            keys=max(_power_of_two(sum(packing.widths) + padding), 4 * tokens),
            copies=_power_of_two(1 + max(map(packing.prompts.count, set(packing.prompts) - {None}), default=0)),
            longest=longest,
            widest=_power_of_two(max(packing.widest, _LEAST_PIECE)),
        )


class FixedRow:
    """The inputs of a forward pass over packed sequences, of one size; `fill` writes those of a micro-batch."""

    def __init__(self, size: RowSize, device: torch.device) -> None:
        whole = {"dtype": torch.long, "device": device}
        ends = {"dtype": torch.int32, "device": device}
        self.size = size
        self.ids = torch.zeros(1, size.tokens, **whole)  # type: ignore[call-overload]
        self.positions = torch.zeros(1, size.tokens, **whole)  # type: ignore[call-overload]
        self.states_M = torch.zeros(size.states, **whole)  # type: ignore[call-overload]
        self.packing = FixedPacking(
            longest=size.longest,
            widest=size.widest,
            queries_ends=torch.zeros(size.pieces + 1, **ends),  # type: ignore[call-overload]
            keys_ends=torch.zeros(size.pieces + 1, **ends),  # type: ignore[call-overload]
            copies=KeyPlaces(
                sources=torch.zeros(size.keys, **whole),  # type: ignore[call-overload]
                of_piece=torch.zeros(size.tokens, **whole),  # type: ignore[call-overload]
                shared=torch.zeros(size.tokens, **whole),  # type: ignore[call-overload]
                places=torch.zeros(size.copies, size.tokens, **whole),  # type: ignore[call-overload]
                missing=torch.ones(size.copies, size.tokens, dtype=torch.bool, device=device),
            ),
        )
        self._filled: MicroBatch | None = None

    def fill(self, batch: MicroBatch) -> None:
        """Write the inputs of `batch`, whose size is this one; nothing if they are there already."""
        if self._filled is batch:
            return
        count, last = batch.ids.numel(), self.size.tokens - 1
        for row, values in ((self.ids, batch.ids), (self.positions, batch.positions)):
            row[:, :count].copy_(values)
            row[:, count:] = 0
        # Rows that no completion reads are spread, since gradients of rows with the same index are added in turn.
        chosen = len(batch.states_M)
        spread = count + np.arange(self.size.states - chosen) % (self.size.tokens - count)
        self.states_M[:chosen].copy_(batch.states_M)
        self.states_M[chosen:].copy_(torch.from_numpy(spread))
        self._fill_packing(batch.packing, self.size.tokens - count, last)
        self._filled = batch

    def _fill_packing(self, packing: Packing, padding: int, last: int) -> None:
        pieces = [self.size.longest] * (padding // self.size.longest)
        pieces += [rest] if (rest := padding % self.size.longest) else []
        lengths, prompts = [*packing.lengths, *pieces], [*packing.prompts, *[None] * len(pieces)]
        made = Packing.of(lengths, prompts, _CPU)
        copies = made.copies
        assert self.packing.copies.missing is not None
        for target, ends in (
            (self.packing.queries_ends, made.queries_ends),
            (self.packing.keys_ends, made.keys_ends),
        ):
            target.copy_(_filled_up(ends, len(target), int(ends[-1])))
        self.packing.copies.sources.copy_(_filled_up(copies.sources, self.size.keys, 0))
        self.packing.copies.of_piece.copy_(copies.of_piece)
        self.packing.copies.shared.copy_(_filled_up(copies.shared, self.size.tokens, last))
        placed, missing = copies.places, copies.missing
        if missing is None:
            missing = torch.zeros(placed.shape, dtype=torch.bool)
        room = (0, self.size.tokens - placed.shape[1], 0, self.size.copies - placed.shape[0])
        self.packing.copies.places.copy_(torch.nn.functional.pad(placed, room))
        self.packing.copies.missing.copy_(torch.nn.functional.pad(missing, room, value=True))


def _filled_up(values: Tensor, size: int, filler: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)), value=filler)
