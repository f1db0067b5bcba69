"""The device state of steps that verify drafts: the texts in which drafts are found, guesses, and rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from qerl.kernels.decode_state import DecodeState

#: The most tokens of a draft. With the last token they are the rows that a sequence has in a step.
MOST_DRAFTED = 7
#: The most tokens that a match compares, and the fewest that make one.
LONGEST_MATCH, LEAST_MATCH = 8, 2
#: The value of places in texts that have no token.
NO_TOKEN = -1
#: A match is length * 2 + (a whole draft follows), times this, + the place behind it.
MATCH_UNIT = 2**40
#: Lengths of a match from which on drafts are counted apart: longer ones are right more often.
LONG_MATCHES = (4, 8)
#: Of so many tested tokens so many are taken to be right before any is tested.
PRIOR_RIGHT, PRIOR_TESTED = 2, 3


class DraftSource(StrEnum):
    """The text in which a draft was found."""

    PROMPT = "prompt"
    COMPLETION = "completion"
    SIBLING = "sibling"
    EARLIER = "earlier"


#: Drafts of one source and one class of lengths are right about equally often. A kind is source * 3 + class.
KINDS = len(DraftSource) * (1 + len(LONG_MATCHES))


@dataclass(frozen=True)
class TextState:
    """Texts of all groups. Before, between and behind texts are LONGEST_MATCH places of NO_TOKEN; place 0 is written to
    and never read.
    """

    tokens: Tensor  # [n] int32, token ids or NO_TOKEN
    #: Of the completion in each slot: the first place of its group's texts, which is the prompt's, those of earlier
    #: completions and of completions, the end, and the place of its own first token; 0 without a completion.
    places: Tensor  # [5, slots + 1] int64
    most: Tensor  # [1] int64, the most tokens of a completion

    @classmethod
    def empty(cls, size: int, slots: int, device: torch.device) -> TextState:
        """Room for `size` tokens and as many completions as slots."""
        return cls(
            tokens=torch.full((size,), NO_TOKEN, dtype=torch.int32, device=device),
            places=torch.zeros(5, slots + 1, dtype=torch.int64, device=device),
            most=torch.zeros(1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class Guesses:
    """Drafts of some slots, and the chance of each of their tokens that it and those before it are right."""

    slots: Tensor  # [B] int64
    live: Tensor  # [B] int64, 1 for a slot with a sequence, else 0
    kind: Tensor  # [B] int64
    tokens: Tensor  # [B, MOST_DRAFTED] int32
    chances: Tensor  # [B, MOST_DRAFTED] float32, 0 behind the draft's end


@dataclass(frozen=True)
class DraftRows:
    """Rows of steps, each decoded as if it were a sequence of its own. Those of a sequence follow each other: its last
    token, then its draft.
    """

    state: DecodeState  # as many slots as rows
    slot: Tensor  # [rows] int64, the slot of each row's sequence; the idle one if it has none
    ahead: Tensor  # [rows] int64, the row's place among the rows of its sequence
    drafted: Tensor  # [rows] int64, the drafted token, which the row feeds if `ahead` > 0
    kind: Tensor  # [rows] int64

    @classmethod
    def empty(cls, count: int, tokens: int, pages: int, device: torch.device) -> DraftRows:
        """`count` idle rows; the sizes are those of `DecodeState.empty`."""
        numbers = torch.zeros(4, count, dtype=torch.int64, device=device)
        return cls(DecodeState.empty(count, tokens, pages, device), *numbers)


@dataclass(frozen=True)
class DraftTotals:
    """Counts of drafted tokens by kind and of steps, which steps add to."""

    tried: Tensor  # [KINDS, 3] int64: verified tokens, right ones, and tested ones, to which only right tokens led
    steps: Tensor  # [3] int64: sequences of all steps, rows without padding, tokens that these gave

    @classmethod
    def empty(cls, device: torch.device) -> DraftTotals:
        """No counts."""
        return cls(*(torch.zeros(*size, dtype=torch.int64, device=device) for size in ((KINDS, 3), (3,))))
