"""Policy losses over padded batches of completions. Shapes: N sequences, T completion tokens."""

from __future__ import annotations

import torch

from qerl.config import LossSettings


def grpo_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantages_N: torch.Tensor,
    mask_NT: torch.Tensor,
    settings: LossSettings,
    total_sequences: int,
    importance_NT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clipped surrogate of GRPO (paper Eq. 3 without the KL term): mean over tokens, then over sequences.

    `old_logprobs` are those of the policy before the first update on this rollout; `total_sequences` is the size of
    the whole batch, so that the losses of its micro-batches add up to the loss of the batch. `importance` are
    constant weights of the tokens (truncated importance sampling).
    """
    ratio = torch.exp(logprobs_NT - old_logprobs_NT)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * advantages_N[:, None], clipped * advantages_N[:, None])
    if importance_NT is not None:
        surrogate = surrogate * importance_NT
    per_sequence = (surrogate * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1)
    return -per_sequence.sum() / total_sequences


def truncated_importance(
    trainer_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(pi_trainer / pi_sampler, cap) of each token, [N, T], without gradient."""
    return torch.exp(trainer_logprobs_NT.detach() - sampler_logprobs_NT).clamp(max=cap)


def mismatch(
    trainer_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over tokens for KL(sampler || trainer) by the k3 estimator, and the largest token ratio either way."""
    delta = (trainer_logprobs_NT - sampler_logprobs_NT).detach() * mask_NT
    return ((torch.expm1(delta) - delta) * mask_NT).sum(), torch.exp(delta.abs().max())
