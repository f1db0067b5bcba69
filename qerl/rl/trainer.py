"""The loop of policy optimization (paper Algorithm 1): roll out with noise, update, log, checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.config import OptimizerSettings, RunSettings
from qerl.measure import peak_memory_bytes, seconds
from qerl.models.policy import Policy
from qerl.progress import track
from qerl.rl.aqn import Noise
from qerl.rl.batches import MicroBatch, Sample, logprobs_and_entropy, micro_batches
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.collect import Collector, step_seed
from qerl.rl.losses import BatchSize, importance_weights, k3, mismatch, policy_loss


def make_optimizer(policy: Policy, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over what is trained; matrices decay, vectors (norms, biases) don't."""
    parameters = [p for _, p in policy.trainable()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if settings.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        kind = AdamW8bit
    return kind([g for g in groups if g["params"]], lr=settings.learning_rate, betas=settings.betas)  # type: ignore[call-arg]


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up, then a cosine to zero; `step` counts from 1."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(total_steps - warmup, 1)
    return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class _Part:
    """A micro-batch with what stays the same over all updates of a rollout."""

    batch: MicroBatch
    mask_NT: torch.Tensor  # [N, T] 1.0 on the tokens that carry a loss
    old_NT: torch.Tensor
    reference_NT: torch.Tensor | None
    importance: torch.Tensor | None


class Trainer:
    """Trains a policy; `run` continues from the newest checkpoint."""

    def __init__(
        self, settings: RunSettings, policy: Policy, collector: Collector, checkpoints: Checkpoints, metrics: Path
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.collector = collector
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.noise = Noise(policy.lm, settings.noise, settings.seed)
        self.optimizer = make_optimizer(policy, settings.optimizer)

    def run(self) -> list[dict[str, float]]:
        """Train to the last step; return the metrics of every step."""
        rows = self._resume()
        steps = range(len(rows) + 1, self.settings.steps + 1)
        for step in track(steps, self.settings.steps, "steps", start=len(rows)):
            rows.append(self.step(step, int(rows[-1]["problems"]) if rows else 0))
            self._write(rows)
            if step % self.settings.checkpoint_every == 0 and step < self.settings.steps:
                self.checkpoints.save(step, self._state(rows))
        return rows

    def step(self, step: int, position: int) -> dict[str, float]:
        """One rollout and its updates; `position` problems were taken before."""
        torch.manual_seed(step_seed(self.settings.seed, step))
        with seconds() as total, self.noise.at(step, self.settings.steps) as report:
            with seconds() as rollout_time:
                rollout = self.collector.collect(step, position)
            if self.settings.noise.mode == "sampler":
                self.noise.clear()
            with seconds() as update_time:
                update = self._update(step, rollout.samples)
        completed = rollout.metrics["completion_tokens"]
        read = sum(s.length for s in rollout.samples) * self.settings.loss.updates_per_rollout
        return {
            "step": step,
            **rollout.metrics,
            **update,
            "noise/sigma": report.sigma,
            "noise/norm": report.norm,
            "tokens_per_second/rollout": completed / rollout_time.value,
            "tokens_per_second/update": read / update_time.value,
            "seconds/rollout": rollout_time.value,
            "seconds/update": update_time.value,
            "seconds/step": total.value,
            "memory_bytes": peak_memory_bytes(),
        }

    # --- update ---

    def _update(self, step: int, samples: list[Sample]) -> dict[str, float]:
        """All updates of one rollout; the figures are those of the first, made by the policy that sampled."""
        rate = learning_rate(self.settings.optimizer, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = list(micro_batches(samples, self.settings.micro_batch_tokens, self.policy.device))
        masks = [self._loss_mask(batch) for batch in batches]
        tokens = sum(mask.sum().item() for mask in masks)
        whole = BatchSize(len(samples), tokens, self.settings.rollout.sampling.max_tokens, len(batches))
        self.policy.lm.train()
        parts: list[_Part] = []
        metrics = self._first_update(batches, masks, whole, parts)
        for _ in range(self.settings.loss.updates_per_rollout - 1):
            self._further_update(parts, whole)
        self.policy.lm.eval()
        return {**metrics, "learning_rate": rate}

    def _loss_mask(self, batch: MicroBatch) -> torch.Tensor:
        return batch.mask_NT * batch.finished_N[:, None] if self.settings.loss.mask_truncated else batch.mask_NT

    def _forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_and_entropy(self.policy, batch, self.settings.rollout.sampling.temperature)

    def _reference(self, batch: MicroBatch) -> torch.Tensor | None:
        if not self.settings.loss.kl:
            return None
        with torch.no_grad(), self.policy.reference():
            return self._forward(batch)[0]

    def _first_update(
        self, batches: list[MicroBatch], masks: list[torch.Tensor], whole: BatchSize, parts: list[_Part]
    ) -> dict[str, float]:
        """The update by the policy that sampled: its log-probabilities are the old ones. Fills `parts`."""
        sums = dict.fromkeys(("loss", "entropy", "mismatch/kl", "reference/kl", "tokens"), 0.0)
        worst = 1.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch, mask in zip(batches, masks, strict=True):
            reference = self._reference(batch)
            logprobs, entropy = self._forward(batch)
            old, sampled = logprobs.detach(), batch.sampler_logprobs_NT
            importance = importance_weights(old, sampled, mask, self.settings.loss)
            parts.append(_Part(batch, mask, old, reference, importance))
            loss = self._backward(logprobs, parts[-1], whole)
            kl, ratio = mismatch(old, sampled, batch.mask_NT)
            worst = max(worst, ratio.item())
            to_reference = 0.0 if reference is None else (k3(reference - old) * batch.mask_NT).sum().item()
            found = (loss, entropy.sum().item(), kl.item(), to_reference, batch.mask_NT.sum().item())
            sums = {name: sums[name] + value for name, value in zip(sums, found, strict=True)}
        norm = self._optimize()
        per_token = {name: sums[name] / sums["tokens"] for name in ("entropy", "mismatch/kl", "reference/kl")}
        return {"loss": sums["loss"], **per_token, "mismatch/max_ratio": worst, "grad_norm": norm}

    def _further_update(self, parts: list[_Part], whole: BatchSize) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            self._backward(self._forward(part.batch)[0], part, whole)
        self._optimize()

    def _backward(self, logprobs: torch.Tensor, part: _Part, whole: BatchSize) -> float:
        """Add the gradient of a micro-batch; its share of the loss."""
        loss = policy_loss(
            logprobs,
            part.old_NT,
            part.batch.advantages_N,
            part.mask_NT,
            self.settings.loss,
            whole,
            part.reference_NT,
            part.importance,
        )
        loss.backward()
        return loss.item()

    def _optimize(self) -> float:
        """Clip, step; the norm before clipping."""
        limit = self.settings.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.policy.trainable()], limit)
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite; lower optimizer.learning_rate or use dtype=float32")
        self.optimizer.step()
        return norm.item()

    # --- state ---

    def _state(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        trained = {name: p.detach() for name, p in self.policy.trainable()}
        return {"trained": trained, "optimizer": self.optimizer.state_dict(), "rows": rows}

    def _resume(self) -> list[dict[str, float]]:
        state = self.checkpoints.load(self.policy.device)
        if state is None:
            return []
        with torch.no_grad():
            for name, parameter in self.policy.trainable():
                parameter.copy_(state["trained"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["rows"]

    def _write(self, rows: list[dict[str, float]]) -> None:
        """The whole file anew each step: a killed run leaves no torn or repeated row."""
        self.metrics.parent.mkdir(parents=True, exist_ok=True)
        partial = self.metrics.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(self.metrics)
