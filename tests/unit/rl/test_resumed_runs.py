"""Runs that are killed or whose disk is full, on a tiny policy: they continue to the bit."""

import json
import logging
import os
import signal

import pytest
import torch

from qerl.host.process import Interrupted, announced, interruptible
from qerl.results.paths import rollouts_file
from qerl.results.schema import RolloutRow, read_rows
from qerl.rl.checkpoint import Checkpoints, ResumeError
from qerl.rl.rewards import reward_parts
from qerl.rl.update import Choices
from tests.jobs import untimed
from tests.unit.rl.tiny_trainer import EXPERTS, PPO, PROBLEMS, kill_at, trainer, weights

pytestmark = pytest.mark.usefixtures("rewarded_characters")


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("checkpoints", {"weights": "nvfp4", "noise": {"schedule": "linear"}}),
        ("checkpoints", {"weights": "bf16", "method": "full", "dtype": "bfloat16"}),
        ("checkpoints", PPO),
        ("mixture", {"weights": "nvfp4", "adapter": {**EXPERTS, "targets": ["q_proj", *EXPERTS["targets"]]}}),
    ],
    ids=["aqn", "full", "ppo", "experts"],
)
def test_a_killed_run_continues_bit_for_bit(request, tmp_path, monkeypatch, caplog, base, changes):
    checkpoints = request.getfixturevalue(base)
    whole = trainer(checkpoints, tmp_path / "whole", **changes)
    expected = whole.run()
    killed = trainer(checkpoints, tmp_path / "killed", **changes)
    kill_at(4, killed, monkeypatch)
    continued = trainer(checkpoints, tmp_path / "killed", **changes)
    torch.manual_seed(99)
    with caplog.at_level(logging.INFO):
        rows = continued.run()
    assert "continuing from step 2 of 5" in caplog.text
    assert untimed(rows) == untimed(expected)
    lines = (tmp_path / "killed/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    torch.testing.assert_close(weights(continued), weights(whole), rtol=0, atol=0)


def test_two_checkpoints_are_kept_and_those_of_other_settings_refused(tmp_path):
    for step in (1, 2, 3):
        Checkpoints(tmp_path, "these").save(step, {})
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step-000002.pt", "step-000003.pt"]
    with pytest.raises(ResumeError, match=r"step-000003\.pt belongs to a run with other settings; delete"):
        Checkpoints(tmp_path, "those").load()


@pytest.mark.parametrize(
    "method", [{}, {"weights": "bf16", "method": "full", "dtype": "bfloat16"}], ids=["lora", "full"]
)
def test_discovery_is_the_share_of_problems_that_any_step_has_solved(checkpoints, tmp_path, monkeypatch, method):
    """Counted anew from stored completions, also over a kill; about every fourth is called right."""
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", reward_parts)  # the real ones
    monkeypatch.setattr("qerl.rl.rewards.credit", lambda text, *_: float(sum(map(ord, text)) % 4 == 0))
    changes = {**method, "stored_rollouts": {"every": 1}, "steps": 5}
    kill_at(4, trainer(checkpoints, tmp_path, **changes), monkeypatch)
    rows = trainer(checkpoints, tmp_path, **changes).run()
    solved: set[str] = set()
    expected = []
    for step in range(1, 6):
        for row in read_rows(RolloutRow, tmp_path / "rollouts" / rollouts_file(step)):
            solved |= {row.problem for completion in row.completions if completion.parts["correct"]}
        expected.append(len(solved) / len(PROBLEMS))
    assert [row["discovery"] for row in rows] == expected
    assert 0 < expected[0] < expected[-1]


def test_a_continued_run_takes_the_choices_of_the_run_that_it_continues(checkpoints, tmp_path, monkeypatch):
    """Free memory, which decides them, may have changed."""
    killed = trainer(checkpoints, tmp_path / "killed", weights="nvfp4")
    monkeypatch.setattr(killed.updater, "_choose", lambda: Choices(logits_tokens=1234, graph_tokens=567))
    kill_at(4, killed, monkeypatch)
    continued = trainer(checkpoints, tmp_path / "killed", weights="nvfp4")
    continued.run()
    assert continued.updater.choices == Choices(1234, 567)


def signalled(monkeypatch, run, at, before=(), after=()):
    """Send this process signals before and after a step of a run; returns the run."""
    step = run.step

    def send(number, *rest):
        for one in before if number == at else ():
            os.kill(os.getpid(), one)
        row = step(number, *rest)
        for one in after if number == at else ():
            os.kill(os.getpid(), one)
        return row

    monkeypatch.setattr(run, "step", send)
    return run


def test_a_run_ends_by_a_signal_with_a_checkpoint_of_its_step(checkpoints, tmp_path, monkeypatch, capsys):
    expected = trainer(checkpoints, tmp_path / "whole", checkpoint_every=4).run()
    ended = trainer(checkpoints, tmp_path / "ended", checkpoint_every=4)
    signalled(monkeypatch, ended, 3, before=[signal.SIGUSR1])
    with pytest.raises(SystemExit) as left, interruptible(), announced() as end:
        ended.run(end=end)
    assert left.value.code == 128 + signal.SIGUSR1
    assert capsys.readouterr().err.endswith("qerl: interrupted; run the same command to continue\n")
    assert len((tmp_path / "ended/metrics.jsonl").read_text().splitlines()) == 3
    continued = trainer(checkpoints, tmp_path / "ended", checkpoint_every=4)
    assert untimed(continued.run()) == untimed(expected)


def test_a_second_signal_does_not_wait_for_the_step(checkpoints, tmp_path, monkeypatch):
    ended = trainer(checkpoints, tmp_path, checkpoint_every=1)
    signalled(monkeypatch, ended, 2, after=[signal.SIGUSR1, signal.SIGTERM])
    with pytest.raises(Interrupted), announced() as end:
        ended.run(end=end)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_signal_in_the_last_step_ends_nothing_early(checkpoints, tmp_path, monkeypatch):
    whole = signalled(monkeypatch, trainer(checkpoints, tmp_path, steps=1), 1, before=[signal.SIGTERM])
    with announced() as end:
        assert len(whole.run(end=end)) == 1


@pytest.mark.parametrize("announcement", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_every_signal_that_announces_an_end_is_taken_unless_it_is_ignored(announcement, heeded_signals):
    with announced(alone=False) as end:  # a process of several gets one from the cluster and one from its starter
        os.kill(os.getpid(), announcement)
        os.kill(os.getpid(), announcement)
    assert end.number == announcement
    before = signal.signal(announcement, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with interruptible(), announced() as end:
            os.kill(os.getpid(), announcement)
        assert end.number == 0
    finally:
        signal.signal(announcement, before)
