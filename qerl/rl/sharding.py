"""Where the trained weights of a run are: whole in every process, or in shards over them; what each asks of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qerl.models.policy import Policy, ShardedRoot
from qerl.rl.packing import MicroBatch, Sample, logprobs_and_entropy, micro_batch
from qerl.rl.parallel import Processes
from qerl.rollout.sampler import Completion, Sampler

if TYPE_CHECKING:
    from qerl.rollout.factory import ShardedSampler


class Local:
    """Every process has the whole policy, and gradients of its own micro-batches."""

    def __init__(self, policy: Policy, processes: Processes) -> None:
        self.policy = policy
        self.processes = processes

    def deal(self, indices: list[list[int]], place: int) -> list[list[int]]:
        """The micro-batches number `place` of each turn of the processes."""
        return indices[place :: self.processes.count]

    def no_logprobs(self, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """Log-probabilities [N, T] of a micro-batch without tokens to read: zeros."""
        return torch.zeros_like(batch.mask_NT)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the processes."""
        self.processes.add_gradients(parameters)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> torch.Tensor:
        """Scale the gradients down to the norm `most`, and return their norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, most)

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: gradients are small, and graphs need their addresses."""

    def end_rollout(self, sampler: Sampler) -> None:
        """Nothing: the sampler reads the weights that the update changes."""

    def whole_policy(self, sampler: Sampler) -> Policy:
        """The policy with whole weights, to be saved."""
        return self.policy


class Sharded:
    """Each process has some rows of every weight (FSDP2), and any pass needs all processes."""

    def __init__(self, policy: Policy, root: ShardedRoot, processes: Processes) -> None:
        self.policy = policy
        self.root = root
        self.processes = processes

    def deal(self, indices: list[list[int]], place: int) -> list[list[int]]:
        """See `Local`. Where the last turn has too few micro-batches, a process gets an empty one."""
        # It must take part in every turn, because the others wait for its shards.
        dealt = indices[place :: self.processes.count]
        turns = -(-len(indices) // self.processes.count)
        return dealt + [[]] * (turns - len(dealt))

    def no_logprobs(self, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """See `Local`. The zeros come from a pass of one token, with a gradient of zero."""
        # Like any other pass it gathers the shards, and its backward pass reduces gradients: the others wait for both.
        token = micro_batch([Sample([0], Completion([0], [0.0], False), 0.0, 0.0)], [0], self.policy.device)
        zero = 0 * logprobs_and_entropy(self.policy, token, temperature)[0].sum()
        return torch.zeros_like(batch.mask_NT) + zero

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: FSDP's backward pass has summed the gradients of shards."""

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> torch.Tensor:
        """See `Local`; the norm is that of whole gradients."""
        return self.root.whole(torch.nn.utils.clip_grad_norm_(parameters, most))

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients, whose memory the rollout needs for whole weights."""
        optimizer.zero_grad(set_to_none=True)

    def end_rollout(self, sampler: Sampler) -> None:
        """Tell the sampler, which has gathered the weights, that the update changes them."""
        _gatherer(sampler).end_rollout()

    def whole_policy(self, sampler: Sampler) -> Policy:
        """See `Local`. Every process calls this, and samples no more: the sampler's copy becomes the policy."""
        return _gatherer(sampler).whole_policy()


def _gatherer(sampler: Any) -> ShardedSampler:
    return sampler


def placed(policy: Policy, processes: Processes) -> Local | Sharded:
    """What the steps of a run ask of the policy's weights, by where these are."""
    return Local(policy, processes) if policy.root is None else Sharded(policy, policy.root, processes)
