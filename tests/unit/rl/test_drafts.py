"""Training with drafts: a killed run goes on as one of plain steps does, whatever drafts the kill forgot."""

import pytest
import torch

from qerl.data.records import Problem
from qerl.kernels.state import DraftSource
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.rollouts import Collector, Task
from qerl.rl.train import Trainer, make_policy
from qerl.rollout import speculation
from qerl.rollout.engine import EngineSampler
from qerl.settings.base import parse
from qerl.settings.run import NativeSettings, RunSettings
from tests.tiny import tiny_qwen2, write_template
from tests.unit.rl.tiny_trainer import kill_at, untimed

#: A step is an epoch, so that each but the first finds drafts in completions of earlier ones.
PROBLEMS = [Problem(str(i), f"{i} and {i}?", f"#### {2 * i}", str(2 * i), None) for i in range(2)]
SETTINGS = {
    "model": "tiny",
    "dataset": "sums",
    "weights": "bf16",
    "dtype": "float32",
    "steps": 4,
    "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 40, "temperature": 0.1, "top_p": 0.9}},
    "adapter": {"rank": 4},
    "noise": {"schedule": "linear"},
    "optimizer": {"learning_rate": 1e-3},
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_qwen2(tmp_path_factory.mktemp("base") / "bf16")
    write_template(folder)
    return folder


@pytest.fixture(autouse=True)
def free_rows(monkeypatch, rewarded_characters):
    for name, value in (("_DOUBLING_ROWS", 1e9), ("_VERIFICATION", 0), ("_WORTHWHILE", 1), ("_PAUSES", (0, 0))):
        monkeypatch.setattr(speculation, name, value)


def trainer(checkpoint, work, drafts) -> Trainer:
    settings = parse(RunSettings, SETTINGS, "test")
    policy = make_policy(settings, checkpoint)
    # Equal numbers of rows, since those of drafts would round otherwise.
    sampler = EngineSampler(policy, NativeSettings(drafts=drafts, batch_invariant=True), 8)
    collector = Collector(settings, policy, sampler, Task(PROBLEMS, "gsm8k", ""))
    return Trainer(settings, policy, collector, Checkpoints(work, "test"), work / "metrics.jsonl")


def test_a_killed_run_with_drafts_continues_as_one_of_plain_steps(checkpoint, tmp_path, monkeypatch):
    whole = trainer(checkpoint, tmp_path / "whole", drafts=False)
    expected = whole.run()
    killed = trainer(checkpoint, tmp_path / "killed", drafts=True)
    kill_at(4, killed, monkeypatch)
    assert killed.collector.sampler.drafts.sources[DraftSource.EARLIER].accepted
    continued = trainer(checkpoint, tmp_path / "killed", drafts=True)
    rows = continued.run()
    assert continued.collector.sampler.drafts.sources[DraftSource.EARLIER].accepted
    assert untimed(rows) == untimed(expected)
    for (name, found), (_, wanted) in zip(continued.policy.trainable(), whole.policy.trainable(), strict=True):
        assert torch.equal(found, wanted), name
