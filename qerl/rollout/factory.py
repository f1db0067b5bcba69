"""The choice of a sampler by the settings."""

from __future__ import annotations

from qerl.policy.policy import Policy
from qerl.rollout.eager import NativeSampler
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import Sampler
from qerl.settings.rollout import EngineSettings


def native_class(on_gpu: bool) -> type[EngineSampler] | type[NativeSampler]:
    """The sampler of `engine: native`: the engine on a GPU, the eager sampler on a CPU."""
    return EngineSampler if on_gpu else NativeSampler


def make_sampler(policy: Policy, settings: EngineSettings, max_sequences: int = 512) -> Sampler:
    """A sampler of `policy`, with which it shares tensors (native) or of which it has a copy (vLLM).

    `native_class` is the sampler of `engine: native`. `max_sequences` bounds the sequences that
    these decode together; `vllm.max_sequences` does so for vLLM. A policy with sharded weights gets a sampler of whole
    ones.
    """
    if settings.engine == "vllm":
        from qerl.rollout.vllm.in_process import VllmSampler

        return VllmSampler(policy, settings.vllm)
    if settings.engine == "vllm-server":
        from qerl.rollout.vllm.server import VllmServerSampler

        return VllmServerSampler(policy, settings.vllm)
    if policy.root is not None:
        from qerl.rollout.sharded import ShardedSampler

        sleep = settings.native.sleep
        return ShardedSampler(policy, lambda whole: make_sampler(whole, settings, max_sequences), sleep)
    if issubclass(kind := native_class(policy.device.type == "cuda"), EngineSampler):
        return kind(policy, settings.native, max_sequences)
    return kind(policy, max_sequences)
