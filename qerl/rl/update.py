"""The updates on a rollout: losses and gradients of micro-batches, the optimizer's steps, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from qerl.kernels.state import dry_run
from qerl.models.experts import Experts
from qerl.models.lora import SharedCasts, dropouts, set_keys
from qerl.models.policy import Policy, ShardedRoot
from qerl.rl.losses import BatchSize, LossInputs, LossOutputs, importance_weights, k3, mismatch, policy_loss, ratio_sums
from qerl.rl.packing import MicroBatch, Sample, logprobs_and_entropy, micro_batch, padded_tokens, row_tokens, split
from qerl.rl.parallel import Processes
from qerl.rl.passes import PassGraphs, Recomputation, pass_graphs
from qerl.rl.rollouts import StoredStep
from qerl.rl.value import Moments, gae, is_value, terminal_rewards, value_adapter, value_loss, values, whiten
from qerl.rollout.sampler import Completion
from qerl.settings.run import OptimizerSettings, RunSettings

# The optimizer of a run, and the schedule of its learning rate.


def make_optimizer(policy: Policy, settings: OptimizerSettings, value_rate: float = 0.0) -> torch.optim.Optimizer:
    """AdamW over the trained tensors, without weight decay on vectors (norms, biases).

    `peak` of a parameter group is its learning rate before the schedule; `value_rate` is a value function's.
    """
    groups = []
    for of_value, rate in ((False, settings.learning_rate), (True, value_rate)):
        parameters = [p for name, p in policy.trainable() if is_value(name) == of_value]
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": settings.weight_decay, "peak": rate})
        groups.append({"params": vectors, "weight_decay": 0.0, "peak": rate})
    kind: Any = torch.optim.AdamW
    if settings.name == "adamw8bit":
        from qerl.rl.optimizer import AdamW8bit  # imports bitsandbytes

        kind = AdamW8bit
    optimizer: torch.optim.Optimizer = kind(
        [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.betas
    )
    return optimizer


def warmup_cosine(warmup_ratio: float, step: int, total_steps: int) -> float:
    """The factor of the learning rate at a step (1-based): linear warm-up, then a cosine to zero."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(total_steps - warmup, 1)
    return (1 + math.cos(math.pi * progress)) / 2


# Silent completions: their gradient is exactly zero, so an update reads only a sample of them, for its metrics.


@dataclass(frozen=True)
class Silent:
    """The silent completions of a batch, by their index in it."""

    index: frozenset[int]
    #: Those that the update reads without a gradient, in order.
    sampled: list[int]
    #: Tokens of all silent completions.
    tokens: int


# Micro-batches are cut as if silent completions were read. Cutting the rest anew would make fewer of them, but `bnpo`
# would be another loss, and every loss would add up its terms in another order.
def find_silent(samples: Sequence[Sample], settings: RunSettings, step: int) -> Silent:
    """The silent completions of a batch, and a random sample of them by (seed, step).

    The sample has the share `loss.silent_sample`, rounded up, and is drawn without replacement.
    """
    loss = settings.loss
    silent: list[int] = []
    # These terms have a gradient of their own for every completion.
    if not (loss.kl or loss.entropy or loss.name == "ppo"):
        silent = [
            i
            for i, sample in enumerate(samples)
            if sample.advantage == 0 or (loss.mask_truncated and not sample.completion.finished)
        ]
    generator = np.random.Generator(np.random.Philox(key=np.array([settings.seed, step], dtype=np.uint64)))
    count = math.ceil(loss.silent_sample * len(silent))
    sampled = sorted(generator.choice(silent, count, replace=False).tolist()) if silent else []
    return Silent(frozenset(silent), sampled, sum(samples[i].completion.drawn for i in silent))


# Statistics of the updates on a rollout: sums over micro-batches, updates and processes, and metrics from them.


