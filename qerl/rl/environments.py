"""Environments, which reply to a policy's turns with messages and rewards: tools, games, a second try."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from qerl.data.prompts import TemplateInput, Thinking, chat_text, check_lengths, messages_of, reply_text, texts_ids
from qerl.data.records import Problem
from qerl.host.imports import load
from qerl.rl.rewards import number_of
from qerl.settings.base import ConfigError, check_unicode
from qerl.settings.run import EnvironmentSettings

Message = Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """What follows a turn of the policy: messages (`role` and `content`) unless the conversation is done, and a reward.

    Rewards of a conversation's turns are added up.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One conversation's environment. Those of several completions work in threads, side by side."""

    def reset(self, problem: Problem) -> Sequence[Message] | None:
        """Begin; returns messages that follow the problem's prompt, the same for all completions of the problem."""
        ...

    def step(self, text: str) -> Turn:
        """Reply to the text of a turn, as graders read it (`qerl.rl.rewards.Answer`)."""
        ...


@dataclass
class Conversation:
    """A completion's environment, and what has happened there."""

    #: The text before the present turn, and the tokens of the completion before it.
    before: str
    begin: int = 0
    environment: Environment | None = None
    turns: int = 0
    reward: float = 0.0
    #: Seconds that the environment has taken.
    seconds: float = 0.0


class _Threads:
    """Threads that take turn after turn; each turn has one at once, since most tools wait for something.

    To start one for each turn took the sampler 0.1 ms, and its engine decodes nothing while it asks for hundreds. One
    that never ends its turn doesn't keep the process from ending.
    """

    def __init__(self) -> None:
        self._turns: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = Semaphore(0)

    def start(self, turn: Callable[[], None]) -> None:
        self._turns.put(turn)
        if not self._idle.acquire(blocking=False):
            Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            self._turns.get()()
            self._idle.release()


_threads = _Threads()


def _forget_threads() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget_threads)  # a forked process has none of them


