"""Policy losses of per-token values [N, T], which are zero off the mask: N sequences, T completion tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qerl.settings.run import LossSettings


@dataclass(frozen=True)
class BatchSize:
    """Sizes of the whole batch, by which the losses of its micro-batches are normalized so that they sum to its
    loss.
    """

    sequences: int
    #: Completion tokens that contribute to the loss.
    tokens: float
    #: The most tokens that a completion may have.
    longest: int
    micro_batches: int


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss for a micro-batch. All but `logprobs_NT` and `entropy_NT` are constants."""

    logprobs_NT: torch.Tensor
    #: Log-probabilities of the policy before the first update on this rollout.
    old_logprobs_NT: torch.Tensor
    #: Advantages of sequences [N, 1] or of tokens [N, T] (ppo).
    advantages_NT: torch.Tensor
    #: 1.0 where a token contributes to the loss.
    mask_NT: torch.Tensor
    #: Log-probabilities of the reference policy, for the KL; None without KL.
    reference_logprobs_NT: torch.Tensor | None = None
    #: Importance weights [N, T] or [N, 1] (`importance_weights`); None for weights of 1.
    importance_NT: torch.Tensor | None = None
    #: Entropies of the distributions at the tokens, with gradient; None without the bonus.
    entropy_NT: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """The loss of a micro-batch, as its share of the batch's loss, and counts of clipped ratios without gradient."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    #: The number of ratios: one per token, or for gspo one per sequence.
    ratios: torch.Tensor


def policy_loss(inputs: LossInputs, settings: LossSettings, whole: BatchSize) -> LossOutputs:
    """The clipped surrogate (paper Eq. 3) of a micro-batch, plus `settings.kl` times the KL to the reference, less
    `settings.entropy` times the entropy.

    The losses differ in the ratio, which gspo has per sequence and the others per token, and in the normalization
    (`_reduce`).
    """
    ratio, mask_NT = _ratio(inputs, settings), inputs.mask_NT
    loss_NT = -_surrogate(ratio, inputs, settings)
    # Outside of the minimum: the weight corrects for who sampled, and decides nothing about clipping.
    if inputs.importance_NT is not None:
        loss_NT = loss_NT * inputs.importance_NT
    if inputs.reference_logprobs_NT is not None:
        # Plain k3, as in GRPO's paper; TRL 1.16 multiplies it by the ratio by default.
        loss_NT = loss_NT + settings.kl * k3(inputs.reference_logprobs_NT - inputs.logprobs_NT)
    if inputs.entropy_NT is not None:
        loss_NT = loss_NT - settings.entropy * inputs.entropy_NT
    loss = _reduce(loss_NT * mask_NT, mask_NT, settings, whole)
    return LossOutputs(loss, *_count_clipped(ratio.detach(), inputs, settings))


def _surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """What each token gains, without corrections [N, T]."""
    advantages_NT = inputs.advantages_NT
    if settings.name == "cispo":  # the cap bounds a token's weight, and no token loses its gradient
        return ratio.detach().clamp(max=settings.ratio_cap) * advantages_NT * inputs.logprobs_NT
    if settings.name == "sapo":
        above, below = settings.sapo_temperatures
        temperature_NT = torch.where(advantages_NT > 0, above, below)
        return torch.sigmoid(temperature_NT * (ratio - 1)) * 4 / temperature_NT * advantages_NT
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    # The minimum bounds what a token gains by moving away from pi_old. What it loses has no bound but the cap, so that
    # a ratio which moved the wrong way is pulled back.
    capped = ratio if settings.ratio_cap is None else ratio.clamp(max=settings.ratio_cap)
    return torch.minimum(capped * advantages_NT, clipped * advantages_NT)


def _ratio(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """The ratio pi / pi_old of each token [N, T]. For gspo it is the geometric mean over the sequence [N, 1]."""
    log_ratio = inputs.logprobs_NT - inputs.old_logprobs_NT
    if settings.name == "gspo":
        # A completion without a token in the mask has the ratio 1, not NaN.
        log_ratio = ((log_ratio * inputs.mask_NT).sum(1) / inputs.mask_NT.sum(1).clamp(min=1))[:, None]
    return torch.exp(log_ratio)


def _count_clipped(
    ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers of ratios clipped below, clipped above, and of all ratios."""
    counted = torch.ones_like(ratio) if settings.name == "gspo" else inputs.mask_NT
    # Only where the clip decides: below with a negative advantage, above with a positive one.
    # A ratio is never below 0; sapo clips none.
    bounds = {"cispo": (0.0, settings.ratio_cap or 0.0), "sapo": (0.0, math.inf)}
    lowest, highest = bounds.get(settings.name, (1 - settings.clip_low, 1 + settings.clip_high))
    low = (ratio < lowest) & (inputs.advantages_NT < 0)
    high = (ratio > highest) & (inputs.advantages_NT > 0)
    return (low * counted).sum(), (high * counted).sum(), counted.sum()


