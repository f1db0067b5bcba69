"""From completions to padded micro-batches, and the log-probabilities of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from qerl.models.policy import Policy
from qerl.rollout.sampler import Completion

#: Rows of logits that exist at once; with a vocabulary of 152k in float32 they take 0.6 GB.
LOGIT_ROWS = 1024


@dataclass(frozen=True)
class Sample:
    """One completion with what the loss needs."""

    prompt: list[int]
    completion: Completion
    reward: float
    advantage: float

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences: under causal attention padding behind them needs no mask."""

    index: list[int]  # place of each row in the batch
    ids: torch.Tensor  # [N, L] prompt, completion, padding
    positions_NT: torch.Tensor  # [N, T] where the hidden state that predicts a completion token stands
    targets_NT: torch.Tensor  # [N, T] completion tokens
    mask_NT: torch.Tensor  # [N, T] 1.0 on completion tokens
    finished_N: torch.Tensor  # [N] 1.0 where a stop token ended the completion
    sampler_logprobs_NT: torch.Tensor  # [N, T]
    rewards_N: torch.Tensor  # [N]
    advantages_N: torch.Tensor  # [N]


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype, device=device)


def micro_batch(samples: Sequence[Sample], index: list[int], device: torch.device) -> MicroBatch:
    """Pad the samples `index` of a batch together."""
    chosen = [samples[i] for i in index]
    completions = [s.completion for s in chosen]
    spans = [range(len(s.prompt) - 1, s.length - 1) for s in chosen]
    return MicroBatch(
        index=index,
        ids=_padded([s.prompt + s.completion.token_ids for s in chosen], torch.long, device),
        positions_NT=_padded(spans, torch.long, device),
        targets_NT=_padded([c.token_ids for c in completions], torch.long, device),
        mask_NT=_padded([[1.0] * len(c.token_ids) for c in completions], torch.float32, device),
        finished_N=torch.tensor([float(c.finished) for c in completions], device=device),
        sampler_logprobs_NT=_padded([c.logprobs for c in completions], torch.float32, device),
        rewards_N=torch.tensor([s.reward for s in chosen], dtype=torch.float32, device=device),
        advantages_N=torch.tensor([s.advantage for s in chosen], dtype=torch.float32, device=device),
    )


def split(samples: Sequence[Sample], max_tokens: int, parts: int = 1) -> list[list[int]]:
    """Indices of the samples of each micro-batch, sorted by length, so that little is padding.

    None exceeds `max_tokens` with padding, or its even share where `parts` processes divide the batch.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].length)
    most = math.ceil(len(samples) / parts)
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and (len(batches[-1]) == most or samples[i].length * (len(batches[-1]) + 1) > max_tokens):
            batches.append([])
        batches[-1].append(i)
    return batches


def _row_logprobs(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = log_softmax((hidden @ head.to(hidden.dtype).T).float() / temperature, dim=-1)
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def logprobs_and_entropy(policy: Policy, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the completion tokens and entropy of the distributions that they come from.

    Both [N, T] float32 at the sampling temperature, zero on padding; the entropy, H = -sum pi log pi, carries no
    gradient. Logits exist for `LOGIT_ROWS` tokens at a time and are computed again in the backward pass.
    """
    with policy.autocast():
        hidden = policy.lm.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        where = batch.mask_NT.bool()
        rows = hidden.gather(1, batch.positions_NT[..., None].expand(-1, -1, hidden.shape[-1]))[where]
        targets, head = batch.targets_NT[where], policy.lm.get_output_embeddings().weight
        parts = [
            checkpoint(
                _row_logprobs,
                rows[i : i + LOGIT_ROWS],
                head,
                targets[i : i + LOGIT_ROWS],
                temperature,
                use_reentrant=False,
            )
            for i in range(0, len(rows), LOGIT_ROWS)
        ]
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    empty = torch.zeros_like(batch.mask_NT)
    return empty.masked_scatter(where, logprobs), empty.masked_scatter(where, entropies)
