"""The choice of a sampler by the settings, and sampling from a policy whose weights are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qerl.models.linear import packed_format
from qerl.models.policy import Policy, gathered, load_policy
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Completion, Sampler, SamplingParams, check_served, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.run import EngineSettings


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
        self._is_current = False
        self._release()

    @property
    def served(self) -> str:
        """Description of engine, kernels and weights, which results store."""
        return f"{self._ready().served}, gathered from shards"

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences that are decoded together."""
        return self._ready().max_sequences

    def _ready(self) -> Sampler:
        if self._sampler is None:
            self.sync()
        assert self._sampler is not None
        return self._sampler

    def _release(self) -> None:
        """Free the copy's weights. A sampler holds their addresses, so the next `sync` makes a new one."""
        self._sampler, self._is_current = None, False
        for parameter in self._copy.lm.parameters():
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def _gather(self) -> None:
        weights = dict(self._copy.lm.named_parameters())
        for name, weight in gathered(self.policy.lm, self._dtypes):
            # In place where the sampler reads it: its graphs hold the addresses.
            if weights[name].numel():
                weights[name].copy_(weight)
            else:
                weights[name].data = weight
        self._is_current = True

    @torch.no_grad()
    def sync(self) -> None:
        """Gather the weights, unless this rollout has them, and copy the noise."""
        if not self._is_current:
            self._gather()
        noises = dict(self.policy.lm.named_buffers())
        for name, buffer in self._copy.lm.named_buffers():
            if name.endswith(".noise"):
                buffer.copy_(noises[name])
        self._sampler = self._sampler or self._make(self._copy)
        self._sampler.sync()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`. It draws with the weights of the latest `sync`."""
        return self._ready().generate(prompts, params)

    def end_rollout(self) -> None:
        """Expect other weights, and release the copy if it sleeps during updates."""
        self._is_current = False
        if self.sleep:
            self._release()

    def whole_policy(self) -> Policy:
        """The policy with whole weights, to be saved: vectors in float32, as they are trained. The sampler ends."""
        self._release()
        vectors = {name for name, parameter in self.policy.lm.named_parameters() if parameter.ndim == 1}
        self._dtypes |= dict.fromkeys(vectors, torch.float32)
        self._gather()
        return self._copy


def native_class(on_gpu: bool, config: Any, weights: str | None = None) -> type[EngineSampler] | type[EagerSampler]:
    """The sampler of `engine: native`: the engine on a GPU if it serves a model of `config`, else the eager one.

    `weights` is the format of a packed model.
    """
    return EngineSampler if on_gpu and refused_by_engine(config, weights) is None else EagerSampler


def make_sampler(
    policy: Policy, settings: EngineSettings, max_sequences: int = 512, others: Sequence[Policy] = ()
) -> Sampler:
    """A sampler of `policy`. It shares the tensors (native), or has a copy of them (vLLM).

    `native_class` is the sampler of `engine: native`. `max_sequences` bounds the sequences that these decode together;
    `vllm.max_sequences` does so for vLLM. With `others`, of runs on the same base, the engine serves these, too. A
    policy with sharded weights gets a sampler of whole ones. Raises `ConfigError` for a model that vLLM doesn't sample
    for, and for a KV cache in FP8 where the eager sampler is chosen.
    """
    config = policy.lm.config
    check_served(config, settings)
    if settings.engine == "vllm":
        from qerl.rollout.vllm import VllmSampler

        return VllmSampler(policy, settings.vllm)
    if policy.root is not None:
        sleep = settings.native.sleep
        return ShardedSampler(policy, lambda copy: make_sampler(copy, settings, max_sequences), sleep)
    if issubclass(kind := native_class(policy.device.type == "cuda", config, packed_format(policy.lm)), EngineSampler):
        return kind(policy, settings.native, max_sequences, others)
    if settings.native.kv_cache_dtype != "auto":
        raise ConfigError(
            f"rollout.native.kv_cache_dtype={settings.native.kv_cache_dtype} is an option of the engine on a GPU, and "
            "the eager sampler draws this model's completions here; use auto"
        )
    return kind(policy, max_sequences)