def _reduce(loss_NT: torch.Tensor, mask_NT: torch.Tensor, settings: LossSettings, whole: BatchSize) -> torch.Tensor:
    """The micro-batch's share of the batch's loss.

    grpo, gspo, sapo: mean over tokens, then over sequences. dapo, cispo, ppo: mean over the tokens of the whole batch.
    dr_grpo: sum over tokens divided by a constant, so that length isn't rewarded. bnpo: mean over the tokens of each
    micro-batch, then over micro-batches. The released scripts run bnpo as DAPO; it depends on how the batch is split.
    """
    if settings.name in ("grpo", "gspo", "sapo"):
        return (loss_NT.sum(1) / mask_NT.sum(1).clamp(min=1)).sum() / whole.sequences
    if settings.name in ("dapo", "cispo", "ppo"):
        return loss_NT.sum() / max(whole.tokens, 1)
    if settings.name == "dr_grpo":
        return loss_NT.sum() / (whole.sequences * whole.longest)
    return loss_NT.sum() / mask_NT.sum().clamp(min=1) / whole.micro_batches


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(q || p) at a sample of q: r - 1 - log r with r = p / q; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def importance_weights(
    old_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor, settings: LossSettings
) -> torch.Tensor | None:
    """Weights without gradient that correct for the mismatch of sampler and trainer; None for `off`.

    A weight is pi_trainer / pi_sampler of a token [N, T] or of a whole sequence [N, 1]. Weights above the cap are set
    to the cap by `truncate`, and to 0 by `mask`, which drops the token or sequence.
    """
    if settings.correction == "off":
        return None
    level, action = settings.correction.split("-")
    # Zero off the mask, where the sampler has no log-probabilities.
    log_ratio = (old_logprobs_NT.detach() - sampler_logprobs_NT) * mask_NT
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = torch.exp(log_ratio)
    cap = settings.correction_cap
    return ratio.clamp(max=cap) if action == "truncate" else ratio.masked_fill(ratio > cap, 0.0)


def ratio_sums(
    old_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor
) -> dict[str, float]:
    """Sums of ratios w = trainer / sampler and of their squares, over tokens and over sequences; beyond e^300 cut.

    The effective sample size, (sum w)^2 / sum w^2, is made of them. They are added in float64.
    """
    log_ratio_NT = (old_logprobs_NT - sampler_logprobs_NT).detach().double() * mask_NT
    tokens_NT = torch.exp(log_ratio_NT.clamp(max=300.0)) * mask_NT
    sequences_N = torch.exp(log_ratio_NT.sum(1).clamp(max=300.0))
    return {
        "token_ratios": tokens_NT.sum().item(),
        "token_squares": tokens_NT.square().sum().item(),
        "sequence_ratios": sequences_N.sum().item(),
        "sequence_squares": sequences_N.square().sum().item(),
    }


def mismatch(
    old_logprobs_NT: torch.Tensor, sampler_logprobs_NT: torch.Tensor, mask_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens of KL(sampler || trainer) by the k3 estimator, and the largest token ratio, either way."""
    # With noise in the sampler alone this is the KL that the noise causes.
    delta = (old_logprobs_NT - sampler_logprobs_NT).detach() * mask_NT
    largest = delta.abs().max() if delta.numel() else delta.new_zeros(())  # none of the completions may have a token
    return k3(delta).sum(), torch.exp(largest)
