"""Policy losses over [N, T] figures of tokens, zero off the mask. Shapes: N sequences, T completion tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl.config import LossSettings


@dataclass(frozen=True)
class BatchSize:
    """The whole batch that a micro-batch is part of: its losses add up to that of the batch."""

    sequences: int
    #: Completion tokens that carry a loss.
    tokens: float
    #: Most tokens that a completion may have.
    longest: int
    micro_batches: int


def policy_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantages_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    settings: LossSettings,
    whole: BatchSize,
    reference_logprobs_NT: torch.Tensor | None = None,
    importance_NT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clipped surrogate (paper Eq. 3) of a micro-batch, plus `settings.kl` times the KL to the reference.

    `old_logprobs` are those of the policy before the first update on this rollout; `mask` is 1.0 where a token counts;
    `advantages` are of sequences [N, 1] or of tokens [N, T] (ppo); `importance` [N, T] or [N, 1] are constant weights
    (see `importance_weights`). The losses differ in two things: gspo has one ratio a sequence, the others one a token;
    and `_reduce` has the normalizations.
    """
    ratio = _ratio(logprobs_NT, old_logprobs_NT, mask_NT, settings)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_NT = -torch.minimum(ratio * advantages_NT, clipped * advantages_NT)
    if importance_NT is not None:
        loss_NT = loss_NT * importance_NT
    if reference_logprobs_NT is not None:
        loss_NT = loss_NT + settings.kl * k3(reference_logprobs_NT - logprobs_NT)
    return _reduce(loss_NT * mask_NT, mask_NT, settings, whole)


def _ratio(
    logprobs_NT: torch.Tensor, old_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor, settings: LossSettings
) -> torch.Tensor:
    """pi / pi_old of each token [N, T]; for gspo the geometric mean over the sequence [N, 1]."""
    log_ratio = logprobs_NT - old_logprobs_NT
    if settings.name == "gspo":
        log_ratio = ((log_ratio * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1))[:, None]
    return torch.exp(log_ratio)


def clipped(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantages_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    settings: LossSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many ratios the clip holds back, below and above, of how many: tokens, or sequences for gspo."""
    ratio = _ratio(logprobs_NT.detach(), old_logprobs_NT, mask_NT, settings)
    counted = torch.ones_like(ratio) if settings.name == "gspo" else mask_NT
    low = (ratio < 1 - settings.clip_low) & (advantages_NT < 0)
    high = (ratio > 1 + settings.clip_high) & (advantages_NT > 0)
    return (low * counted).sum(), (high * counted).sum(), counted.sum()


def _reduce(loss_NT: torch.Tensor, mask_NT: torch.Tensor, settings: LossSettings, whole: BatchSize) -> torch.Tensor:
    """The micro-batch's share of the batch's loss.

    grpo, gspo: mean over tokens, then over sequences. dapo, ppo: mean over the tokens of the whole batch. dr_grpo: sum
    over tokens by a constant, so that length isn't rewarded. bnpo: mean over the tokens of each micro-batch, then over
    micro-batches (what the released scripts run as DAPO; it depends on how the batch is split).
    """
    if settings.name in ("grpo", "gspo"):
        return (loss_NT.sum(1) / mask_NT.sum(1).clamp(min=1)).sum() / whole.sequences
    if settings.name in ("dapo", "ppo"):
        return loss_NT.sum() / max(whole.tokens, 1)
    if settings.name == "dr_grpo":
        return loss_NT.sum() / (whole.sequences * whole.longest)
    return loss_NT.sum() / mask_NT.sum().clamp(min=1) / whole.micro_batches


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(q || p) at a sample of q: r - 1 - log r with r = p / q; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def importance_weights(
    trainer_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor, settings: LossSettings
) -> torch.Tensor | None:
    """Weights without gradient that correct for a sampler that isn't the trainer's policy; None for `off`.

    pi_trainer / pi_sampler of each token [N, T] or of the whole sequence [N, 1]; above the cap it is cut to the cap
    (truncate) or the token or sequence is dropped (mask).
    """
    if settings.correction == "off":
        return None
    level, action = settings.correction.split("-")
    log_ratio = (trainer_logprobs_NT.detach() - sampler_logprobs_NT) * mask_NT
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = torch.exp(log_ratio)
    cap = settings.correction_cap
    return ratio.clamp(max=cap) if action == "truncate" else ratio.masked_fill(ratio > cap, 0.0)


def mismatch(
    trainer_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of KL(sampler || trainer) by the k3 estimator, and the largest token ratio either way."""
    delta = (trainer_logprobs_NT - sampler_logprobs_NT).detach() * mask_NT
    return k3(delta).sum(), torch.exp(delta.abs().max())
