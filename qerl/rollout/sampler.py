"""What every sampler offers: completions with the log-probabilities of the policy that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qerl.policy.policy import Policy


@dataclass(frozen=True)
class SamplingParams:
    """How `count` completions of each prompt are drawn.

    The completion c of prompt p depends on (seed, first + p's index, c) and the policy alone: a batch may be drawn in
    parts. `temperature=0` is greedy.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    count: int = 1
    seed: int = 0
    #: Index of the first prompt in the whole batch.
    first: int = 0
    #: Stop tokens end nothing: every completion has `max_tokens` tokens, as benches need it.
    ignore_eos: bool = False
    #: Tokens of each completion of each prompt, at most `max_tokens`. A sampler learns of such an end as of a stop
    #: token: when it comes.
    lengths: tuple[tuple[int, ...], ...] | None = None
    #: Tokens of each completion of each prompt, which come in place of drawn ones, with the policy's log-probabilities.
    #: They end the completion as `lengths` do.
    replay: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    def limit(self, prompt: int, completion: int) -> int:
        """Tokens after which a completion ends if no stop token comes before."""
        if self.replay:
            return min(len(self.replay[prompt][completion]), self.max_tokens)
        return min(self.lengths[prompt][completion], self.max_tokens) if self.lengths else self.max_tokens


@dataclass(frozen=True)
class Completion:
    """One completion: tokens (a stop token included), log-probability of each, and whether a stop token ended it.

    Log-probabilities are those of the untruncated distribution at the sampling temperature (at 1 for greedy).
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool


class Sampler(Protocol):
    """Draws completions from a policy, until one of its stop tokens or `max_tokens`."""

    @property
    def served(self) -> str:
        """Engine, kernel and weights that completions come from, in words: it goes into results."""
        ...

    def sync(self) -> None:
        """Take over the policy's adapter and norms, noise included, as they are now."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """Return `params.count` completions for each prompt (token ids, no padding), in the order of the prompts."""
        ...


def refuse_lengths(params: SamplingParams) -> None:
    """Raise ValueError if completions have lengths or tokens of their own; for samplers that can't give them."""
    if params.lengths is not None or params.replay is not None:
        raise ValueError("this sampler draws freely, with one limit for all completions; use the native engine")


def stop_tokens(policy: Policy, params: SamplingParams) -> frozenset[int]:
    """Tokens that end a completion."""
    return frozenset() if params.ignore_eos else frozenset(policy.stop_token_ids)
