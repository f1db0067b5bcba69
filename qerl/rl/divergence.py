"""The KL divergence between two policies on one's own completions: what rounding alone does, before any training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl.policy.policy import Policy
from qerl.rl.losses import mismatch
from qerl.rl.sequence_packing import Sample, logprobs_and_entropy, micro_batch, split
from qerl.rollout.sampler import Completion


@torch.no_grad()
def kl_per_token(
    policy: Policy,
    prompts: Sequence[list[int]],
    completions: Sequence[Sequence[Completion]],
    temperature: float = 1.0,
    micro_batch_tokens: int = 16384,
) -> float:
    """KL(sampler || policy) per token by the k3 estimator, on `completions` that another policy's sampler drew."""
    drawn = zip(prompts, completions, strict=True)
    samples = [Sample(prompt, completion, 0.0, 0.0) for prompt, group in drawn for completion in group]
    kl = tokens = 0.0
    for index in split(samples, micro_batch_tokens):
        batch = micro_batch(samples, index, policy.device)
        logprobs_NT, _ = logprobs_and_entropy(policy, batch, temperature)
        kl += mismatch(logprobs_NT, batch.sampler_logprobs_NT, batch.mask_NT)[0].item()
        tokens += batch.mask_NT.sum().item()
    return kl / tokens
