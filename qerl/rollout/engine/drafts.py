"""Drafts: guesses of a completion's next tokens, found where its last tokens occurred before.

Texts are the prompt, the completion itself, its siblings, and completions of the same prompt from earlier calls. Each
new token is indexed once, so a draft costs a few look-ups, however long the texts are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

#: Numbers of last tokens that are looked up, the longest first.
SUFFIXES = (8, 4, 2)
#: The most tokens of a draft. With the last token they are the rows that a sequence has in a step.
MOST_DRAFTED = 7
#: Bounds of the completions that are kept for later calls: of each prompt, and tokens of all prompts.
_KEPT, _KEPT_TOKENS = 16, 2**23


class DraftSource(StrEnum):
    """The text in which a draft was found."""

    PROMPT = "prompt"
    COMPLETION = "completion"
    SIBLING = "sibling"
    EARLIER = "earlier"


@dataclass(frozen=True)
class Draft:
    """Guessed tokens. The first were found in `source`, behind the same last tokens, whose number is `suffix`."""

    tokens: list[int]
    source: DraftSource
    suffix: int


class SuffixIndex:
    """Texts, and for each run of tokens in them the token that followed its latest occurrence."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._following: dict[tuple[int, ...], tuple[int, int]] = {}

    def start(self, before: Sequence[int] = ()) -> int:
        """Add a text and return its number. The last tokens of `before` precede it, but are not themselves indexed."""
        self.texts.append(list(before[-SUFFIXES[0] :]))
        return len(self.texts) - 1

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        text, following = self.texts[number], self._following
        for token in tokens:
            end = len(text)
            for size in SUFFIXES:
                if size <= end:
                    following[tuple(text[end - size :])] = number, end
            text.append(token)

    def find(self, tokens: Sequence[int]) -> tuple[int, int, int] | None:
        """The longest suffix of `tokens` in a text, as (size, text, place of the token that followed it).

        Among occurrences of equal size, the one is taken whose following token was appended last.
        """
        for size in SUFFIXES:
            place = self._following.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None:
                return size, *place
        return None


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


class GroupDrafts:
    """Drafts for the completions of one prompt."""

    def __init__(self, prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> None:
        self._prompt = prompt
        self._before = len(prompt[-SUFFIXES[0] :])
        self._index = SuffixIndex()
        self._first_completion = 1 + len(earlier)
        self._numbers: dict[int, int] = {}
        self._index.extend(self._index.start(), prompt)
        for tokens in earlier:
            self._index.extend(self._index.start(prompt), tokens)

    def know(self, completion: int, tokens: Sequence[int], stops: Collection[int]) -> None:
        """State all tokens of a completion so far. Only those that are new are indexed, and no stop token."""
        if completion not in self._numbers:
            self._numbers[completion] = self._index.start(self._prompt)
        number = self._numbers[completion]
        known = len(self._index.texts[number]) - self._before
        self._index.extend(number, [token for token in tokens[known:] if token not in stops])

    def draft(self, completion: int, most: int) -> Draft | None:
        """At most `most` tokens that may follow a known completion; None without a guess.

        Where a text ends before it has given so many, the guess goes on behind the tokens guessed so far.
        """
        completed = self._numbers[completion]
        last = self._index.texts[completed][-SUFFIXES[0] :]
        match = self._index.find(last) if most > 0 else None
        if match is None:
            return None
        suffix, number, place = match
        draft = Draft(self._index.texts[number][place : place + most], self._source(number, completed), suffix)
        while len(draft.tokens) < most and (match := self._index.find((last + draft.tokens)[-SUFFIXES[0] :])):
            _, number, place = match
            draft.tokens.extend(self._index.texts[number][place : place + most - len(draft.tokens)])
        return draft

    def _source(self, number: int, completed: int) -> DraftSource:
        if number == completed:
            return DraftSource.COMPLETION
        if number == 0:
            return DraftSource.PROMPT
        return DraftSource.SIBLING if number >= self._first_completion else DraftSource.EARLIER
