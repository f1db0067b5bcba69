"""The updates of a rollout: losses and gradients over micro-batches, which the processes of a run share out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass

import torch

from qerl.config import RunSettings
from qerl.models.dropout import set_keys
from qerl.models.policy import Policy
from qerl.models.value import is_value, value_adapter, values
from qerl.rl.batches import MicroBatch, Sample, logprobs_and_entropy, micro_batch, split
from qerl.rl.losses import BatchSize, clipped, importance_weights, k3, mismatch, policy_loss
from qerl.rl.memory import Recomputation
from qerl.rl.ppo import Moments, gae, terminal_rewards, value_loss, whiten
from qerl.rl.processes import Processes


def make_optimizer(policy: Policy, settings: RunSettings) -> torch.optim.Optimizer:
    """AdamW over what is trained; matrices decay, vectors (norms, biases) don't. `peak` is a group's learning rate."""
    optimizer = settings.optimizer
    groups = []
    for of_value, rate in ((False, optimizer.learning_rate), (True, settings.loss.ppo.learning_rate)):
        parameters = [p for name, p in policy.trainable() if is_value(name) == of_value]
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": optimizer.weight_decay, "peak": rate})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": rate})
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if optimizer.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        kind = AdamW8bit
    return kind([g for g in groups if g["params"]], lr=optimizer.learning_rate, betas=optimizer.betas)  # type: ignore[call-arg]


def warmup_cosine(warmup_ratio: float, step: int, total_steps: int) -> float:
    """The share of the learning rate at a step, counted from 1: linear warm-up, then a cosine to zero."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(total_steps - warmup, 1)
    return (1 + math.cos(math.pi * progress)) / 2


@dataclass
class _Part:
    """A micro-batch with what stays the same over all updates of a rollout; filled in by the first."""

    batch: MicroBatch
    step: int
    mask_NT: torch.Tensor  # [N, T] 1.0 on the tokens that carry a loss
    advantages_NT: torch.Tensor  # [N, 1], or for ppo [N, T]
    old_NT: torch.Tensor | None = None
    reference_NT: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    old_values_NT: torch.Tensor | None = None
    returns_NT: torch.Tensor | None = None


#: What is added up over micro-batches and processes.
_SUMS = (
    "loss",
    "tokens",
    "entropy",
    "mismatch/kl",
    "reference/kl",
    "ratios",
    "clip_ratio/low",
    "clip_ratio/high",
    "value/loss",
    "value/clipped",
)


class DivergedError(ValueError):
    """A run whose numbers left the range of floats; the message is one sentence for the user."""


