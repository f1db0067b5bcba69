"""The optimizer of a run, and the schedule of its learning rate."""

from __future__ import annotations

import math

import torch

from qerl.policy.policy import Policy
from qerl.rl.value import is_value
from qerl.settings.run import RunSettings


def make_optimizer(policy: Policy, settings: RunSettings) -> torch.optim.Optimizer:
    """AdamW over the trained tensors, without weight decay on vectors (norms, biases).

    `peak` of a parameter group is its learning rate before the schedule.
    """
    optimizer = settings.optimizer
    groups = []
    for of_value, rate in ((False, optimizer.learning_rate), (True, settings.loss.ppo.learning_rate)):
        parameters = [p for name, p in policy.trainable() if is_value(name) == of_value]
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": optimizer.weight_decay, "peak": rate})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": rate})
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if optimizer.name == "adamw8bit" and policy.peft is None:
        from qerl.rl.sharded_optimizer import ShardedAdamW8bit

        kind = ShardedAdamW8bit
    elif optimizer.name == "adamw8bit":
        from qerl.rl.adamw8bit import JoinedAdamW8bit

        kind = JoinedAdamW8bit
    return kind([g for g in groups if g["params"]], lr=optimizer.learning_rate, betas=optimizer.betas)  # type: ignore[call-arg]


def warmup_cosine(warmup_ratio: float, step: int, total_steps: int) -> float:
    """The factor of the learning rate at a step (1-based): linear warm-up, then a cosine to zero."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(total_steps - warmup, 1)
    return (1 + math.cos(math.pi * progress)) / 2
