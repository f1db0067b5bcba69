"""Verifiable rewards and their advantages: the weighted sum of parts, and its deviation from the mean of a group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch

from qerl.data.grading import credit, well_formed
from qerl.data.prompts import messages_of
from qerl.data.records import Problem
from qerl.host.imports import call, guarded, load, results_of, takes_batches
from qerl.settings.base import ConfigError
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.run import RewardSettings

# Verifiable rewards: the weighted sum of parts, each a pure function of a completion.

#: The largest magnitude of a reward of the user's: advantages are float32, in which squares of larger ones overflow.
LARGEST = 1e15


@dataclass(frozen=True)
class Answer:
    """The input of rewards: a completion's text, its number of tokens and their limit, and the tokens' ids.

    In the text a model's thinking stands between `<think>` and `</think>`, whatever its own delimiters are, and begins
    with `<think>` if the chat template began it in the prompt. Other special tokens are left out.
    """

    text: str
    tokens: int
    limit: int
    token_ids: Sequence[int] = ()


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """DAPO's soft penalty: 0 up to limit - buffer tokens, then falling linearly to -1 at the limit."""
    return min(0.0, (limit - buffer - tokens) / buffer) if buffer else 0.0


def reward_parts(
    answer: Answer,
    problem: Problem,
    record_format: RecordFormat,
    settings: RewardSettings,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> dict[str, float | None]:
    """The project's own parts of a completion's reward, by name.

    correct, 0 or 1: the final answer is right; a task of reasoning_gym gives from 0 to 1. format, 0 or 1: the answer is
    stated once, in the data set's form. overlong, -1 to 0: see `overlong_penalty`.
    """
    return {
        "correct": credit(answer.text, problem.answer, record_format, form, units),
        "format": float(well_formed(answer.text, record_format, form, units)),
        "overlong": overlong_penalty(answer.tokens, answer.limit, settings.overlong_buffer),
    }


def function_parts(
    settings: RewardSettings, asked: Sequence[tuple[Problem, Answer]], step: int, instruction: str = ""
) -> list[dict[str, float | None]]:
    """The parts of the user's functions, by name, for each completion with its problem; None leaves it out.

    Raises ValueError unless each is None or of a magnitude of at most `LARGEST`.
    """
    parts: list[dict[str, float | None]] = [{} for _ in asked]
    for name, function in settings.functions.items() if asked else ():
        key, path, limit = f"reward.functions.{name}", function.function, function.timeout
        own = [(problem.copy(), answer) for problem, answer in asked]
        if takes_batches(load(path)):
            values = _of_batch(key, path, limit, own, step, instruction)
        else:
            values = _of_each(key, path, limit, own, step)
        for part, value, (problem, _) in zip(parts, values, asked, strict=True):
            part[name] = number_of(value, f"{key} {path}", _where(step, problem))
    return parts


def _where(step: int, problem: Problem) -> str:
    return f" for problem {problem.id} at step {step}"


def _of_each(key: str, path: str, limit: float | None, asked: Sequence[tuple[Problem, Answer]], step: int) -> list[Any]:
    """What a function of one completion gives each; if it is `async`, its calls run side by side within one limit."""
    values = []
    for problem, answer in asked:
        values.append(call(path, answer, problem, key=key, limit=limit, where=_where(step, problem)))
    if any(map(inspect.iscoroutine, values)):
        values = guarded(partial(results_of, values), f"{key} {path}", limit, f" at step {step}")
    return values


def _of_batch(
    key: str,
    path: str,
    limit: float | None,
    asked: Sequence[tuple[Problem, Answer]],
    step: int,
    instruction: str,
) -> list[Any]:
    """What a function in TRL's signature gives each completion. Its texts are chats where the records' prompts are."""
    chats = [messages_of(problem, instruction) for problem, _ in asked]
    is_chat = [isinstance(problem.record.get("prompt"), list) for problem, _ in asked]
    columns = dict.fromkeys(column for problem, _ in asked for column in problem.record)
    given: dict[str, list[Any]] = {
        **{column: [problem.record.get(column) for problem, _ in asked] for column in columns},
        "prompts": [chat if of_chat else chat[-1]["content"] for chat, of_chat in zip(chats, is_chat, strict=True)],
        "completions": [
            [{"role": "assistant", "content": answer.text}] if of_chat else answer.text
            for (_, answer), of_chat in zip(asked, is_chat, strict=True)
        ],
        "completion_ids": [list(answer.token_ids) for _, answer in asked],
    }
    # TRL has these as arguments of their own, in the plural.
    given = {name: values for name, values in given.items() if name not in ("prompt", "completion")}
    parameters = inspect.signature(load(path)).parameters.values()
    named = {each.name: each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    if lacking := [name for name, each in named.items() if each.default is each.empty and name not in given]:
        raise ConfigError(
            f"{key} {path} asks for {lacking[0]!r}, which no column of the records is called; there are "
            f"{', '.join(map(str, columns))}"
        )
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        given = {name: values for name, values in given.items() if name in named}
    problems = f"problems {asked[0][0].id} to {asked[-1][0].id}"
    where = f" for {problems} at step {step}"
    values = guarded(partial(load(path), **given), f"{key} {path}", limit, where)
    if inspect.iscoroutine(values):
        [values] = guarded(partial(results_of, [values]), f"{key} {path}", limit, where)
    if not hasattr(values, "__len__") or isinstance(values, (str, Mapping)) or len(values) != len(asked):
        count = f"{len(values)} values" if hasattr(values, "__len__") else f"{values!r}"
        raise ValueError(
            f"{key} {path} returned {count} for {problems} at step {step}; it must return a list of {len(asked)}, one "
            "value for each completion"
        )
    return list(values)


def number_of(value: Any, function: str, where: str) -> float | None:
    """A value that a function of the user gave, as a number."""
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch, such as the bool of a comparison
        value = value.item()
    if hasattr(value, "__len__") and not isinstance(value, str):
        raise ValueError(
            f"{function} returned {len(value)} values{where}; rewards of single tokens aren't supported, so give one "
            "number for the completion"
        )
    magnitude: Any = abs(value) if isinstance(value, Real) else math.nan
    if value is not None and not magnitude <= LARGEST:  # NaN isn't
        raise ValueError(
            f"{function} returned {value!r}{where}; it must return a number between {-LARGEST:g} and {LARGEST:g}, or "
            "None to leave the completion out"
        )
    return None if value is None else float(value)


def total(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted sum of the parts that there are; NaN if all that count are None."""
    if weights and all(parts[name] is None for name in weights):
        return math.nan
    return sum(weights.get(name, 0.0) * value for name, value in parts.items() if value is not None)


# Group-relative advantages (paper Eq. 4).


def differ(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Whether the rewards [P, G] of each group differ in float32, as bool [P]; equal rewards give no gradient.

    A difference only in float64 comes from the rounding of a sum, such as 0.1 + 0.2 and 0.3. Rewards that are NaN don't
    count.
    """
    rewards = rewards_PG.float()
    return rewards.nan_to_num(-math.inf).amax(dim=1) > rewards.nan_to_num(math.inf).amin(dim=1)


def group_advantages(rewards_PG: torch.Tensor, scale: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """Advantages (r - mean) / (std + eps) within each group; without `scale` (Dr. GRPO), r - mean.

    rewards [P, G] float -> advantages [P, G]. The standard deviation is the unbiased one, and eps is added to it, both
    as in TRL. A reward that is NaN counts in neither mean nor deviation, and its advantage is 0. Unlike in TRL, a group
    of equal rewards gets exactly 0: the rounded mean of equal numbers may differ from them.
    """
    # The other completions of a problem are the baseline, in place of a value function.
    known = ~rewards_PG.isnan()
    if known.all():
        centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
        deviation = rewards_PG.std(dim=1, keepdim=True)
    else:
        centred = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
        deviation = (centred.square().nansum(dim=1, keepdim=True) / (known.sum(dim=1, keepdim=True) - 1)).sqrt()
    advantages = centred / (deviation + eps) if scale else centred
    return advantages.masked_fill(~differ(rewards_PG)[:, None] | ~known, 0.0)


def summed_advantages(parts_KPG: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Advantages of several rewards that are normalized one by one within their groups (TRL's `normalize_then_sum`).

    parts [K, P, G] float, NaN where a completion is left out of a reward -> advantages [P, G]: the weighted sums of the
    rewards' advantages, normalized over the batch. A group without a difference in any reward gets exactly 0.
    """
    sums_PG = sum(weight * group_advantages(part_PG) for weight, part_PG in zip(weights, parts_KPG, strict=True))
    sums_PG = torch.as_tensor(sums_PG).masked_fill(parts_KPG.isnan().all(dim=0), math.nan)
    informative_P = torch.stack([differ(part_PG) for part_PG in parts_KPG]).any(dim=0)
    return group_advantages(sums_PG.view(1, -1)).view_as(sums_PG).masked_fill(~informative_P[:, None], 0.0)
