"""Where thinking ends: the text of a completion as graders and harnesses read it.

Models delimit their thinking by text or by special tokens, of which decoding leaves nothing, and some chat templates
begin it in the prompt. Graders know one form: thinking stands between `<think>` and `</think>`, and a completion that
begins within the thinking has the `<think>` of its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from qerl.data.answers import TAGS
from qerl.data.prompts import chat_text

_OPEN, _CLOSE = TAGS[:2]
#: A delimiter whose name says that thinking begins, such as `[THINK]`, `<reasoning>` and `<|begin_of_thought|>`.
_NAMED = re.compile(r"[<\[\u25c1]\|?[\w:.-]*(?:think|reason|thought)[\w:.-]*\|?[>\]\u25b7]", re.IGNORECASE)
#: What makes a closing delimiter of an opening one.
_CLOSING = (
    *((bracket, f"{bracket}/") for bracket in ("<|", "<", "[", "\u25c1")),
    *(("begin", "end"), ("BEGIN", "END"), ("start", "end"), ("START", "END")),
)
#: The tokens of the harmony format (gpt-oss), in which each message names its channel.
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
_HEADER = re.compile(
    r"(?:<\|start\|>[^<]*)?(?:<\|channel\|>([^<]*)(?:<\|message\|>)?|<\|message\|>)",
)
#: A user's message that stands for any.
_PROBE = "What is 2+3"


class Thinking:
    """What ends a model's thinking, by its tokenizer and chat template, or by the delimiters that a user `named`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, named: Sequence[str] | None = None) -> None:
        self._tokenizer = tokenizer
        special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        template = str(tokenizer.chat_template or "")
        self.has_channels = named is None and all(token in added or token in template for token in _HARMONY[1:])
        self.pairs = [(_OPEN, _CLOSE)]
        self.pairs += [(named[0], named[1])] if named else _pairs(added, template)
        shown = {*TAGS, *_HARMONY[: 3 * self.has_channels], *(tag for pair in self.pairs for tag in pair)}
        #: The special tokens that the text of a completion lacks.
        self.hidden = {id for id, content in special.items() if content not in shown}
        #: The end of every prompt, after the user's message.
        self._turn = ""
        if template:
            self._turn = chat_text(tokenizer, [{"role": "user", "content": _PROBE}]).rpartition(_PROBE)[2]

    @property
    def begins_in_prompt(self) -> bool:
        """Whether the chat template begins the thinking."""
        return self._within(self._turn)

    @property
    def summary(self) -> str:
        """What ends the thinking, as a line for the user."""
        ends = [*(["<|channel|>final"] if self.has_channels else []), *(closing for _, closing in self.pairs)]
        begun = "the chat template begins it in the prompt" if self.begins_in_prompt else "a completion may begin it"
        return f"thinking ends at {' or '.join(ends)} ({begun}), and what follows may state the answer"

    def written(self, ids: Iterable[int]) -> str:
        """The text of tokens with the delimiters of thinking and without other special tokens."""
        return str(self._tokenizer.decode([id for id in ids if id not in self.hidden]))

    def text(self, ids: Iterable[int], prompt: str) -> str:
        """The text of a completion (token ids) as graders read it; `prompt` is its prompt with special tokens."""
        within = self._within(prompt)
        text = self._marked(self.written(ids), within)
        return _OPEN + text if within and not text.lstrip().startswith(_OPEN) else text

    def _within(self, prompt: str) -> bool:
        """Whether a prompt ends within the thinking."""
        if prompt.rstrip().endswith(tuple(opening for opening, _ in self.pairs)):
            return True
        text = self._marked(self._turn if prompt.endswith(self._turn) else "", False)
        return text.rfind(_OPEN) > text.rfind(_CLOSE)

    def _marked(self, text: str, within: bool) -> str:
        """The text with `<think>` and `</think>` in place of a model's own delimiters."""
        if self.has_channels:
            text = "".join(_of_channels(text, within))
        for opening, closing in self.pairs[1:]:
            text = text.replace(opening, _OPEN).replace(closing, _CLOSE)
        return text


def _pairs(added: Sequence[str], template: str) -> Iterator[tuple[str, str]]:
    """The pairs of delimiters, besides `<think>`, that a tokenizer or its chat template has."""
    for opening in dict.fromkeys([*filter(_NAMED.fullmatch, added), *_NAMED.findall(template)]):
        closings = (opening.replace(part, closing, 1) for part, closing in _CLOSING if part in opening)
        close = next((each for each in closings if each in added or each in template), None)
        if close and opening != _OPEN:
            yield opening, close


def _of_channels(text: str, within: bool) -> Iterator[str]:
    """The parts of a text of harmony messages: all channels but `final` are thinking."""
    done = 0
    for header in _HEADER.finditer(text):
        yield text[done : header.start()]
        done = header.end()
        channel = header.group(1)
        if channel is None:  # a message without a channel goes on in that of the one before
            continue
        final = channel.split()[:1] == ["final"]
        if final == within:
            yield _CLOSE if final else _OPEN
            within = not final
    yield text[done:]
