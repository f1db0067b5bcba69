"""What the scheduler knows on the host: completions, groups of them, and looks at their progress."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from qerl.kernels.decode_state import IDLE
from qerl.rollout.engine.transfer import Download

#: The most decode steps between two looks for finished sequences; a look's result arrives while the next steps run.
MOST_STEPS = 8
#: Bytes of weights that steps read between two looks. They take an H200 some 3 ms, and a look takes the host 0.5 ms
#: (docs/lab/rollouts.md).
_LOOK_BYTES = 10e9


def steps_between_looks(weight_bytes: int) -> int:
    """Decode steps between two looks for finished sequences: 1 with weights of 7 GB and more, 2 with 7B in NVFP4, and 8
    below 1.3 GB.

    A finished sequence keeps its slot until a look's result is read, and the host mustn't be slower than the steps. The
    number depends on no clock, so a rollout can be repeated to the bit.
    """
    return min(max(round(_LOOK_BYTES / weight_bytes), 1), MOST_STEPS)


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
