"""Rewards without a signal cause one warning, with a completion and the setting to change."""

import logging
import statistics
from typing import get_args

import pytest

from qerl.data.grading import extract, statement
from qerl.data.records import Problem
from qerl.rl.rollouts import Group, Rollout, Task
from qerl.rl.train import PATIENCE, NoSignalError, Watch, report
from qerl.settings.base import parse
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.run import RunSettings
from tests.unit.rl.tiny_trainer import kill_at, trainer

PROBLEM = Problem("1", "9 and 9?", None, "18")
TASK = Task([PROBLEM], "gsm8k", "Be brief.")
BOXED, RIGHT, WRONG = "It is \\boxed{18}.", "#### 18", "#### 19"


def settings(**changes) -> RunSettings:
    return parse(RunSettings, {"model": "m", "dataset": "d", **changes}, "test")


def rollout(*texts: str, truncated: float = 0.0, rewards: list[float] | None = None) -> Rollout:
    rewards = rewards or [float(text == RIGHT) for text in texts]
    group = Group(PROBLEM, [], [], list(texts), [{}] * len(texts), rewards)
    equal = float(not group.informative)
    metrics = {"reward/equal_groups": equal, "reward/std": statistics.pstdev(rewards), "truncated": truncated}
    return Rollout(
        [], {**metrics, "reward/correct": statistics.fmean(text == RIGHT for text in texts)}, [group], [group]
    )


def said(caplog, rollouts, **changes) -> list[str]:
    watch = Watch(settings(**changes), TASK)
    for step, drawn in enumerate(rollouts, start=1):
        watch.observe(step, drawn)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("form", get_args(AnswerForm))
@pytest.mark.parametrize("record_format", get_args(RecordFormat))
def test_what_a_grader_wants_is_what_it_reads(record_format, form):
    answer = '{"answer": "18"}' if record_format == "reasoning_gym" else "18"
    assert extract(statement(answer, record_format, form), record_format, form) == "18"


def test_a_first_step_without_a_readable_answer_causes_one_warning(caplog):
    [message] = said(caplog, [rollout("First words. " * 99 + BOXED, BOXED)] * 9)
    assert "step 1: no completion states an answer" in message
    assert "#### 18" in message
    assert "boxed{18}" in message
    assert "`instruction` (now 'Be brief.')" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("drawn", "changes", "remedy"),
    [
        (rollout(WRONG, WRONG), {}, "easier problems, or raise rollout.group_size"),
        (rollout(RIGHT, RIGHT), {}, "harder problems"),
        (rollout(BOXED, BOXED, truncated=0.9), {}, "were cut off: raise rollout.sampling.max_tokens=4096"),
        (
            rollout(BOXED, BOXED),
            {"reward": {"functions": {"own": "mine:reward"}}},
            "Look at what the run's `reward` gives",
        ),
    ],
)
def test_equal_rewards_for_several_steps_cause_a_warning_with_a_remedy(caplog, drawn, changes, remedy):
    assert len(said(caplog, [drawn] * 9, **changes)) == 1
    assert remedy in caplog.text
    assert ("The grader wants" in caplog.text) == ("reward" not in changes)


def test_rewards_that_differ_now_and_then_are_no_cause_for_a_warning(caplog):
    rollouts = [rollout(RIGHT, WRONG), *[rollout(WRONG, WRONG)] * (PATIENCE - 1)] * 3
    assert said(caplog, rollouts) == []


def test_ppo_compares_no_groups(caplog):
    """Its groups may have one completion each; what matters is that rewards differ at all."""
    one_each = rollout(RIGHT)
    one_each.metrics["reward/std"] = 0.5
    changes = {"loss": {"name": "ppo"}, "rollout": {"group_size": 1}}
    assert said(caplog, [one_each] * 9, **changes) == []


def test_a_run_can_be_told_to_stop():
    watch = Watch(settings(on_no_signal="stop"), TASK)
    with pytest.raises(NoSignalError, match="no completion states an answer"):
        watch.observe(1, rollout(BOXED, BOXED), writes=False)


def nothing(answer, problem):
    return 0.0


@pytest.mark.parametrize("killed", [2, 3])
def test_a_run_that_was_killed_stops_where_it_would_have_stopped(checkpoints, tmp_path, monkeypatch, killed):
    changes = {"weights": "bf16", "on_no_signal": "stop", "checkpoint_every": 1, "steps": 9}
    changes["reward"] = {"functions": {"own": f"{__name__}:nothing"}}
    kill_at(killed, trainer(checkpoints, tmp_path, **changes), monkeypatch)
    with pytest.raises(NoSignalError, match=f"^step {PATIENCE}: "):
        trainer(checkpoints, tmp_path, **changes).run()


def test_a_first_step_after_a_kill_need_not_state_an_answer():
    watch = Watch(settings(on_no_signal="stop"), TASK, [rollout(RIGHT, WRONG).metrics])
    watch.observe(2, rollout(BOXED, BOXED))


@pytest.mark.parametrize(("equal", "level"), [(1.0, logging.WARNING), (0.5, logging.INFO)])
def test_a_run_that_learned_nothing_does_not_end_like_a_success(caplog, equal, level):
    rows = [{"reward": 0.0, "reward/equal_groups": 1.0}, {"reward": 0.0, "reward/equal_groups": equal}]
    with caplog.at_level(logging.INFO):
        report(rows, settings())
    [record] = caplog.records
    assert record.levelno == level
    assert ("nothing was learned" in record.getMessage()) == (level == logging.WARNING)
    assert "reward 0.000 -> 0.000 in 2 steps" in record.getMessage()
