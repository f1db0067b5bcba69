"""Prompts, which RL, supervised training and evaluation all build with these functions, and where thinking ends."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qerl.data.grading import TAGS
from qerl.data.records import DataError, Message, Problem
from qerl.results.schema import PreparedDataset

#: A user's message that stands for any, and the policy's answer to it.
_PROBE, _ANSWER = "What is 2+3", "That makes 5"


@dataclass(frozen=True)
class TemplateInput:
    """What a chat template gets besides the messages: the date that it states, None for today, and its variables."""

    date: datetime.date | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(meta: PreparedDataset) -> TemplateInput:
        """That of a prepared data set."""
        return TemplateInput(meta.date, meta.template_arguments)


_NOTHING = TemplateInput()


def prompt_text(question: str, instruction: str) -> str:
    """The user's message: the question, then the data set's instruction on a separate line."""
    return f"{question}\n{instruction}" if instruction else question


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, question: str | Problem, instruction: str, given: TemplateInput = _NOTHING
) -> list[int]:
    """The token ids of the chat up to the start of the policy's answer, of a problem or of a user's message alone."""
    return prompts_ids(tokenizer, [question], instruction, given)[0]


def prompts_ids(
    tokenizer: PreTrainedTokenizerBase,
    questions: Iterable[str | Problem],
    instruction: str,
    given: TemplateInput = _NOTHING,
) -> list[list[int]]:
    """`prompt_ids` of each question."""
    return texts_ids(tokenizer, [_message_text(tokenizer, question, instruction, given) for question in questions])


def texts_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The token ids of texts without special tokens, in one call: it takes a fifth of the time, and uses all cores."""
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    return list(encoded["input_ids"])


def messages_of(question: str | Problem, instruction: str = "") -> list[dict[str, str]]:
    """The chat that asks a problem, or a user's message alone, with the instruction at its end."""
    context, asked = ((), question) if isinstance(question, str) else (question.context, question.question)
    messages = (*context, ("user", prompt_text(asked, instruction)))
    return [{"role": role, "content": content} for role, content in messages]


def _message_text(
    tokenizer: PreTrainedTokenizerBase,
    question: str | Problem,
    instruction: str = "",
    given: TemplateInput = _NOTHING,
) -> str:
    """The text of the chat up to the start of the policy's answer."""
    return chat_text(tokenizer, messages_of(question, instruction), given=given)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, str]],
    add_generation_prompt: bool = True,
    given: TemplateInput = _NOTHING,
) -> str:
    """Render a chat by the tokenizer's template, which the library runs in a sandbox.

    A template that states the date (`strftime_now`) states that of `given`. Raises `DataError` for a template that is
    missing or broken, accesses more than text, drops the system message, or has no such variable as `given`.
    """
    name, template = tokenizer.name_or_path, str(tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {name!r} has no chat template; use a chat checkpoint, or add chat_template.jinja to its "
            "folder"
        )
    # Jinja ignores variables that a template doesn't read, and so misspelt ones.
    read = {each for each in given.arguments if re.search(rf"\b{re.escape(each)}\b", template)}
    if unknown := [each for each in given.arguments if each not in read - {"messages", "add_generation_prompt"}]:
        raise DataError(
            f"template_arguments: the chat template of {name!r} has no variable {unknown[0]!r} that a data set gives; "
            "correct it, or leave it out"
        )
    # As a variable of the template it hides the library's function of this name, which reads the clock.
    moment = datetime.datetime.combine(given.date or datetime.date.today(), datetime.time())
    dated: dict[str, Any] = {"strftime_now": moment.strftime} if "strftime_now" in template else {}
    try:
        text = tokenizer.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, tokenize=False, **dated, **given.arguments
        )
    except (TemplateError, ArithmeticError, TypeError, ValueError) as error:
        raise DataError(f"the chat template of {name!r} fails ({error}); use that of another checkpoint") from None
    if any(message["role"] == "system" and message["content"].strip() not in str(text) for message in chat):
        raise DataError(f"the chat template of {name!r} drops the system message; put its text into the user's message")
    return str(text)


