"""Verifiable rewards: the weighted sum of parts, each a pure function of a completion."""

from __future__ import annotations

from dataclasses import dataclass

from qerl.config import RecordFormat, RewardSettings
from qerl.data.answers import is_correct, well_formed
from qerl.data.records import Problem

PARTS = ("correct", "format", "overlong")


@dataclass(frozen=True)
class Answer:
    """A completion as the reward sees it: its text, its length and the most tokens it might have had."""

    text: str
    tokens: int
    limit: int


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """DAPO's soft penalty: 0 up to limit - buffer tokens, from there linearly down to -1 at the limit."""
    return min(0.0, (limit - buffer - tokens) / buffer) if buffer else 0.0


def reward_parts(
    answer: Answer, problem: Problem, record_format: RecordFormat, settings: RewardSettings
) -> dict[str, float]:
    """correct, 0 or 1: the final answer is right. format, 0 or 1: it is stated once and in the form of the data set.

    overlong, -1 to 0: see `overlong_penalty`.
    """
    return {
        "correct": float(is_correct(answer.text, problem.answer, record_format)),
        "format": float(well_formed(answer.text, record_format)),
        "overlong": overlong_penalty(answer.tokens, answer.limit, settings.overlong_buffer),
    }


def total(parts: dict[str, float], settings: RewardSettings) -> float:
    """The weighted sum of the parts."""
    return sum(getattr(settings, part) * parts[part] for part in PARTS)
