"""What the scheduler knows on the host: completions, groups of them, and looks at their progress."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from qerl.kernels.decode_state import IDLE
from qerl.rollout.engine.transfer import Download


@dataclass
class DecodedSequence:
    """An unfinished completion. `tokens` and `logprobs` are those that have arrived on the host.

    The launched steps draw a token each, unless a stop token has ended the completion, and those of drafts that are
    right. `steps` and `drafted` count them; `right` drafted tokens of the first `judged` are known to be.
    """

    index: int
    key: int
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int = IDLE
    pages: list[int] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    right: int = 0
    judged: int = 0

    @property
    def sure(self) -> int:
        """The tokens of all launched steps, whichever drafts are right that nobody has looked at."""
        return self.steps + self.right

    @property
    def drawn(self) -> int:
        """The most tokens of all launched steps."""
        return self.sure + self.drafted - self.judged


@dataclass(frozen=True)
class ProgressLook:
    """A look at the slots: the sequences in them with `steps` and `drafted` at that time, and the searches launched.

    `progress` has the slots' positions and numbers of tokens, then the expected right tokens.
    """

    active: dict[int, tuple[DecodedSequence, int, int]]
    searches: int
    progress: Download


@dataclass
class WaitingGroup:
    """Completions that wait to continue the same tokens; `pages` and `logits` are set once these are computed.

    `row` is then that of the delta nets' states after these tokens.
    """

    prompt: list[int]
    waiting: deque[DecodedSequence]
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    row: int = IDLE
