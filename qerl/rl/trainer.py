"""The GRPO loop (paper Algorithm 1): roll out with noise, reward, update without it, log, checkpoint."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qerl.config import OptimizerSettings, RecordFormat, RunSettings
from qerl.data.prompts import prompt_ids
from qerl.data.records import Problem
from qerl.measure import peak_memory_bytes, seconds
from qerl.models.policy import Policy
from qerl.progress import track
from qerl.rl.advantages import group_advantages
from qerl.rl.aqn import Noise
from qerl.rl.batches import MicroBatch, Sample, logprobs_and_entropy, micro_batches
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.losses import grpo_loss, mismatch, truncated_importance
from qerl.rl.rewards import PARTS, group_rewards
from qerl.rollout.sampler import Completion, Sampler, SamplingParams


@dataclass(frozen=True)
class Task:
    """What the policy is trained on."""

    problems: list[Problem]
    format: RecordFormat
    instruction: str


@dataclass(frozen=True)
class Rollout:
    """One batch of scored completions with its statistics."""

    samples: list[Sample]
    metrics: dict[str, float]


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


def problem_indices(count: int, seed: int, step: int, per_step: int) -> list[int]:
    """The problems of `step` (1-based): a fresh permutation an epoch, a function of (seed, epoch) alone."""
    chosen = []
    for position in range((step - 1) * per_step, step * per_step):
        epoch, offset = divmod(position, count)
        key = np.array([seed, epoch], dtype=np.uint64)
        chosen.append(int(np.random.Generator(np.random.Philox(key=key)).permutation(count)[offset]))
    return chosen


class Trainer:
    """Trains a policy; `run` continues from the newest checkpoint."""

    def __init__(
        self,
        settings: RunSettings,
        policy: Policy,
        sampler: Sampler,
        task: Task,
        checkpoints: Checkpoints,
        metrics: Path,
    ) -> None:
        if not task.problems:
            raise ValueError(f"data set {settings.dataset} has no training problems")
        self.settings = settings
        self.policy = policy
        self.sampler = sampler
        self.task = task
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.noise = Noise(policy.lm, settings.noise, settings.seed)
        self.optimizer = make_optimizer(policy, settings.optimizer)

    def run(self) -> list[dict[str, float]]:
        """Train to the last step; return the metrics of every step."""
        rows = self._resume()
        steps = range(len(rows) + 1, self.settings.steps + 1)
        for step in track(steps, self.settings.steps, "GRPO steps", start=len(rows)):
            rows.append(self.step(step))
            self._write(rows)
            if step % self.settings.checkpoint_every == 0 and step < self.settings.steps:
                self.checkpoints.save(step, self._state(rows))
        return rows

    def step(self, step: int) -> dict[str, float]:
        """One rollout and its updates."""
        torch.manual_seed(self.settings.seed * 1_000_003 + step)
        with seconds() as total, self.noise.at(step, self.settings.steps) as report:
            with seconds() as rollout_time:
                rollout = self._rollout(step)
            if self.settings.noise.mode == "sampler":
                self.noise.clear()
            with seconds() as update_time:
                update = self._update(step, rollout)
        completed = sum(len(s.completion.token_ids) for s in rollout.samples)
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

    # --- rollout ---

    def _rollout(self, step: int) -> Rollout:
        rollout = self.settings.rollout
        indices = problem_indices(len(self.task.problems), self.settings.seed, step, rollout.prompts)
        problems = [self.task.problems[i] for i in indices]
        prompts = [prompt_ids(self.policy.tokenizer, p.question, self.task.instruction) for p in problems]
        sampling = rollout.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            count=rollout.group_size,
            seed=self.settings.seed * 1_000_003 + step,
        )
        groups = self.sampler.generate(prompts, params)
        scored = [self._score(group, problem) for group, problem in zip(groups, problems, strict=True)]
        rewards_PG = torch.tensor([rewards for rewards, _ in scored])
        advantages_PG = group_advantages(rewards_PG).tolist()
        samples = [
            Sample(prompt, completion, advantage, reward)
            for prompt, group, advantages, (rewards, _) in zip(prompts, groups, advantages_PG, scored, strict=True)
            for completion, advantage, reward in zip(group, advantages, rewards, strict=True)
        ]
        return Rollout(samples, _rollout_metrics(samples, [p for _, parts in scored for p in parts], rewards_PG))

    def _score(self, group: Sequence[Completion], problem: Problem) -> tuple[list[float], list[dict[str, float]]]:
        texts = [str(self.policy.tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in group]
        return group_rewards(texts, problem, self.task.format, self.settings.reward)

    # --- update ---

    def _update(self, step: int, rollout: Rollout) -> dict[str, float]:
        """All updates of one rollout; the figures are those of the first, made by the policy that sampled."""
        rate = learning_rate(self.settings.optimizer, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        device, limit = self.policy.device, self.settings.micro_batch_tokens
        batches = list(micro_batches(rollout.samples, limit, device))
        old: list[torch.Tensor] = []
        self.policy.lm.train()
        metrics = self._one_update(batches, len(rollout.samples), old)
        for _ in range(self.settings.loss.updates_per_rollout - 1):
            self._one_update(batches, len(rollout.samples), old)
        self.policy.lm.eval()
        return {**metrics, "learning_rate": rate}

    def _one_update(self, batches: list[MicroBatch], total: int, old: list[torch.Tensor]) -> dict[str, float]:
        """Accumulate the gradient over the micro-batches and step; fills `old` the first time."""
        first = not old
        sums = {"loss": 0.0, "entropy": 0.0, "mismatch/kl": 0.0, "tokens": 0.0}
        worst = 1.0
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            logprobs, entropy = logprobs_and_entropy(self.policy, batch, self.settings.rollout.sampling.temperature)
            if first:
                old.append(logprobs.detach())
            loss = self._loss(logprobs, old[i], batch, total)
            loss.backward()
            kl, ratio = mismatch(logprobs, batch.sampler_logprobs_NT, batch.mask_NT)
            worst = max(worst, ratio.item())
            for name, value in (
                ("loss", loss),
                ("entropy", entropy.sum()),
                ("mismatch/kl", kl),
                ("tokens", batch.mask_NT.sum()),
            ):
                sums[name] += value.item()
        norm = torch.nn.utils.clip_grad_norm_(
            [p for _, p in self.policy.trainable()], self.settings.optimizer.max_grad_norm
        )
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite; lower optimizer.learning_rate or use dtype=float32")
        self.optimizer.step()
        per_token = {name: sums[name] / sums["tokens"] for name in ("entropy", "mismatch/kl")}
        return {"loss": sums["loss"], **per_token, "mismatch/max_ratio": worst, "grad_norm": norm.item()}

    def _loss(self, logprobs: torch.Tensor, old: torch.Tensor, batch: MicroBatch, total: int) -> torch.Tensor:
        cap = self.settings.loss.importance_cap
        importance = None if cap is None else truncated_importance(old, batch.sampler_logprobs_NT, cap)
        return grpo_loss(logprobs, old, batch.advantages_N, batch.mask_NT, self.settings.loss, total, importance)

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


def _rollout_metrics(
    samples: list[Sample], parts: list[dict[str, float]], rewards_PG: torch.Tensor
) -> dict[str, float]:
    completions = [s.completion for s in samples]
    return {
        "reward": statistics.fmean(s.reward for s in samples),
        **{f"reward/{name}": statistics.fmean(p[name] for p in parts) for name in PARTS},
        "reward/equal_groups": (rewards_PG.std(dim=1) == 0).float().mean().item(),
        "completion_length": statistics.fmean(len(c.token_ids) for c in completions),
        "truncated": statistics.fmean(not c.finished for c in completions),
    }
