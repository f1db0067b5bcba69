"""The protocol of samplers, which return completions with log-probabilities, and the models that each serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, get_args

from qerl.checkpoints.files import whole_model
from qerl.formats.layouts import KERNEL_FORMATS
from qerl.kernels.state import LEAST_FP8_CAPABILITY, Activation
from qerl.models.policy import Policy
from qerl.models.structure import rope_types, structure_of
from qerl.settings.base import ConfigError, UserError
from qerl.settings.run import EngineSettings


class NotFiniteError(UserError):
    """Log-probabilities of completions are NaN. The message is one sentence for the user."""


@dataclass(frozen=True)
class BatchPart:
    """The prompts of a batch that one of several samplers draws, by their indices.

    It begins with `initial`; without any it draws nothing. Once it has room it draws those that `more` returns, at most
    as many as are asked for, until that returns none. Prompts that it doesn't draw have empty lists of completions.
    """

    initial: Sequence[int]
    more: Callable[[int], Sequence[int]]

    def batches(self, most: int) -> Iterator[Sequence[int]]:
        """The prompts in batches of at most `most`, for a sampler that ends a batch before it begins the next."""
        for start in range(0, len(self.initial), most):
            yield self.initial[start : start + most]
        while self.initial and (numbers := self.more(most)):
            yield numbers


class Turns(Protocol):
    """What replies to completions that end a turn, beside the sampler. A completion is named by its prompt's index and
    its number.
    """

    def ask(self, prompt: int, number: int, tokens: Sequence[int]) -> None:
        """Begin to reply to a completion, whose tokens so far are `tokens`; doesn't wait."""
        ...

    def replies(self, wait: float) -> list[tuple[int, int, list[int] | None]]:
        """The replies that have come, waiting for a first one for at most `wait` seconds.

        A reply is the tokens up to where the policy goes on, or None where the completion is done.
        """
        ...


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for drawing `count` completions of each prompt.

    Completion c of prompt p depends only on the policy and on (seed, index of p, c), so a batch may be drawn in parts.
    `temperature=0` is greedy. With `top_k`, `top_p` is a share of the mass that top-k keeps.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    count: int = 1
    seed: int = 0
    #: Ignore stop tokens, so that every completion has `max_tokens` tokens; for benches.
    ignore_eos: bool = False
    #: Number of tokens of each completion of each prompt, at most `max_tokens`. Samplers treat such an end as a stop
    #: token, which they don't know in advance. With `turns`, it is the number of each turn.
    lengths: tuple[tuple[int, ...], ...] | None = None
    #: Tokens of each completion of each prompt, which replace the drawn ones and get the policy's log-probabilities.
    #: They end a completion as `lengths` do.
    replay: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    #: The prompts to draw; None draws all.
    part: BatchPart | None = None
    #: What replies where a stop token ends a turn, so that the completion goes on behind the reply. `max_tokens` are
    #: the tokens of both. A reply that leaves no room for another token ends the completion as the limit does.
    turns: Turns | None = None

    def limit(self, prompt: int, completion: int) -> int:
        """The number of tokens after which a completion ends, unless a stop token ends it earlier."""
        if self.replay:
            return min(len(self.replay[prompt][completion]), self.max_tokens)
        return min(self.lengths[prompt][completion], self.max_tokens) if self.lengths else self.max_tokens


@dataclass(frozen=True)
class Request:
    """Prompts (token ids, no padding) and how to draw their completions; a cohort's sampler gets one of each run."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    @property
    def numbers(self) -> Sequence[int]:
        """The prompts to begin with, by their indices."""
        return self.params.part.initial if self.params.part else range(len(self.prompts))

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, its prompt included; 0 without prompts."""
        return max(map(len, self.prompts)) + self.params.max_tokens if self.prompts else 0


@dataclass(frozen=True)
class Completion:
    """One completion: tokens (a stop token included), log-probability of each, and whether a stop token ended it.

    Log-probabilities are taken from the untruncated distribution at the sampling temperature (at 1 for greedy).
    `replies` are the places of what an environment replied, whose tokens nobody drew; their log-probabilities are 0.
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    replies: tuple[range, ...] = ()

    @property
    def turns(self) -> list[range]:
        """The places of the drawn tokens, by turn."""
        ends = [*(reply.start for reply in self.replies), len(self.token_ids)]
        return [range(*turn) for turn in zip([0, *(reply.stop for reply in self.replies)], ends, strict=True)]

    @property
    def drawn(self) -> int:
        """The number of drawn tokens."""
        return sum(map(len, self.turns))

    @property
    def mask(self) -> list[bool]:
        """Whether each token was drawn."""
        replied = set(chain(*self.replies))
        return [place not in replied for place in range(len(self.token_ids))]


@dataclass(kw_only=True)
class Draft:
    """A completion while it is drawn: the tokens that are known, and their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: Tokens that replace the drawn ones, from the first token on.
    given: Sequence[int] = ()
    replies: list[range] = field(default_factory=list)
    #: Whether a reply had no room.
    cut: bool = False

    def goes_on(self, reply: list[int] | None, most: int) -> bool:
        """Take a reply, after which a completion of at most `most` tokens goes on or not."""
        begin, self.cut = len(self.tokens), reply is not None and len(self.tokens) + len(reply) >= most
        if reply is None or self.cut:
            return False
        self.replies.append(range(begin, begin + len(reply)))
        self.given = [*self.tokens, *reply]
        return True

    def completion(self, stops: frozenset[int]) -> Completion:
        """The completion, now that it is done."""
        for reply in self.replies:
            self.logprobs[reply.start : reply.stop] = [0.0] * len(reply)
        finished = bool(self.tokens) and self.tokens[-1] in stops and not self.cut
        return Completion(self.tokens, self.logprobs, finished, tuple(self.replies))


