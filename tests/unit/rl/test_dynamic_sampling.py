"""Groups of equal rewards in the GRPO loop on a tiny policy, and dynamic sampling, which replaces them."""

from itertools import count

import pytest

from qerl.rl.rollouts import problem_index
from tests.unit.rl.tiny_trainer import BASE, PROBLEMS, trainer, untimed

pytestmark = pytest.mark.usefixtures("rewarded_characters")


def test_every_problem_is_seen_once_an_epoch():
    seen = [problem_index(10, 0, position) for position in range(20)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen[:10] != [problem_index(10, 1, position) for position in range(10)]


def equal_rewards_for(monkeypatch, questions):
    """Rewards that are all the same for these questions, and all different for others."""
    numbers = count()

    def parts(answer, problem, *_):
        return {"correct": 0.0 if problem.question in questions else next(numbers), "format": 0.0, "overlong": 0.0}

    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)


def test_a_step_of_equal_rewards_has_no_gradient(checkpoints, tmp_path, monkeypatch):
    """0.1, the reward for the right form alone; eight of them have another mean in float32."""
    monkeypatch.setattr("qerl.rl.rollouts.total", lambda *_: 0.1)
    made = trainer(checkpoints, tmp_path, rollout={**BASE["rollout"], "group_size": 8})
    row = made.step(1, 0)
    assert row["grad_norm"] == row["loss"] == 0
    assert row["reward/equal_groups"] == 1


def test_dynamic_sampling_replaces_groups_of_equal_rewards(checkpoints, tmp_path, monkeypatch):
    order = [PROBLEMS[problem_index(len(PROBLEMS), 0, position)].question for position in range(6)]
    equal_rewards_for(monkeypatch, {order[0], order[2]})
    rollout = {**BASE["rollout"], "resample": 3}
    made = trainer(checkpoints, tmp_path, rollout=rollout)
    drawn = made.collector.collect(1, 0)
    expected = [made.policy.tokenizer(f"{question}:")["input_ids"] for question in (order[1], order[3])]
    assert [sample.prompt for sample in drawn.samples[::4]] == expected
    assert drawn.metrics["problems"] == 4
    assert drawn.metrics["reward/equal_groups"] == 0.5
    assert all(sample.advantage != 0 for sample in drawn.samples)


def test_dynamic_sampling_gives_up_after_its_rounds(checkpoints, tmp_path, monkeypatch):
    equal_rewards_for(monkeypatch, {problem.question for problem in PROBLEMS})
    drawn = trainer(checkpoints, tmp_path, rollout={**BASE["rollout"], "resample": 2}).collector.collect(1, 0)
    assert drawn.metrics["problems"] == 6
    assert len(drawn.samples) == 8


def test_a_continued_run_with_dynamic_sampling_continues_at_the_same_problem(checkpoints, tmp_path, monkeypatch):
    equal_rewards_for(monkeypatch, {PROBLEMS[0].question, PROBLEMS[3].question})
    changes = {"rollout": {**BASE["rollout"], "resample": 2}, "steps": 4}
    whole = trainer(checkpoints, tmp_path / "whole", **changes).run()
    first = trainer(checkpoints, tmp_path / "parts", **{**changes, "steps": 3})
    first.run()
    assert untimed(trainer(checkpoints, tmp_path / "parts", **changes).run())[2]["problems"] == whole[2]["problems"]
    assert whole[-1]["problems"] > 8
