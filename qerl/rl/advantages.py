"""Group-relative advantages (paper Eq. 4)."""

from __future__ import annotations

import torch


def differ(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Whether the rewards [P, G] of each group differ in float32, as bool [P]; equal rewards give no gradient.

    A difference only in float64 comes from the rounding of a sum, such as 0.1 + 0.2 and 0.3.
    """
    rewards = rewards_PG.float()
    return (rewards != rewards[:, :1]).any(dim=1)


def group_advantages(rewards_PG: torch.Tensor, scale: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """Advantages (r - mean) / (std + eps) within each group; without `scale` (Dr. GRPO), r - mean.

    rewards [P, G] float -> advantages [P, G]. The standard deviation is the unbiased one, and eps is added to it, both
    as in TRL. Unlike in TRL, a group of equal rewards gets exactly 0: the rounded mean of equal numbers may differ from
    them.
    """
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    advantages = centred / (rewards_PG.std(dim=1, keepdim=True) + eps) if scale else centred
    return advantages.masked_fill(~differ(rewards_PG)[:, None], 0.0)
