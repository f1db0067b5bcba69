"""Sampling from a policy whose weights are sharded: each process samples from whole weights, gathered once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from qerl.policy.policy import Policy, load_policy
from qerl.policy.sharded import gathered
from qerl.rollout.sampler import Completion, Sampler, SamplingParams


class ShardedSampler:
    """The sampler that `make` returns for a copy of a sharded policy with whole weights.

    The first `sync` of a rollout gathers the weights; all processes must call it alike. Matrices of the copy have the
    dtype of the sharded policy's passes, norms are float32. With `sleep`, the end of a rollout releases the copy, whose
    memory the update may need.
    """

    def __init__(self, policy: Policy, make: Callable[[Policy], Sampler], sleep: bool) -> None:
        assert policy.root is not None
        self.policy = policy
        self.sleep = sleep
        self._make = make
        dtype = str(policy.root.dtype).removeprefix("torch.")
        self._copy = load_policy(Path(str(policy.lm.name_or_path)), None, dtype, policy.device)
        self._dtypes = {name: parameter.dtype for name, parameter in self._copy.lm.named_parameters()}
        self._sampler: Sampler | None = None
        self._fresh = False
        self._release()

    @property
    def served(self) -> str:
        """Description of engine, kernels and weights, which results store."""
        return f"{self._ready.served}, gathered from shards"

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences that are decoded together."""
        return self._ready.max_sequences

    @property
    def _ready(self) -> Sampler:
        if self._sampler is None:
            self.sync()
        assert self._sampler is not None
        return self._sampler

    def _release(self) -> None:
        """Free the copy's weights. A sampler holds their addresses, so the next `sync` makes a new one."""
        self._sampler, self._fresh = None, False
        for parameter in self._copy.lm.parameters():
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def sync(self) -> None:
        """Gather the weights, unless this rollout has them, and copy the noise."""
        if not self._fresh:
            self._gather()
        noises = dict(self.policy.lm.named_buffers())
        for name, buffer in self._copy.lm.named_buffers():
            if name.endswith(".noise"):
                buffer.copy_(noises[name])
        if self._sampler is None:
            self._sampler = self._make(self._copy)
        self._sampler.sync()

    def _gather(self) -> None:
        weights = dict(self._copy.lm.named_parameters())
        for name, whole in gathered(self.policy.lm, self._dtypes):
            if weights[name].numel():
                weights[name].copy_(whole)
            else:
                weights[name].data = whole
        self._fresh = True

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`. The weights are those of the latest `sync`."""
        return self._ready.generate(prompts, params)

    def end_rollout(self) -> None:
        """Expect other weights, and release the copy if it sleeps during updates."""
        self._fresh = False
        if self.sleep:
            self._release()

    @torch.no_grad()
    def whole_policy(self) -> Policy:
        """The policy with whole weights, to be saved: vectors in float32, as they are trained. The sampler ends."""
        self._release()
        self._dtypes = {
            name: torch.float32 if p.ndim == 1 else self._dtypes[name] for name, p in self.policy.lm.named_parameters()
        }
        self._gather()
        return self._copy