def reply_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    stops: Iterable[str],
    given: TemplateInput = _NOTHING,
) -> str:
    """The text of a chat between two turns of the policy: `messages`, and what the template puts around them.

    `stops` are the texts of the tokens that can end a turn; the policy has drawn one, so it isn't in the text.

    It depends on no earlier message, so that nothing that was sampled is tokenized again, and no template drops
    thinking of earlier turns. Raises `DataError` for a template that drops a message.
    """
    chat = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _ANSWER}, *map(dict, messages)]
    _, answer, text = chat_text(tokenizer, chat, given=given).partition(_ANSWER)
    for message in messages:
        if not answer or message["content"].strip() not in text:
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} drops a message of the role {message['role']!r} "
                "behind an answer; give it another role"
            )
    return text.removeprefix(next((stop for stop in stops if text.startswith(stop)), ""))


def check_template(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise `DataError` unless the chat template renders a user's message, question and instruction, in known tokens.

    `vocab_size` is the number of tokens with an embedding in the model.
    """
    question, instruction = _PROBE, "Answer briefly"
    text = _message_text(tokenizer, question, instruction)
    for part, what in ((question, "question"), (instruction, "instruction")):
        if part not in text:
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} drops the {what} of a user's message (it makes "
                f"{text[:80]!r} of {prompt_text(question, instruction)!r}); use that of another checkpoint"
            )
    highest = max(prompt_ids(tokenizer, question, instruction))
    if highest >= vocab_size:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path!r} uses the token {tokenizer.decode([highest])!r}, whose id "
            f"{highest} is beyond the model's vocab_size={vocab_size}; use the template that belongs to the model"
        )


def longer_than(
    most: int,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    instruction: str,
    given: TemplateInput = _NOTHING,
) -> dict[str, int]:
    """Return the number of tokens of each prompt that has more than `most`, by the problem's id.

    A token is at least a byte of text, so that only long texts have to be tokenized.
    """
    around: dict[tuple[Message, ...], int] = {}
    for problem in problems:
        if problem.context not in around:
            text = _message_text(tokenizer, problem, instruction, given)
            around[problem.context] = len(text.encode()) - len(problem.question.encode())
    long = [problem for problem in problems if len(problem.question.encode()) + around[problem.context] > most]
    tokens = {problem.id: len(prompt_ids(tokenizer, problem, instruction, given)) for problem in long}
    return {id: count for id, count in tokens.items() if count > most}


def check_lengths(longer: Iterable[int], of: int, context: int, max_tokens: int, remedy: str) -> None:
    """Raise `DataError` if there is a prompt, by its number of tokens in `longer`, that leaves no room to answer."""
    if lengths := list(longer):
        raise DataError(
            f"{len(lengths)} of {of} prompts are too long: the longest has {max(lengths)} tokens, and with max_tokens="
            f"{max_tokens} the model's context of {context} has room for {context - max_tokens}; lower max_tokens, "
            f"{remedy}"
        )


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of plain text, without the chat template, after the tokenizer's start token if any."""
    return list(tokenizer.encode(text))


# Where thinking ends: the text of a completion as graders and harnesses read it.
#
# Models delimit their thinking by text or by special tokens, of which decoding leaves nothing, and some chat templates
# begin it in the prompt. Graders know one form: thinking stands between `<think>` and `</think>`, and a completion that
# begins within the thinking has the `<think>` of its prompt.

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


class Thinking:
    """What ends a model's thinking, by its tokenizer and chat template, or by the delimiters that a user `named`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        named: Sequence[str] | None = None,
        given: TemplateInput = _NOTHING,
    ) -> None:
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
            self._turn = _message_text(tokenizer, _PROBE, given=given).rpartition(_PROBE)[2]

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
