"""The optimizer of a run, and the schedule of its learning rate."""

from __future__ import annotations

import math

import torch

from qerl.policy.policy import Policy
from qerl.rl.value import is_value
from qerl.settings.training import OptimizerSettings


def make_optimizer(policy: Policy, settings: OptimizerSettings, value_rate: float = 0.0) -> torch.optim.Optimizer:
    """AdamW over the trained tensors, without weight decay on vectors (norms, biases).

    `peak` of a parameter group is its learning rate before the schedule; `value_rate` is that of a value function.
    """
    groups = []
    for of_value, rate in ((False, settings.learning_rate), (True, value_rate)):
        parameters = [p for name, p in policy.trainable() if is_value(name) == of_value]
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": settings.weight_decay, "peak": rate})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": rate})
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if settings.name == "adamw8bit" and policy.peft is None:
        from qerl.rl.sharded_optimizer import ShardedAdamW8bit

        kind = ShardedAdamW8bit
    elif settings.name == "adamw8bit":
        from qerl.rl.adamw8bit import JoinedAdamW8bit

        kind = JoinedAdamW8bit
    return kind([g for g in groups if g["params"]], lr=settings.learning_rate, betas=settings.betas)  # type: ignore[call-arg]


def warmup_cosine(warmup_ratio: float, step: int, total_steps: int) -> float:
    """The factor of the learning rate at a step (1-based): linear warm-up, then a cosine to zero."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(total_steps - warmup, 1)
    return (1 + math.cos(math.pi * progress)) / 2