class Updater:
    """Updates a policy on the completions of a rollout."""

    def __init__(self, settings: RunSettings, policy: Policy, processes: Processes) -> None:
        self.settings = settings
        self.policy = policy
        self.processes = processes
        self.optimizer = make_optimizer(policy, settings)
        chosen = settings.gradient_checkpointing == "auto" and policy.device.type == "cuda"
        self.recomputation = Recomputation(policy) if chosen else None

    def update(self, step: int, samples: list[Sample]) -> dict[str, float]:
        """All updates of one rollout; `samples` is the whole batch, the same in every process.

        Clipping and the value's loss are means over all updates; the other figures are those of the first, by the
        policy that sampled.
        """
        schedule = warmup_cosine(self.settings.optimizer.warmup_ratio, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * schedule
        rows = split(samples, self.settings.micro_batch_tokens, self.processes.count)
        whole = self._batch_size(samples, len(rows))
        parts = list(self._parts(step, samples, rows))
        sums = dict.fromkeys(_SUMS, 0.0)
        updates = self.settings.loss.updates_per_rollout
        self.policy.lm.train()
        with self._weights(parts):
            estimated = self._estimate_advantages(parts) if self.settings.loss.name == "ppo" else {}
            worst, norm = self._first_update(parts, whole, sums)
            for _ in range(updates - 1):
                self._further_update(parts, whole, sums)
        self.policy.lm.eval()
        totals = dict(zip(_SUMS, self.processes.sum(list(sums.values())), strict=True))
        of_values = {name: totals[name] / updates for name in ("value/loss", "value/clipped") if estimated}
        return {
            "loss": totals["loss"],
            **{name: totals[name] / totals["tokens"] for name in ("entropy", "mismatch/kl", "reference/kl")},
            **{name: totals[name] / max(totals["ratios"], 1) for name in ("clip_ratio/low", "clip_ratio/high")},
            **estimated,
            **of_values,
            "mismatch/max_ratio": self.processes.max(worst),
            "grad_norm": norm,
            "learning_rate": self.settings.optimizer.learning_rate * schedule,
        }

    # --- the batch ---

    def _batch_size(self, samples: list[Sample], micro_batches: int) -> BatchSize:
        unmasked = (s for s in samples if s.completion.finished or not self.settings.loss.mask_truncated)
        tokens = sum(len(sample.completion.token_ids) for sample in unmasked)
        return BatchSize(len(samples), tokens, self.settings.rollout.sampling.max_tokens, micro_batches)

    def _parts(self, step: int, samples: list[Sample], rows: list[list[int]]) -> Iterator[_Part]:
        """This process's micro-batches: sorted by length, so that taking turns shares the work evenly."""
        for number in range(self.processes.rank, len(rows), self.processes.count):
            batch = micro_batch(samples, rows[number], self.policy.device)
            mask = batch.mask_NT * batch.finished_N[:, None] if self.settings.loss.mask_truncated else batch.mask_NT
            yield _Part(batch, step, mask, batch.advantages_N[:, None])

    # --- gradients ---

    def _forward(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        keep = self._choose_recomputed(part)
        batch = part.batch
        # The same in every update of a rollout, in every process and after a restart.
        keys = [(self.settings.seed, part.step, *key) for key in batch.keys]
        set_keys(self.policy.lm, keys, batch.packing.lengths)
        return logprobs_and_entropy(self.policy, batch, self.settings.rollout.sampling.temperature, keep)

    def _choose_recomputed(self, part: _Part) -> bool:
        """Of the blocks; returns whether the logits are kept."""
        if self.recomputation is None or not torch.is_grad_enabled():
            return False
        tokens = part.batch.ids.numel()
        return self.recomputation.choose(tokens) == 0 and self.recomputation.keeps_logits(tokens)

    def _weights(self, parts: list[_Part]) -> AbstractContextManager[None]:
        if self.recomputation is None:
            return nullcontext()
        return self.recomputation.weights(max((part.batch.ids.numel() for part in parts), default=0))

    def _reference(self, part: _Part) -> torch.Tensor | None:
        if not self.settings.loss.kl:
            return None
        with torch.no_grad(), self.policy.reference():
            return self._forward(part)[0]

    def _first_update(self, parts: list[_Part], whole: BatchSize, sums: dict[str, float]) -> tuple[float, float]:
        """The update by the policy that sampled, whose log-probabilities are the old ones.

        Returns the largest token ratio to the sampler and the norm of the gradient.
        """
        worst = 1.0
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            part.reference_NT = self._reference(part)
            logprobs, entropy = self._forward(part)
            part.old_NT = logprobs.detach()
            sampled, mask = part.batch.sampler_logprobs_NT, part.batch.mask_NT
            part.importance = importance_weights(part.old_NT, sampled, part.mask_NT, self.settings.loss)
            sums["loss"] += self._backward(logprobs, part, whole, sums)
            kl, ratio = mismatch(part.old_NT, sampled, mask)
            worst = max(worst, ratio.item())
            sums["mismatch/kl"] += kl.item()
            sums["entropy"] += entropy.sum().item()
            sums["tokens"] += mask.sum().item()
            if part.reference_NT is not None:
                sums["reference/kl"] += (k3(part.reference_NT - part.old_NT) * mask).sum().item()
        return worst, self._optimize()

    def _further_update(self, parts: list[_Part], whole: BatchSize, sums: dict[str, float]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            self._backward(self._forward(part)[0], part, whole, sums)
        self._optimize()

    def _backward(self, logprobs: torch.Tensor, part: _Part, whole: BatchSize, sums: dict[str, float]) -> float:
        """Add the gradient of a micro-batch and count what is clipped; returns its share of the loss."""
        assert part.old_NT is not None
        ratios = (logprobs, part.old_NT, part.advantages_NT, part.mask_NT, self.settings.loss)
        loss = policy_loss(*ratios, whole, part.reference_NT, part.importance)
        loss.backward()
        counted = zip(("clip_ratio/low", "clip_ratio/high", "ratios"), clipped(*ratios), strict=True)
        for name, number in counted:
            sums[name] += number.item()
        if part.returns_NT is not None:
            self._fit_values(part, whole, sums)
        return loss.item()

    def _optimize(self) -> float:
        """Add up the processes' gradients, clip, step; the norm of the policy's before clipping.

        The value's gradient is clipped on its own: a large error of the value must not shrink the policy's step.
        """
        trained = list(self.policy.trainable())
        self.processes.add_gradients(p for _, p in trained)
        norms = []
        for of_value in (False, True):
            parameters = [p for name, p in trained if is_value(name) == of_value]
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.max_grad_norm))
        if not all(torch.isfinite(norm) for norm in norms):
            raise DivergedError(
                "the gradient is not finite, as the loss or a weight is NaN or infinite; lower optimizer.learning_rate "
                "or use dtype=float32 (the last checkpoint, from before, is kept)"
            )
        self.optimizer.step()
        return norms[0].item()

    # --- ppo ---

    def _estimate_advantages(self, parts: list[_Part]) -> dict[str, float]:
        """Advantages and returns from the values before the first update; how well the values foresaw the returns."""
        ppo = self.settings.loss.ppo
        moments, of_returns, of_errors = Moments(), Moments(), Moments()
        for part in parts:
            mask = part.batch.mask_NT
            with torch.no_grad():
                part.old_values_NT = values(self.policy, part.batch)
            rewards = terminal_rewards(part.batch.rewards_N, mask)
            part.advantages_NT, part.returns_NT = gae(rewards, part.old_values_NT, mask, ppo.gamma, ppo.lam)
            moments += Moments.of(part.advantages_NT, part.mask_NT)
            of_returns += Moments.of(part.returns_NT, mask)
            of_errors += Moments.of(part.returns_NT - part.old_values_NT, mask)
        moments, of_returns, of_errors = (
            Moments(*self.processes.sum(astuple(one))) for one in (moments, of_returns, of_errors)
        )
        if ppo.whiten:
            for part in parts:
                part.advantages_NT = whiten(part.advantages_NT, part.mask_NT, moments)
        explained = 1 - of_errors.variance / of_returns.variance if of_returns.variance else 0.0
        return {"value/mean": of_returns.mean - of_errors.mean, "value/explained_variance": explained}

    def _fit_values(self, part: _Part, whole: BatchSize, sums: dict[str, float]) -> None:
        """Add the gradient of the value's loss."""
        assert part.old_values_NT is not None
        assert part.returns_NT is not None
        ppo, old = self.settings.loss.ppo, part.old_values_NT
        self._choose_recomputed(part)
        with value_adapter(self.policy):  # in the backward pass too, where blocks may be computed again
            now = values(self.policy, part.batch)
            loss, held = value_loss(now, old, part.returns_NT, part.mask_NT, ppo.value_clip, whole.tokens)
            (ppo.value_coefficient * loss).backward()
        sums["value/loss"] += loss.item()
        sums["value/clipped"] += held.item()
