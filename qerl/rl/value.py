"""The value function of PPO: a second LoRA adapter and a scalar head on the policy's base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig
from torch import nn

from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.lora import register_lora
from qerl.policy.policy import VALUE_ADAPTER, VALUE_HEAD, Policy, same_requires_grad
from qerl.rl.sequence_packing import MicroBatch, token_states
from qerl.settings.training import PPOSettings


def add_value(policy: Policy, settings: PPOSettings) -> None:
    """Add a value function to `policy`: LoRA (B = 0) on the policy's targets and a head of zeros, all float32.

    Its norms are the base's frozen ones. A is drawn from torch's global generator, which `with_adapter` seeds. The
    policy's output stays the same, bit for bit.
    """
    if policy.peft is None:
        raise ValueError("a value function needs a frozen base; use method=lora with loss.name=ppo")
    trained = policy.peft.peft_config[POLICY_ADAPTER]
    assert isinstance(trained, LoraConfig)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=trained.target_modules,
    )
    with same_requires_grad(policy.peft):
        policy.peft.add_adapter(VALUE_ADAPTER, register_lora(config))
    policy.peft.set_requires_grad(VALUE_ADAPTER)
    head = nn.Linear(policy.lm.config.hidden_size, 1, device=policy.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    policy.value_head = head
    policy.lm.eval()


def is_value(name: str) -> bool:
    """Whether a parameter of `Policy.trainable` belongs to the value function."""
    return name.startswith(f"{VALUE_HEAD}.") or f".{VALUE_ADAPTER}." in name


@contextmanager
def value_adapter(policy: Policy) -> Iterator[None]:
    """A context in which the value's adapter replaces the policy's. Trainable tensors stay trainable."""
    assert policy.peft is not None
    before = policy.peft.active_adapter
    with same_requires_grad(policy.peft):
        policy.peft.set_adapter(VALUE_ADAPTER)
    try:
        yield
    finally:
        with same_requires_grad(policy.peft):
            policy.peft.set_adapter(before)


def values(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Values [N, T] float32 of the state before each completion token, zero on padding.

    They are computed from the hidden state that predicts the token. If the backward pass recomputes the blocks
    (gradient checkpointing), it must run in `value_adapter` too; otherwise it may run anywhere.
    """
    if policy.value_head is None or policy.peft is None:
        raise ValueError("the policy has no value function; call add_value first")
    again = policy.lm.is_gradient_checkpointing and torch.is_grad_enabled()
    if again and policy.peft.active_adapter != VALUE_ADAPTER:
        raise ValueError("with gradient checkpointing, values and their backward pass must run inside value_adapter")
    with value_adapter(policy):
        states = token_states(policy, batch)
    return batch.unpacked(policy.value_head(states.float())[:, 0])
