"""Advantages of a group: exactly zero for equal rewards, otherwise TRL's formula to the bit."""

import pytest
import torch

from qerl.data.records import Problem
from qerl.rl.rewards import differ, group_advantages
from qerl.rl.rollouts import Group

#: A reward, and how many times: means that float32 rounds away from the reward.
EQUAL = [(0.1, 8), (42.1, 6), (1000.1, 8), (-0.3, 6), (1 / 3, 7), (0.0, 4)]


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize(("reward", "count"), EQUAL)
def test_equal_rewards_have_no_advantage_at_all(reward, count, scale):
    rewards = torch.tensor([[reward] * count, [reward] * (count - 1) + [reward + 1]])
    advantages = group_advantages(rewards, scale)
    assert torch.equal(advantages[0], torch.zeros(count))
    centred = rewards[1] - rewards[1].mean()
    assert torch.equal(advantages[1], centred / (rewards[1].std() + 1e-4) if scale else centred)


def test_all_who_ask_whether_rewards_are_equal_get_one_answer():
    groups = [[0.1] * 8, [0.1 + 0.2, 0.3] * 4, [0.0] * 7 + [1e-3], [1000.1, 1000.1001] * 4]
    expected = [False, False, True, True]
    problem = Problem("id", "question", None, "1")
    assert [Group(problem, [], [], [], [], rewards).informative for rewards in groups] == expected
    assert differ(torch.tensor(groups)).tolist() == expected
    assert differ(torch.tensor(groups, dtype=torch.float64)).tolist() == expected
    assert group_advantages(torch.tensor(groups)).any(dim=1).tolist() == expected