@dataclass
class UpdateStats:
    """Sums that `+=` adds up, except the largest ratio, which is a maximum."""

    #: Figures of the first update, up to `sequence_squares`.
    loss: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    reference_kl: float = 0.0
    #: Ratios of trainer and sampler and their squares, over tokens and over sequences, in the first update.
    sequences: float = 0.0
    token_ratios: float = 0.0
    token_squares: float = 0.0
    sequence_ratios: float = 0.0
    sequence_squares: float = 0.0
    #: The number of ratios in all updates, and of those clipped below and above.
    ratios: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    #: Loss and share of clipped values of the value function, summed over all updates, with ppo.
    value_loss: float = 0.0
    value_clipped: float = 0.0
    #: The largest ratio of a token's probability between trainer and sampler, either way.
    max_ratio: float = 1.0

    def __iadd__(self, other: UpdateStats) -> UpdateStats:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_ratio = max(self.max_ratio, other.max_ratio)
        return self

    def over(self, processes: Processes) -> UpdateStats:
        """The statistics summed over all processes."""
        sums = processes.sum([getattr(self, name) for name in _SUMS])
        return UpdateStats(**dict(zip(_SUMS, sums, strict=True)), max_ratio=processes.max(self.max_ratio))

    def standing_for(self, tokens: int, sequences: int) -> UpdateStats:
        """The estimate of the sums over `tokens` and `sequences` from these sums over a sample of them."""
        by_token, by_sequence = tokens / max(self.tokens, 1), sequences / max(self.sequences, 1)
        scaled = {name: getattr(self, name) * by_token for name in _TOKEN_SUMS}
        scaled |= {name: getattr(self, name) * by_sequence for name in _SEQUENCE_SUMS}
        return UpdateStats(**scaled, tokens=tokens, sequences=sequences, max_ratio=self.max_ratio)

    def metrics(self) -> dict[str, float]:
        """Metrics of the policy's updates: means over tokens or ratios."""
        ratios, tokens = max(self.ratios, 1), max(self.tokens, 1)
        return {
            "loss": self.loss,
            "entropy": self.entropy / tokens,
            "mismatch/kl": self.mismatch_kl / tokens,
            "reference/kl": self.reference_kl / tokens,
            "ess/tokens": _effective_share(self.token_ratios, self.token_squares, self.tokens),
            "ess/sequences": _effective_share(self.sequence_ratios, self.sequence_squares, self.sequences),
            "clip_ratio/low": self.clipped_low / ratios,
            "clip_ratio/high": self.clipped_high / ratios,
        }


def _effective_share(total: float, squares: float, count: float) -> float:
    """The effective sample size (sum w)^2 / sum w^2, as a share of the number of samples."""
    return total * total / (squares * count) if squares and count else 0.0


_TOKEN_SUMS = ("entropy", "mismatch_kl", "token_ratios", "token_squares")
_SEQUENCE_SUMS = ("sequence_ratios", "sequence_squares")
_SUMS = tuple(one.name for one in fields(UpdateStats) if one.name != "max_ratio")


# The updates on a rollout: losses and gradients of micro-batches, which a run's processes share.
#
# Shapes: N sequences, T completion tokens.


@dataclass(frozen=True)
class Choices:
    """What free memory decides once a run, because it changes the last bits; checkpoints have it.

    Rows of up to `logits_tokens` keep their logits for the backward pass, and passes over rows of up to `graph_tokens`
    are CUDA graphs. Other runs of the same settings may choose differently where memory is short.
    """

    logits_tokens: int
    graph_tokens: int


class DivergedError(ValueError):
    """A gradient or the policy's entropy isn't finite. The message is one sentence for the user."""

    def __init__(self, what: str, cause: str) -> None:
        super().__init__(
            f"{what} not finite, because {cause} NaN or infinite; lower optimizer.learning_rate or use dtype=float32 "
            "(the last checkpoint is kept)"
        )