class Sampler(Protocol):
    """Draws completions from a policy, each until one of the policy's stop tokens or `max_tokens`."""

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences that are decoded together; others wait."""
        ...

    @property
    def served(self) -> str:
        """Description of engine, kernels and weights, which results store."""
        ...

    def sync(self) -> None:
        """Update the sampler to the policy's present adapter and norms, noise included."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Return `params.count` completions for each prompt (token ids, no padding), in the order of the prompts."""
        ...


def refuse_nan(groups: Iterable[Sequence[Completion]]) -> None:
    """Raise `NotFiniteError` if a log-probability of completions is NaN."""
    if any(math.isnan(sum(completion.logprobs)) for group in groups for completion in group):
        raise NotFiniteError(
            "log-probabilities of completions are not finite, because a weight is NaN or infinite or numbers overflow; "
            "where weights are trained lower optimizer.learning_rate or use dtype=float32"
        )


def stop_tokens(policy: Policy, params: SamplingParams) -> frozenset[int]:
    """The tokens that end a completion."""
    return frozenset() if params.ignore_eos else frozenset(policy.stop_token_ids)


# Which samplers serve a model: the eager sampler any that is handled, the engine and vLLM some of them.

#: Values of `model_type` with which vLLM is tested.
_VLLM = ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text")
#: Those with delta nets, whose convolution has the model's activation.
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
#: Those with which the engine is tested.
_ENGINE = (*_VLLM, "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_HYBRIDS)
#: A type of rotary embeddings whose frequencies depend on the length of the text.
_CHANGING_ROPE = "dynamic"


def refused_by_engine(config: Any, weights: str | None = None) -> str | None:
    """A sentence that says why the engine doesn't serve a model of this configuration and weights; None if it does."""
    kind = getattr(config, "model_type", "")
    if kind not in _ENGINE:
        return f"the native engine supports {', '.join(_ENGINE)}, not {kind!r}"
    if weights not in (None, "bf16", *KERNEL_FORMATS) and hasattr(config, "num_experts_per_tok"):
        return f"the native engine has no grouped product of {weights} experts"
    if _CHANGING_ROPE in rope_types(config):
        return f"the native engine has no {_CHANGING_ROPE} rotary positions"
    if (activation := activation_of(config)) not in get_args(Activation):
        return f"the native engine supports {' and '.join(get_args(Activation))} as the activation, not {activation!r}"
    if kind in _HYBRIDS and activation != "silu":
        return f"the native engine supports silu as the activation of delta nets, not {activation!r}"
    if structure_of(config).logit_cap is not None:
        return "the native engine has no soft cap of logits"
    return None


def refused_fp8_cache(capability: tuple[int, int] | None) -> str | None:
    """A sentence that says why a GPU of this capability, or with None a CPU, has no KV cache in FP8; None if it has."""
    if capability is None or capability >= LEAST_FP8_CAPABILITY:
        return None  # the engine runs on CPUs in tests
    have, least = (".".join(map(str, one)) for one in (capability, LEAST_FP8_CAPABILITY))
    return (
        f"rollout.native.kv_cache_dtype=fp8 needs a GPU of compute capability {least} (RTX 40, L40S) or newer, and "
        f"this one has {have}; use auto"
    )


def activation_of(config: Any) -> str:
    """The name of the activation of a model's MLPs, as its configuration has it."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def refused_by_vllm(config: Any) -> str | None:
    """A sentence that says why vLLM doesn't sample for a model of this configuration; None if it does."""
    kind = getattr(config, "model_type", "")
    if kind not in _VLLM:
        return f"sampling by vLLM is tested with {', '.join(_VLLM)}, not {kind!r}"
    if structure_of(config).logit_cap is not None:
        return "sampling by vLLM is tested with models without a soft cap of logits"
    folder = getattr(config, "name_or_path", "")
    if folder and whole_model(Path(folder)):
        return f"sampling by vLLM is tested with models of text alone, and {folder} is one of images and text"
    return None


def check_served(config: Any, settings: EngineSettings) -> None:
    """Raise `ConfigError` if the settings select vLLM and it doesn't sample for a model of this configuration."""
    if settings.engine != "native" and (refusal := refused_by_vllm(config)):
        raise ConfigError(f"{refusal}; use {settings.engine_key}=native")
