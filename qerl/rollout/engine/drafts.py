"""Texts on the device, from which drafts come: guesses of a completion's next tokens.

They are the prompt, the completion itself, its siblings, and completions of the same prompt from earlier calls. The
texts of a group lie one behind the other, so that one pass over them finds where a completion's last tokens occurred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.draft_state import LONGEST_MATCH, NO_TOKEN, TextState
from qerl.rollout.engine.transfer import upload

#: Bounds of the completions that are kept for later calls: of each prompt, and tokens of all prompts.
_KEPT, _KEPT_TOKENS = 16, 2**23


class EarlierCompletions:
    """Completions of earlier calls by prompt, such as those of earlier epochs; the oldest prompts are forgotten."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], deque[list[int]]] = {}
        self._tokens = 0

    def of(self, prompt: Sequence[int]) -> Sequence[list[int]]:
        """The kept completions of a prompt, the oldest first."""
        return self._kept.get(tuple(prompt), ())

    def add(self, prompt: Sequence[int], completions: Sequence[list[int]]) -> None:
        """Keep completions of a prompt, without their stop tokens."""
        kept = self._kept.pop(tuple(prompt), None) or deque(maxlen=_KEPT)
        self._tokens -= sum(map(len, kept))
        kept.extend(completions)
        self._tokens += sum(map(len, kept))
        self._kept[tuple(prompt)] = kept  # at the end: dictionaries keep the order of insertion
        while self._tokens > _KEPT_TOKENS:
            self._tokens -= sum(map(len, self._kept.pop(next(iter(self._kept)))))


@dataclass(frozen=True)
class TextLayout:
    """The texts of a call's groups as they lie on the device, before a token is drawn.

    `tokens` [n] int32 have NO_TOKEN where tokens are to come, and LONGEST_MATCH times between texts. `groups`
    [prompts, 4] have for each group the places of its first text (the prompt), of earlier completions and of
    completions, and its end. A completion begins every `stride` places, behind the last tokens of its prompt.
    """

    tokens: np.ndarray
    groups: np.ndarray
    stride: int
    max_tokens: int

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], count: int, max_tokens: int, earlier: EarlierCompletions
    ) -> TextLayout:
        """Lay out the texts of `count` completions of each prompt."""
        gap, stride = [NO_TOKEN] * LONGEST_MATCH, 2 * LONGEST_MATCH + max_tokens
        parts, groups, end = [np.array(gap)], [], len(gap)  # place 0 is written to and never read
        for prompt in prompts:
            before = [*gap, *prompt][-LONGEST_MATCH:]
            kept = [token for tokens in earlier.of(prompt) for token in (*before, *tokens, *gap)]
            blocks = np.full((count, stride), NO_TOKEN)
            blocks[:, :LONGEST_MATCH] = before
            group = [np.array([*gap, *prompt, *gap]), np.array(kept), blocks.ravel()]
            groups.append([end, *(end + np.cumsum([len(part) for part in group]))])
            parts += group
            end = groups[-1][-1]
        tokens = np.concatenate([*parts, gap]).astype(np.int32)
        return cls(tokens, np.array(groups), stride, max_tokens)

    def places(self, group: int, completion: int) -> list[int]:
        """The places of a completion's group, as `groups` has them, and that of its own first token."""
        first = self.groups[group, 2] + completion * self.stride + LONGEST_MATCH
        return [*self.groups[group].tolist(), int(first)]


class Texts:
    """The texts of a call on the device, for up to `size` tokens; steps read and extend `state`."""

    def __init__(self, size: int, slots: int, device: torch.device) -> None:
        self.state = TextState.empty(size, slots, device)
        self._layout: TextLayout | None = None

    @property
    def size(self) -> int:
        """The number of tokens for which there is room."""
        return len(self.state.tokens)

    def fill(self, layout: TextLayout) -> None:
        """Replace all texts; no slot has one then."""
        self._layout = layout
        self.state.tokens[: len(layout.tokens)].copy_(upload(layout.tokens, torch.int32, self.state.tokens.device))
        self.state.places.zero_()
        self.state.most.fill_(layout.max_tokens)

    def enter(self, slots: Tensor, completions: Sequence[tuple[int, int]]) -> None:
        """State which completions, given by group and number, are in `slots`."""
        assert self._layout is not None
        places = [self._layout.places(*completion) for completion in completions]
        self.state.places[:, slots] = upload(places, torch.int64, slots.device).T
