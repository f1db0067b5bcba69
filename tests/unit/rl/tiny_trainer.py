"""A trainer and an updater of a tiny policy, which several files of tests run."""

import pytest
import torch

from qerl.data.records import Problem
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.packing import Sample
from qerl.rl.parallel import Processes
from qerl.rl.rollouts import Task
from qerl.rl.train import Trainer, make_policy
from qerl.rl.update import Updater
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.parity.family_models import perturbed
from tests.tiny import tiny_family, tiny_gpt_oss, write_template

CPU = torch.device("cpu")
PROBLEMS = [Problem(str(i), f"{i} and {i}?", f"#### {2 * i}", str(2 * i), None) for i in range(6)]
BASE = {
    "model": "tiny",
    "dataset": "sums",
    "dtype": "float32",
    "steps": 5,
    "rollout": {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": 6}},
    "adapter": {"rank": 4, "dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "checkpoint_every": 2,
}
PPO = {
    "weights": "nvfp4",
    "loss": {"name": "ppo", "updates_per_rollout": 2, "ppo": {"rank": 4, "learning_rate": 1e-2}},
    "noise": {"schedule": "constant", "mode": "consistent"},
}
#: The projections of experts alone.
EXPERTS = {
    "rank": 4,
    "dropout": 0.0,
    "targets": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"],
    "train_norms": False,
}
#: The logits of a random policy are small, and its embedding is frozen.
SHARP = {"max_tokens": 6, "temperature": 0.1}


def trainer(checkpoints, work, /, **changes) -> Trainer:
    settings = parse(RunSettings, {**BASE, **changes}, "test")
    base = checkpoints / settings.weights
    policy = make_policy(settings, base)
    return Trainer(settings, policy, EagerSampler(policy), Task(PROBLEMS, "gsm8k", ""), work)


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.policy.trainable()}


def packed_family(root, family, packed):
    """Write a small model of a family, packed, into a folder of `root` by the name of its format."""
    if family == "gpt_oss":
        tiny_gpt_oss(root / packed)
    else:
        tiny_family(root / "bf16", family, dtype=torch.bfloat16)
        quantize_checkpoint(root / "bf16", root / packed, packed)
    write_template(root / packed)


def kill_at(number, run, monkeypatch):
    """Run a trainer that is killed as this step begins."""
    step = run.step

    def step_or_end(n, *rest):
        if n == number:
            raise KeyboardInterrupt
        return step(n, *rest)

    monkeypatch.setattr(run, "step", step_or_end)
    with pytest.raises(KeyboardInterrupt):
        run.run()


#: Advantages by group: mixed, equal rewards, mixed with a reward at the mean, equal rewards, mixed.
MIXED = [[1.2, -0.4, -0.4, -0.4], [0.0] * 4, [1.0, 0.0, -1.0, 0.0], [0.0] * 4, [-1.3, 0.5, 0.4, 0.4]]
UPDATE = {
    "model": "tiny",
    "dataset": "sums",
    "weights": "nvfp4",
    "dtype": "float32",
    "rollout": {"prompts": 5, "group_size": 4, "sampling": {"max_tokens": 60}},
    "adapter": {"rank": 4, "dropout": 0.1},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1e9},
    "micro_batch_tokens": 60,
}


def batch(seed=0, advantages=MIXED, longest=7) -> list[Sample]:
    """Groups with prompts and completions of different lengths, some of them truncated and some of one token."""
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(2, 100, (count,), generator=numbers).tolist()  # noqa: E731
    samples = []
    for number, group in enumerate(advantages):
        prompt = draw(1 + number * longest // 2)
        for place, advantage in enumerate(group):
            ids = draw(1 + (13 * number + 17 * place + seed) % longest)
            logprobs = (-4.6 + 0.3 * torch.randn(len(ids), generator=numbers)).tolist()
            samples.append(Sample(prompt, Completion(ids, logprobs, place != 2), 0.0, advantage))
    return samples


def updater(checkpoints, about=None, **loss) -> Updater:
    """An updater of a packed policy whose adapter has moved: one of B = 0 has no gradient of A."""
    settings = parse(RunSettings, {**UPDATE, **(about or {}), "loss": loss}, "test")
    return Updater(settings, perturbed(make_policy(settings, checkpoints / "nvfp4")), Processes())
