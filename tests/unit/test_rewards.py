"""Rewards: parts and their sum."""

import pytest

from qerl.config import RewardSettings
from qerl.data.records import Problem
from qerl.rl.rewards import Answer, overlong_penalty, reward_parts, total

PROBLEM = Problem("0", "6 * 3?", "6 * 3 = 18\n#### 18", "18", None)


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("6 * 3 = 18\n#### 18", 1, 1),
        ("#### 18.0", 1, 1),
        ("#### 1999", 0, 1),
        ("18", 0, 0),
        ("#### 18\n#### 19", 1, 0),
        ("", 0, 0),
    ],
)
def test_correct_and_format_are_judged_apart(text, correct, well_formed):
    parts = reward_parts(Answer(text, 5, 20), PROBLEM, "gsm8k", RewardSettings())
    assert parts == {"correct": correct, "format": well_formed, "overlong": 0.0}


def test_the_total_weighs_the_parts():
    settings = RewardSettings(correct=2.0, format=0.2, overlong=0.5, overlong_buffer=10)
    parts = reward_parts(Answer("#### 18", 15, 20), PROBLEM, "gsm8k", settings)
    assert total(parts, settings) == pytest.approx(2.0 + 0.2 - 0.5 * 0.5)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(tokens, penalty):
    """DAPO, Eq. 13, with a limit of 100 and a buffer of 20."""
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)


def test_no_buffer_no_penalty():
    assert overlong_penalty(100, 100, 0) == 0
