"""Group-relative advantages (paper Eq. 4)."""

from __future__ import annotations

import torch


def group_advantages(rewards_PG: torch.Tensor, scale: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """(r - mean) / (std + eps) within each group; without `scale` (Dr. GRPO), r - mean.

    rewards [P, G] float -> advantages [P, G]. The standard deviation is the unbiased one, and eps is added to it,
    both as in TRL; a group of equal rewards gets advantages of zero.
    """
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred / (rewards_PG.std(dim=1, keepdim=True) + eps) if scale else centred
