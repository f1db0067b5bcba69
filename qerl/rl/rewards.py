"""Verifiable rewards: weighted parts, each in [0, 1], of a completion's text."""

from __future__ import annotations

from collections.abc import Sequence

from qerl.config import RecordFormat, RewardSettings
from qerl.data.answers import is_correct, well_formed
from qerl.data.records import Problem

PARTS = ("correct", "format")


def reward_parts(text: str, problem: Problem, record_format: RecordFormat) -> dict[str, float]:
    """Whether the final answer is right, and whether it is stated once and in the form of the data set."""
    return {
        "correct": float(is_correct(text, problem.answer, record_format)),
        "format": float(well_formed(text, record_format)),
    }


def total(parts: dict[str, float], weights: RewardSettings) -> float:
    """The weighted sum of the parts."""
    return sum(getattr(weights, part) * parts[part] for part in PARTS)


def group_rewards(
    texts: Sequence[str], problem: Problem, record_format: RecordFormat, weights: RewardSettings
) -> tuple[list[float], list[dict[str, float]]]:
    """Total and parts of each completion of one problem."""
    parts = [reward_parts(text, problem, record_format) for text in texts]
    return [total(p, weights) for p in parts], parts
