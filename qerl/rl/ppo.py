"""PPO with a value function: advantages and the value's loss. Shapes: N sequences, T tokens.

The policy's loss is `qerl.rl.losses.policy_loss` with advantages [N, T]; the values come from `qerl.rl.value`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