@dataclass(frozen=True)
class Conversations:
    """The environments of completions of `problems`, as samplers ask them (`qerl.rollout.sampler.Turns`).

    They have no policy, whose memory a reply that never ends would keep after the run.
    """

    settings: EnvironmentSettings
    tokenizer: PreTrainedTokenizerBase
    #: The most tokens of the policy's context; None without a limit.
    context: int | None
    #: The tokens that end a turn.
    stops: Sequence[int]
    thinking: Thinking
    problems: Sequence[Problem]
    instruction: str
    given: TemplateInput
    _of: dict[tuple[int, int], Conversation] = field(default_factory=dict)
    _outcomes: SimpleQueue[tuple[tuple[int, int], Any]] = field(default_factory=SimpleQueue)
    #: When each turn began for which a reply is missing.
    _began: dict[tuple[int, int], float] = field(default_factory=dict)
    #: What ended the conversations; one error at most.
    _errors: list[Exception] = field(default_factory=list)

    @cached_property
    def _starts(self) -> list[Sequence[Message]]:
        """What the environment of each problem's first completion says before the first turn."""
        for place in range(len(self.problems)):
            self._start((place, 0), partial(self._begin, (place, 0)))
        starts = dict[int, Any]()
        while len(starts) < len(self.problems):
            for key, start in self._ended(0.1):
                del self._began[key]
                starts[key[0]] = start
        return [starts[place] for place in range(len(self.problems))]

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each problem's chat up to the first turn."""
        chats = [messages_of(problem, self.instruction) for problem in self.problems]
        pairs = zip(chats, self._starts, strict=True)
        return [chat_text(self.tokenizer, [*chat, *map(dict, start)], given=self.given) for chat, start in pairs]

    def prompts(self, max_tokens: int) -> list[list[int]]:
        """The token ids of each problem's chat up to the first turn.

        Raises `DataError` if one leaves no room for `max_tokens`: problems were measured without what `reset` says.
        """
        ids = texts_ids(self.tokenizer, self._texts)
        if self.context is not None:
            longer = [len(one) for one in ids if len(one) > self.context - max_tokens]
            check_lengths(longer, len(ids), self.context, max_tokens, f"or what reset of {self.settings.name} adds")
        return ids

    def of(self, prompt: int, number: int) -> Conversation:
        """The conversation of a completion; one that ended no turn has none, and so no reward."""
        return self._of.get((prompt, number), Conversation(""))

    def ask(self, prompt: int, number: int, tokens: Sequence[int]) -> None:
        """See `Turns`."""
        key = prompt, number
        if self._errors:
            self._began[key] = 0.0
            return
        conversation = self._at(*key)
        text = self.thinking.text(tokens[conversation.begin :], conversation.before or self._texts[prompt])
        conversation.begin = len(tokens)
        self._start(key, partial(self._step, key, text))

    def replies(self, wait: float) -> list[tuple[int, int, list[int] | None]]:
        """See `Turns`. After an error all conversations are done, as runs side by side share the sampler, and `check`
        raises it.
        """
        found: list[tuple[int, int, list[int] | None]] = []
        try:
            found = [] if self._errors else self._replies(wait)
        except Exception as error:  # noqa: BLE001 - raised by `check`
            self._errors.append(error)
        if self._errors:
            found = [(*key, None) for key in self._began]
        for prompt, number, _ in found:
            del self._began[prompt, number]
        return found

    def check(self) -> None:
        """Raise what an environment raised, or `ConfigError` for what it gave or for the time that it took."""
        for error in self._errors:
            raise error

    def _replies(self, wait: float) -> list[tuple[int, int, list[int] | None]]:
        outcomes = self._ended(wait)
        texts = [self._reply(key, outcome) for key, outcome in outcomes]
        ids = iter(texts_ids(self.tokenizer, [text for text in texts if text is not None]))
        replies = []
        for ((prompt, number), _), text in zip(outcomes, texts, strict=True):
            reply = None if text is None else next(ids)
            conversation = self._of[prompt, number]
            conversation.before, conversation.begin = text or "", conversation.begin + len(reply or ())
            replies.append((prompt, number, reply))
        return replies

    def _at(self, prompt: int, number: int) -> Conversation:
        return self._of.setdefault((prompt, number), Conversation(""))

    def _name(self, prompt: int, number: int) -> str:
        turn = self._at(prompt, number).turns + 1
        return f"environment {self.settings.name} for problem {self.problems[prompt].id} in turn {turn}"

    def _begin(self, key: tuple[int, int]) -> list[dict[str, str]]:
        """Make and reset the environment of a conversation; returns what it says before the first turn."""
        self._at(*key).environment = environment = load(self.settings.name)(**self.settings.arguments)
        start = environment.reset(self.problems[key[0]].copy())
        return _messages(() if start is None else start, f"reset of {self.settings.name}")

    def _step(self, key: tuple[int, int], text: str) -> Turn:
        """Have an environment reply to a turn, and be made before its first one."""
        conversation = self._at(*key)
        if conversation.environment is None and self._begin(key) != self._starts[key[0]]:
            raise ValueError("reset gave other messages than for another completion; make them depend on `problem`")
        assert conversation.environment is not None
        return conversation.environment.step(text)

    def _start(self, key: tuple[int, int], work: Callable[[], Any]) -> None:
        """Begin work of an environment in a thread; `_ended` has its outcome."""
        self._began[key] = time.monotonic()
        _threads.start(partial(self._work, key, work))

    def _work(self, key: tuple[int, int], work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - raised where the outcome is awaited
            outcome = error
        self._at(*key).seconds += time.perf_counter() - began
        self._outcomes.put((key, outcome))

    def _ended(self, wait: float) -> list[tuple[tuple[int, int], Any]]:
        """The outcomes of work that has ended. If none has, this waits up to `wait` seconds for the first.

        Raises what an environment raised, and ConfigError where one exceeds its limit of time or ends the process.
        """
        outcomes: list[tuple[tuple[int, int], Any]] = []
        try:
            outcomes.append(self._outcomes.get(block=wait > 0, timeout=wait or None))
            while True:
                outcomes.append(self._outcomes.get_nowait())
        except Empty:
            pass
        for key, outcome in outcomes:
            # Not passed on: it would end the thread that draws for several runs, for which the others wait.
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                did = f"raised {outcome!r}"
                if isinstance(outcome, SystemExit):
                    did = f"ended the process with code {outcome.code!r}"
                raise ConfigError(f"{self._name(*key)} {did}; raise an error there") from outcome
            if isinstance(outcome, Exception):
                outcome.add_note(f"{self._name(*key)} raised this; mend it, or what it depends on, and start again")
                raise outcome
        limit, now, ended = self.settings.timeout, time.monotonic(), {key for key, _ in outcomes}
        for key, began in self._began.items():
            if limit is not None and now - began > limit and key not in ended:
                raise ConfigError(
                    f"{self._name(*key)} wasn't done after {limit:g} s; mend it, or raise environment.timeout: then "
                    "the run goes on from its last checkpoint"
                )
        return outcomes

    def _reply(self, key: tuple[int, int], outcome: Any) -> str | None:
        """The text up to the policy's next turn; None if there is none."""
        name, conversation = self._name(*key), self._of[key]
        if not isinstance(outcome, Turn):
            raise ConfigError(f"{name} returned {outcome!r} from step; return a qerl.rl.environments.Turn")
        conversation.reward += number_of(outcome.reward, name, "") or 0.0
        conversation.turns += 1
        if outcome.done or conversation.turns == self.settings.turns:
            return None
        messages = _messages(outcome.messages, name)
        if not messages:
            raise ConfigError(f"{name} gave no messages, and isn't done; give a message, or done=True")
        stops = [str(self.tokenizer.decode([id])) for id in self.stops]
        return reply_text(self.tokenizer, messages, stops, self.given)


def _messages(messages: Sequence[Message], name: str) -> list[dict[str, str]]:
    """Messages of an environment that are well-formed."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ConfigError(f"{name} gave the messages {messages!r}; give a list of {{'role': ..., 'content': ...}}")
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ConfigError(f"{name} gave the message {message!r}; give {{'role': ..., 'content': ...}}, both texts")
        check_unicode(message["content"], f"{name}: the content of a message")
    return [dict(message) for message in messages]
