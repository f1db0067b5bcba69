"""Verifiable rewards and their advantages: the weighted sum of parts, and its deviation from the mean of a group."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from qerl.data.grading import is_correct, well_formed
from qerl.data.records import Problem
from qerl.host.imports import call
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.run import RewardSettings

# Verifiable rewards: the weighted sum of parts, each a pure function of a completion.

#: The largest magnitude of a custom reward: advantages are float32, in which squares of larger ones overflow.
LARGEST = 1e15


@dataclass(frozen=True)
class Answer:
    """The input of rewards: a completion's text, its number of tokens and their limit.

    In the text a model's thinking stands between `<think>` and `</think>`, whatever its own delimiters are, and begins
    with `<think>` if the chat template began it in the prompt. Other special tokens are left out.
    """

    text: str
    tokens: int
    limit: int


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """DAPO's soft penalty: 0 up to limit - buffer tokens, then falling linearly to -1 at the limit."""
    return min(0.0, (limit - buffer - tokens) / buffer) if buffer else 0.0


def custom_reward(answer: Answer, problem: Problem, function: str, timeout: float | None = None) -> float:
    """The user's `module:function` for a completion. Raises ValueError unless its magnitude is at most `LARGEST`."""
    value = call(function, answer, problem, key="reward.function", limit=timeout)
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch, such as the bool of a comparison
        value = value.item()
    magnitude: Any = abs(value) if isinstance(value, Real) else math.nan
    if not magnitude <= LARGEST:  # NaN isn't
        raise ValueError(
            f"reward.function {function} returned {value!r} for problem {problem.id}; it must return a number "
            f"between {-LARGEST:g} and {LARGEST:g}"
        )
    return float(value)


def reward_parts(
    answer: Answer,
    problem: Problem,
    record_format: RecordFormat,
    settings: RewardSettings,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> dict[str, float]:
    """The parts of a completion's reward, by name.

    correct, 0 or 1: the final answer is right. format, 0 or 1: the answer is stated once, in the data set's form.
    overlong, -1 to 0: see `overlong_penalty`. custom: the value of the user's function, if the settings name one.
    """
    parts = {
        "correct": float(is_correct(answer.text, problem.answer, record_format, form, units)),
        "format": float(well_formed(answer.text, record_format, form, units)),
        "overlong": overlong_penalty(answer.tokens, answer.limit, settings.overlong_buffer),
    }
    if settings.function:
        parts["custom"] = custom_reward(answer, problem, settings.function, settings.timeout)
    return parts


def total(parts: dict[str, float], settings: RewardSettings) -> float:
    """The weighted sum of the parts."""
    return sum(getattr(settings, part) * value for part, value in parts.items())


# Group-relative advantages (paper Eq. 4).


def differ(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Whether the rewards [P, G] of each group differ in float32, as bool [P]; equal rewards give no gradient.

    A difference only in float64 comes from the rounding of a sum, such as 0.1 + 0.2 and 0.3.
    """
    rewards = rewards_PG.float()
    return (rewards != rewards[:, :1]).any(dim=1)


def group_advantages(rewards_PG: torch.Tensor, scale: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """Advantages (r - mean) / (std + eps) within each group; without `scale` (Dr. GRPO), r - mean.

    rewards [P, G] float -> advantages [P, G]. The standard deviation is the unbiased one, and eps is added to it, both
    as in TRL. Unlike in TRL, a group of equal rewards gets exactly 0: the rounded mean of equal numbers may differ from
    them.
    """
    # The other completions of a problem are the baseline, in place of a value function.
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    advantages = centred / (rewards_PG.std(dim=1, keepdim=True) + eps) if scale else centred
    return advantages.masked_fill(~differ(rewards_PG)[:, None], 0.0)
