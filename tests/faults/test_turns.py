"""Kills in the middle of conversations, between a turn of the policy and the reply of its environment."""

import json
import os
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file

from qerl.rl import train
from qerl.rollout.engine import EngineSampler
from qerl.settings.run import NativeSettings
from tests.faults.conftest import forked
from tests.jobs import metrics_of, untimed

#: Kills its process at the reply whose number is in the environment, if any.
ENVIRONMENT = """
import os, signal
from qerl.rl.environments import Turn
replies = 0

class Killing:
    def reset(self, problem):
        self.problem = problem

    def step(self, text):
        global replies
        replies += 1
        if replies == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return Turn([{"role": "tool", "content": f"{len(text)} of {self.problem.answer}"}], len(set(text)) / 10)
"""
CHANGES = {
    "environment": {"name": "killing:Killing", "turns": 4},
    "rollout": {"prompts": 2, "group_size": 3, "sampling": {"max_tokens": 90}},
    "reward": {"correct": 0, "format": 0},
}


@pytest.mark.parametrize("engine", [False, True])
def test_three_kills_in_mid_conversation_change_no_bit(run, monkeypatch, engine):
    (run.folder / "killing.py").write_text(ENVIRONMENT)
    (run.base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(12, 27)]}))
    if engine:  # whose batches depend on when replies come, unless it is told that they may not
        batch_invariant = NativeSettings(batch_invariant=True)
        monkeypatch.setattr(train, "make_sampler", lambda policy, *_: EngineSampler(policy, batch_invariant))

    def work(kill_at, name):
        os.environ["KILL_AT"] = str(kill_at)
        sys.modules.pop("killing", None)
        torch.set_num_threads(1)
        run.train(CHANGES, name)

    assert forked(lambda: work(0, "-whole")) == 0
    steps = []
    for kill_at in (9, 25, 7):  # in the first step, in the second one, and in a later one
        assert forked(lambda kill_at=kill_at: work(kill_at, "-killed")) == -signal.SIGKILL
        steps.append(len(list(run.folder.glob("work-killed/*/step-*.pt"))))
    assert steps[0] == 0
    assert steps[-1] > 0
    assert forked(lambda: work(0, "-killed")) == 0
    whole, killed = (metrics_of(run.folder / f"out-{name}") for name in ("whole", "killed"))
    assert untimed(whole) == untimed(killed)
    assert all(row["turns"] > 1 and row["grad_norm"] > 0 for row in whole)
    adapters = [load_file(run.folder / f"out-{n}/policy/adapter_model.safetensors") for n in ("whole", "killed")]
    torch.testing.assert_close(*adapters, rtol=0, atol=0)
