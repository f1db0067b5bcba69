"""The value function of PPO: its advantages, its loss, and its second LoRA adapter with a scalar head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig
from torch import nn

from qerl.models.linear import POLICY_ADAPTER
from qerl.models.lora import register_lora
from qerl.models.policy import VALUE_ADAPTER, VALUE_HEAD, Policy, same_requires_grad
from qerl.rl.packing import MicroBatch, token_states
from qerl.settings.run import PPOSettings

# PPO with a value function: advantages and the value's loss. Shapes: N sequences, T tokens.
#
# The policy's loss is `qerl.rl.losses.policy_loss` with advantages [N, T].


def terminal_rewards(rewards_N: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """Per-token rewards [N, T] float32: a completion's reward [N] at its last token, zero elsewhere.

    `mask` is 1.0 on completion tokens. A row without completion tokens loses its reward.
    """
    ahead = mask_NT.flip(1).cumsum(1).flip(1)
    return rewards_N[:, None].float() * mask_NT * (ahead == 1)


@torch.no_grad()
def gae(
    rewards_NT: torch.Tensor, values_NT: torch.Tensor, mask_NT: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimates (Schulman et al., arXiv 1506.02438, Eq. 16), and returns, the targets of V.

    A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V(s_{t+1}) - V(s_t); the return is A_t + V(s_t).
    `values` [N, T] belong to the states before each token. Both results are [N, T] float32 without gradient, zero off
    the mask.

    Every completion is an episode that ends with its last token, after which V is zero. This also holds for truncated
    completions: their reward is final and isn't bootstrapped. Tokens off the mask don't count as steps.
    """
    rewards, values, steps = rewards_NT.float(), values_NT.float(), mask_NT.bool()
    advantage = following = rewards.new_zeros(len(rewards))
    advantages_NT = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(steps[:, t], delta + gamma * lam * advantage, advantage)
        following = torch.where(steps[:, t], values[:, t], following)
        advantages_NT[:, t] = advantage
    zero = torch.zeros_like(rewards)
    return torch.where(steps, advantages_NT, zero), torch.where(steps, advantages_NT + values, zero)


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares, which add up over micro-batches and processes.

    The sums are float64, because the variance is a difference of two of them.
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values_NT: torch.Tensor, mask_NT: torch.Tensor) -> Moments:
        """The moments of the values on the mask."""
        chosen = values_NT[mask_NT.bool()].double()
        return cls(float(chosen.numel()), chosen.sum().item(), chosen.square().sum().item())

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """The mean, or 0 without numbers."""
        return self.total / max(self.count, 1.0)

    @property
    def variance(self) -> float:
        """The unbiased variance, or 0 for fewer than two numbers."""
        return max(self.squares - self.total * self.mean, 0.0) / max(self.count - 1, 1.0)


def whiten(advantages_NT: torch.Tensor, mask_NT: torch.Tensor, moments: Moments, eps: float = 1e-8) -> torch.Tensor:
    """(A - mean) / sqrt(variance + eps) with the moments of the whole batch; [N, T] float32, zero off the mask."""
    scale = (moments.variance + eps) ** -0.5
    return ((advantages_NT.double() - moments.mean) * scale * mask_NT).float()


def value_loss(
    values_NT: torch.Tensor,
    old_values_NT: torch.Tensor,
    returns_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    clip: float,
    whole_tokens: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped squared error of the values, and the share of tokens whose value is clipped.

    The error is 0.5 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2), as in OpenAI's implementation of PPO;
    the paper (arXiv 1707.06347, Eq. 9) doesn't clip. Both results are sums over the mask divided by the tokens of the
    whole batch, so that micro-batches add up. Only the loss has a gradient.
    """
    near = old_values_NT + (values_NT - old_values_NT).clamp(-clip, clip)
    errors, near_errors = (values_NT - returns_NT).square(), (near - returns_NT).square()
    loss = 0.5 * (torch.maximum(errors, near_errors) * mask_NT).sum() / max(whole_tokens, 1)
    clipped = ((near_errors > errors) * mask_NT).sum() / max(whole_tokens, 1)
    return loss, clipped.detach()


# The value function of PPO: a second LoRA adapter and a scalar head on the policy's base.


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
    # V = 0 at first: the first advantages are then sums of rewards, and not the errors of a random head.
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
