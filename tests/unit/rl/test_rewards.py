"""Rewards: parts and their sum, the user's own function, and which groups have advantages."""

import sys

import pytest
import torch

from qerl.data.records import Problem
from qerl.rl.rewards import Answer, differ, group_advantages, overlong_penalty, reward_parts, total
from qerl.rl.rollouts import Group
from qerl.settings.base import parse
from qerl.settings.run import RewardSettings

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


@pytest.mark.parametrize(
    ("preset", "right", "form"),
    [
        ("upstream-gsm8k", 2.0, 0.2),
        ("upstream-gsm8k-hashes", 1.0, 0.2),
        ("upstream-bigmath", 1.0, 0.2),
        ("upstream-dapomath", 1.0, 0.0),
    ],
)
def test_a_preset_has_the_values_of_the_released_scripts(preset, right, form):
    settings = parse(RewardSettings, {"preset": preset}, "test")
    only_right, only_formed, both = "#### 18\n#### 18", "#### 19", "#### 18"
    rewards = [
        total(reward_parts(Answer(text, 5, 20), PROBLEM, "gsm8k", settings), settings)
        for text in (only_right, only_formed, both, "")
    ]
    assert rewards == pytest.approx([right, form, right + form, 0])


def test_explicit_keys_win_over_the_preset():
    settings = parse(RewardSettings, {"preset": "upstream-gsm8k", "format": 0.5, "overlong_buffer": 3}, "test")
    assert (settings.correct, settings.format, settings.overlong_buffer) == (2.0, 0.5, 3)
    assert parse(RewardSettings, settings.model_dump(), "test") == settings


MODULE = """
import math, numpy, torch

short = lambda answer, problem: float(answer.tokens < 10 and answer.text.endswith(problem.answer))
nothing = lambda answer, problem: None
nan = lambda answer, problem: math.nan
huge = lambda answer, problem: 10**400
word = lambda answer, problem: "1"
array = lambda answer, problem: numpy.float32(0.5)
compared = lambda answer, problem: numpy.float32(answer.tokens) < answer.limit
tensor = lambda answer, problem: torch.tensor(answer.tokens / answer.limit)
broken = lambda answer, problem: {}["mine"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory, under a name of its own."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


def test_an_own_reward_is_one_more_part(module):
    settings = RewardSettings(function=f"{module}:short", custom=3.0)
    short, long = (reward_parts(Answer("#### 18", n, 20), PROBLEM, "gsm8k", settings) for n in (5, 15))
    assert list(short) == ["correct", "format", "overlong", "custom"]
    assert (short["custom"], long["custom"]) == (1.0, 0.0)
    assert total(short, settings) - total(long, settings) == pytest.approx(3.0)


@pytest.mark.parametrize(("name", "value"), [("array", 0.5), ("compared", 1.0), ("tensor", 0.25)])
def test_a_scalar_of_numpy_or_torch_is_a_number(module, name, value):
    settings = RewardSettings(function=f"{module}:{name}")
    assert reward_parts(Answer("", 5, 20), PROBLEM, "gsm8k", settings)["custom"] == value


@pytest.mark.parametrize(("name", "value"), [("nothing", "None"), ("nan", "nan"), ("huge", "10*"), ("word", "'1'")])
def test_what_is_no_number_is_an_error(module, name, value):
    settings = RewardSettings(function=f"{module}:{name}")
    with pytest.raises(ValueError, match=f"{module}:{name} returned {value} for problem 0; it must return a number"):
        reward_parts(Answer("", 5, 20), PROBLEM, "gsm8k", settings)


def test_exceptions_of_an_own_reward_are_passed_on(module):
    with pytest.raises(KeyError, match="mine"):
        reward_parts(Answer("", 5, 20), PROBLEM, "gsm8k", RewardSettings(function=f"{module}:broken"))


def test_all_who_ask_whether_rewards_are_equal_get_one_answer():
    groups = [[0.1] * 8, [0.1 + 0.2, 0.3] * 4, [0.0] * 7 + [1e-3], [1000.1, 1000.1001] * 4]
    expected = [False, False, True, True]
    problem = Problem("id", "question", None, "1")
    assert [Group(problem, [], [], [], [], rewards).informative for rewards in groups] == expected
    assert differ(torch.tensor(groups)).tolist() == expected
    assert differ(torch.tensor(groups, dtype=torch.float64)).tolist() == expected
    assert group_advantages(torch.tensor(groups)).any(dim=1).tolist() == expected