class Updater:
    """Updates a policy on the completions of a rollout."""

    def __init__(self, settings: RunSettings, policy: Policy, processes: Processes) -> None:
        self.settings = settings
        self.policy = policy
        self.processes = processes
        self.optimizer = make_optimizer(policy, settings.optimizer, settings.loss.ppo.learning_rate)
        self._trained = list(policy.trainable())
        self._dropouts = dropouts(policy.lm)
        self._casts = SharedCasts(policy.lm)
        chosen = settings.gradient_checkpointing == "auto" and policy.device.type == "cuda"
        #: The step of the present rollout.
        self._step = 0
        self.temperature = settings.rollout.sampling.temperature
        self.recomputation = Recomputation(policy) if chosen else None
        #: Chosen by the first update, or else by the run that this one continues.
        self.choices: Choices | None = None
        #: Whether the passes of the present update are graphs.
        self._in_graphs = False
        #: Whether the kernels of passes are compiled: a CPU has none, a pass over shards needs all processes, and
        #: experts that are unpacked one by one would read numbers that no kernel wrote.
        self._compiled = (
            policy.device.type != "cuda"
            or policy.root is not None
            or any(isinstance(module, Experts) for module in policy.lm.modules())
        )

    @cached_property
    def graphs(self) -> PassGraphs | None:
        """Passes as CUDA graphs, if they can be; read after the first rollout, which may move the weights."""
        return pass_graphs(self.policy, self.settings, self.recomputation)

    def _choose(self) -> Choices:
        """The choices that all processes have the memory for."""
        self.policy.lm.train()  # with dropout, blocks keep more
        logits = self.recomputation.fitting_tokens(with_logits=True) if self.recomputation else 0
        graphs = self.graphs.fitting_tokens() if self.graphs else 0
        self.policy.lm.eval()
        return Choices(*(-int(self.processes.max(-most)) for most in (logits, graphs)))

    def update(self, step: int, samples: list[Sample], stored: StoredStep | None = None) -> dict[str, float]:
        """Do all updates on one rollout, and return their metrics.

        `samples` is the whole batch, the same in every process. Metrics of clipping and of the value's loss are means
        over all updates; the others come from the first update, by the policy that sampled. `stored` gets the entropies
        of this process's micro-batches in the first update, which changes neither policy nor metrics.
        """
        self._step, loss = step, self.settings.loss
        if not self._compiled:
            self._compile()
        self.choices = self.choices or self._choose()
        schedule = warmup_cosine(self.settings.optimizer.warmup_ratio, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * schedule
        silent = find_silent(samples, self.settings, step)
        indices = split(samples, self.settings.micro_batch_tokens, self.processes.count)
        unmasked = (s for s in samples if s.completion.finished or not loss.mask_truncated)
        tokens = sum(sample.completion.drawn for sample in unmasked)
        size = BatchSize(len(samples), tokens, self.settings.rollout.sampling.max_tokens, len(indices))
        # Made once for all updates on the rollout: only the policy's log-probabilities change between these.
        batches = self._micro_batches(samples, indices, silent.index)
        sampled = self._read_only(samples, silent.sampled)
        # Stored completions that the sample lacks; they count in no metric, so that storing changes none.
        unread = silent.index & stored.index - {*silent.sampled} if stored else set[int]()
        shown = self._read_only(samples, sorted(unread))
        self._choose_passes(samples, indices)

        stats, norms = UpdateStats(), []
        inputs: list[LossInputs] = []
        with self._unpacked_weights([*batches, *sampled, *shown]):
            for number in range(loss.updates_per_rollout):
                first = number == 0
                with self._casts.unchanged():
                    if first:  # before any gradient, while the policy is the one that sampled
                        of_silent = self._read(sampled, stored)
                        self._read(shown, stored)
                        advantages, targets, value_metrics = self._estimates(batches)
                    self._clear_gradients(batches)
                    for place, batch in enumerate(batches):
                        reference_NT = self._reference_logprobs(batch) if first else None
                        logprobs_NT, entropy_NT = self._forward(batch)
                        if first:
                            # The ratio's denominator is the trainer's own log-probability: by the sampler's, which is
                            # perturbed and has other kernels, the ratio would measure noise (docs/algorithms.md).
                            old_NT, mask_NT = logprobs_NT.detach(), self._loss_mask(batch)
                            # Importance weights are of the policy that sampled, so they hold for all updates too.
                            weights_NT = importance_weights(old_NT, batch.sampler_logprobs_NT, mask_NT, loss)
                            inputs.append(
                                LossInputs(old_NT, old_NT, advantages[place], mask_NT, reference_NT, weights_NT)
                            )
                            stats += _compare(batch, old_NT, entropy_NT, reference_NT)
                            if stored:
                                stored.observe(batch, entropy_NT.detach())
                        entropy_bonus_NT = entropy_NT if loss.entropy else None
                        present = replace(inputs[place], logprobs_NT=logprobs_NT, entropy_NT=entropy_bonus_NT)
                        outputs = policy_loss(present, loss, size)
                        if outputs.loss.requires_grad:  # unless all completions are silent
                            outputs.loss.backward()
                        stats += _counted(outputs, first)
                        if loss.name == "ppo":
                            stats += self._fit_values(batch, *targets[place], size)
                norms.append(self._optimize())
        if not self._in_graphs:
            self.policy.lm.eval()
        return {
            **self._metrics(stats, silent, of_silent),
            **value_metrics,
            "grad_norm": norms[0],
            "learning_rate": self.settings.optimizer.learning_rate * schedule,
        }

    def _metrics(self, stats: UpdateStats, silent: Silent, of_silent: UpdateStats) -> dict[str, float]:
        """Metrics of all processes, from the statistics of completions with a gradient and of sampled silent ones."""
        stats, of_silent = stats.over(self.processes), of_silent.over(self.processes)
        stats += of_silent.standing_for(silent.tokens, len(silent.index))
        if not math.isfinite(stats.entropy):  # no gradient tells it where all completions are silent
            raise DivergedError("the policy's probabilities are", "a weight is")
        means = of_silent.metrics() if silent.sampled else {}
        updates = self.settings.loss.updates_per_rollout
        of_value = {"value/loss": stats.value_loss / updates, "value/clipped": stats.value_clipped / updates}
        return {
            **stats.metrics(),
            "silent/completions": len(silent.index),
            "silent/sampled": len(silent.sampled),
            **{f"silent/{name.replace('/', '_')}": means[name] for name in ("entropy", "mismatch/kl") if means},
            **(of_value if self.settings.loss.name == "ppo" else {}),
            "mismatch/max_ratio": stats.max_ratio,
        }

    # --- the micro-batches of this process ---

    def _micro_batches(
        self, samples: list[Sample], indices: list[list[int]], silent: Collection[int]
    ) -> list[MicroBatch]:
        """This process's micro-batches. They are sorted by length, so dealing them out in turn balances the work."""
        if silent:
            indices = sorted(indices, key=lambda index: -row_tokens(samples, [i for i in index if i not in silent]))
        dealt = self._deal(indices, self.processes.rank)
        return [micro_batch(samples, index, self.policy.device, silent) for index in dealt]

    def _read_only(self, samples: list[Sample], silent: list[int]) -> list[MicroBatch]:
        """This process's micro-batches of `silent` completions; the last process has the longest completions."""
        # The first process has the longest of those with a gradient.
        indices = split(samples, self.settings.micro_batch_tokens, self.processes.count, silent)
        dealt = self._deal(indices, self.processes.count - 1 - self.processes.rank)
        return [micro_batch(samples, index, self.policy.device) for index in dealt]

    def _deal(self, indices: list[list[int]], place: int) -> list[list[int]]:
        """The micro-batches number `place` of each turn of the processes."""
        dealt = indices[place :: self.processes.count]
        if self.policy.root is not None:
            # A pass over sharded weights needs all processes. One without a micro-batch in the last turn gets an empty
            # one.
            dealt += [[]] * (math.ceil(len(indices) / self.processes.count) - len(dealt))
        return dealt

    # --- passes ---

    def _choose_passes(self, samples: list[Sample], indices: list[list[int]]) -> None:
        """Choose between CUDA graphs and plain passes in training mode, for the whole update."""
        assert self.choices is not None
        # By rows with their silent completions, so that a large policy doesn't hold memory for its few short rows.
        longest = max((row_tokens(samples, index) for index in indices), default=0)
        self._in_graphs = self.graphs is not None and padded_tokens(longest) <= self.choices.graph_tokens
        # A policy in graphs has no dropout, so that its mode decides nothing, and setting it walks over all modules.
        if not self._in_graphs:
            self.policy.lm.train()

    def _compile(self) -> None:
        """Compile what passes over a row launch, all at the same time. Changes nothing else."""
        self._compiled, tokens = True, [0] * 17  # most rows' lengths aren't multiples of 16 either
        row = [Sample(tokens, Completion(tokens, [0.0] * len(tokens), True), 0.0, 0.0)]
        batch = micro_batch(row, [0], self.policy.device)
        # The backward pass has threads of its own otherwise, which no dry run knows.
        with dry_run(self.policy.device), torch.autograd.set_multithreading_enabled(False):
            logprobs_and_entropy(self.policy, batch, self.temperature)[0].sum().backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: MicroBatch, in_graphs: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [N, T] of a micro-batch's tokens by the present policy."""
        if batch.is_empty:
            return self._no_logprobs(batch), torch.zeros_like(batch.mask_NT)
        if self.graphs and self._in_graphs and in_graphs:
            return self.graphs.logprobs_and_entropy(batch, self.temperature)
        keep_logits = self._choose_recomputed(batch)
        # The same in every update on a rollout, so that the ratio doesn't compare two dropout masks; in every process
        # and after a restart, so that neither changes a run.
        keys = [(self.settings.seed, self._step, *key) for key in batch.keys]
        set_keys(self._dropouts, keys, batch.packing.lengths)
        return logprobs_and_entropy(self.policy, batch, self.temperature, keep_logits)

    def _no_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities [N, T] of a micro-batch without tokens to read: zeros."""
        zeros_NT = torch.zeros_like(batch.mask_NT)
        if self.policy.root is None:
            return zeros_NT
        # By a pass of one token with a gradient of zero: the others wait for this process's shards in both passes.
        token = micro_batch([Sample([0], Completion([0], [0.0], False), 0.0, 0.0)], [0], self.policy.device)
        return zeros_NT + 0 * logprobs_and_entropy(self.policy, token, self.temperature)[0].sum()

    def _choose_recomputed(self, batch: MicroBatch) -> bool:
        """Choose the blocks that the backward pass recomputes; returns whether the logits are kept."""
        if self.recomputation is None or not torch.is_grad_enabled():
            return False
        assert self.choices is not None
        tokens = batch.ids.numel()
        keep_logits = tokens <= self.choices.logits_tokens
        self.recomputation.choose(tokens, keep_logits)
        return keep_logits

    def _unpacked_weights(self, batches: list[MicroBatch]) -> AbstractContextManager[None]:
        """A context that keeps packed weights unpacked for all passes, where memory has room."""
        if self.recomputation is None or self._in_graphs:  # a captured pass unpacks weights into buffers of its own
            return nullcontext()
        return self.recomputation.weights(max((batch.ids.numel() for batch in batches), default=0))

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """Log-probabilities by the policy without its trained tensors; None if no loss needs them."""
        if not self.settings.loss.kl:
            return None
        # Captured passes have the adapter, so these aren't in graphs.
        with torch.no_grad(), self.policy.reference():
            return self._forward(batch, in_graphs=False)[0]

    @torch.no_grad()
    def _read(self, batches: list[MicroBatch], stored: StoredStep | None) -> UpdateStats:
        """Statistics of micro-batches that have no gradient."""
        stats = UpdateStats()
        for batch in batches:
            logprobs_NT, entropy_NT = self._forward(batch)
            stats += _compare(batch, logprobs_NT, entropy_NT)
            if stored:
                stored.observe(batch, entropy_NT)
        return stats

    # --- gradients and the optimizer ---

    def _clear_gradients(self, batches: list[MicroBatch]) -> None:
        """Forget the gradients. Those of graphs are tensors that stay in place."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.graphs and self._in_graphs and not all(batch.is_empty for batch in batches):
            self.graphs.use_gradients()

    def _loss_mask(self, batch: MicroBatch) -> torch.Tensor:
        """[N, T] 1.0 on the tokens that contribute to the loss."""
        return batch.mask_NT * batch.finished_N[:, None] if self.settings.loss.mask_truncated else batch.mask_NT

    def _optimize(self) -> float:
        """Sum the processes' gradients, clip and step. Returns the norm of the policy's gradient before clipping."""
        if self.policy.root is None:  # the backward pass of shards has summed theirs
            self.processes.add_gradients(p for _, p in self._trained)
        norms = []
        # The value's gradient is clipped apart, so that a large error of the value doesn't shrink the policy's step.
        for of_value in (False, True):
            parameters = [p for name, p in self._trained if is_value(name) == of_value]
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.max_grad_norm)
            norms.append(ShardedRoot.whole(norm))
        # Before the step, so that the weights, and with them the last checkpoint, stay finite.
        if not all(torch.isfinite(norm) for norm in norms):
            raise DivergedError("the gradient is", "the loss or a weight is")
        self.optimizer.step()
        self.policy.use_trained()
        if self.policy.root is not None:  # the rollout needs the memory of gradients for whole weights
            self.optimizer.zero_grad(set_to_none=True)
        return norms[0].item()

    # --- ppo ---

    def _estimates(
        self, batches: list[MicroBatch]
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]], dict[str, float]]:
        """The advantages [N, 1] of completions as the rollout has them; for ppo advantages of tokens [N, T].

        With ppo there are also old values and returns [N, T], the targets of the value function in all updates, and its
        metrics.
        """
        if self.settings.loss.name != "ppo":
            return [batch.advantages_N[:, None] for batch in batches], [], {}
        ppo = self.settings.loss.ppo
        advantages, targets = [], []
        moments, of_returns, of_errors = Moments(), Moments(), Moments()
        for batch in batches:
            mask_NT = batch.mask_NT
            with torch.no_grad():
                old_values_NT = values(self.policy, batch)
            rewards_NT = terminal_rewards(batch.rewards_N, mask_NT)
            advantages_NT, returns_NT = gae(rewards_NT, old_values_NT, mask_NT, ppo.gamma, ppo.lam)
            moments += Moments.of(advantages_NT, self._loss_mask(batch))
            of_returns += Moments.of(returns_NT, mask_NT)
            of_errors += Moments.of(returns_NT - old_values_NT, mask_NT)
            advantages.append(advantages_NT)
            targets.append((old_values_NT, returns_NT))
        # By the moments of all processes: a run's advantages don't depend on how its batch is shared out.
        moments, of_returns, of_errors = (
            Moments(*self.processes.sum(astuple(one))) for one in (moments, of_returns, of_errors)
        )
        if ppo.whiten:
            masks = map(self._loss_mask, batches)
            advantages = [whiten(one_NT, mask_NT, moments) for one_NT, mask_NT in zip(advantages, masks, strict=True)]
        # How well the values predicted the returns.
        explained = 1 - of_errors.variance / of_returns.variance if of_returns.variance else 0.0
        metrics = {"value/mean": of_returns.mean - of_errors.mean, "value/explained_variance": explained}
        return advantages, targets, metrics

    def _fit_values(
        self, batch: MicroBatch, old_values_NT: torch.Tensor, returns_NT: torch.Tensor, size: BatchSize
    ) -> UpdateStats:
        """Add the gradient of the value's loss; returns the loss and the share of clipped values."""
        ppo = self.settings.loss.ppo
        self._choose_recomputed(batch)
        with value_adapter(self.policy):  # also around the backward pass, which may recompute blocks
            values_NT, mask_NT = values(self.policy, batch), self._loss_mask(batch)
            loss, clipped = value_loss(values_NT, old_values_NT, returns_NT, mask_NT, ppo.value_clip, size.tokens)
            (ppo.value_coefficient * loss).backward()
        return UpdateStats(value_loss=loss.item(), value_clipped=clipped.item())


def _counted(outputs: LossOutputs, first: bool) -> UpdateStats:
    """The counts of clipped ratios, and in the first update the share of the loss."""
    numbers = (outputs.loss.detach(), outputs.clipped_low, outputs.clipped_high, outputs.ratios)
    # All at once: each wait for the GPU keeps the host from launching what follows.
    loss, low, high, ratios = torch.stack(numbers).tolist()
    return UpdateStats(loss=loss if first else 0.0, clipped_low=low, clipped_high=high, ratios=ratios)


def _compare(
    batch: MicroBatch,
    old_logprobs_NT: torch.Tensor,
    entropy_NT: torch.Tensor,
    reference_logprobs_NT: torch.Tensor | None = None,
) -> UpdateStats:
    """Statistics of the policy that sampled, on the completions that were read: its entropy, its mismatch with the
    sampler, and its KL to the reference.
    """
    if batch.is_empty:
        return UpdateStats()
    read_N = batch.read_N
    mask_NT, old_NT, sampler_NT = (x[read_N] for x in (batch.mask_NT, old_logprobs_NT, batch.sampler_logprobs_NT))
    kl, ratio = mismatch(old_NT, sampler_NT, mask_NT)
    stats = UpdateStats(
        **ratio_sums(old_NT, sampler_NT, mask_NT),
        tokens=mask_NT.sum().item(),
        sequences=len(mask_NT),
        entropy=entropy_NT.sum().item(),
        mismatch_kl=kl.item(),
        max_ratio=ratio.item(),
    )
    if reference_logprobs_NT is not None:
        stats.reference_kl = (k3(reference_logprobs_NT - old_logprobs_NT) * batch.mask_NT).sum().item()
    return stats
