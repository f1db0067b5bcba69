"""The choice of a sampler by the settings."""

from __future__ import annotations

from typing import Any

from qerl.layers.packed_linear import packed_format
from qerl.policy.policy import Policy
from qerl.rollout.eager import NativeSampler
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import Sampler
from qerl.rollout.served import check_served, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings


def native_class(on_gpu: bool, config: Any, weights: str | None = None) -> type[EngineSampler] | type[NativeSampler]:
    """The sampler of `engine: native`: the engine on a GPU if it serves a model of `config`, else the eager one.

    `weights` is the format of a packed model.
    """
    return EngineSampler if on_gpu and refused_by_engine(config, weights) is None else NativeSampler


def make_sampler(policy: Policy, settings: EngineSettings, max_sequences: int = 512) -> Sampler:
    """A sampler of `policy`, with which it shares tensors (native) or of which it has a copy (vLLM).

    `native_class` is the sampler of `engine: native`. `max_sequences` bounds the sequences that these decode together;
    `vllm.max_sequences` does so for vLLM. A policy with sharded weights gets a sampler of whole ones. Raises
    `ConfigError` for a model that vLLM doesn't sample for, and for a KV cache in FP8 where the eager sampler is chosen.
    """
    config = policy.lm.config
    check_served(config, settings)
    if settings.engine == "vllm":
        from qerl.rollout.vllm.in_process import VllmSampler

        return VllmSampler(policy, settings.vllm)
    if policy.root is not None:
        from qerl.rollout.sharded import ShardedSampler

        sleep = settings.native.sleep
        return ShardedSampler(policy, lambda whole: make_sampler(whole, settings, max_sequences), sleep)
    if issubclass(kind := native_class(policy.device.type == "cuda", config, packed_format(policy.lm)), EngineSampler):
        return kind(policy, settings.native, max_sequences)
    if settings.native.kv_cache_dtype != "auto":
        raise ConfigError(
            f"rollout.native.kv_cache_dtype={settings.native.kv_cache_dtype} is an option of the engine on a GPU, and "
            "the eager sampler draws this model's completions here; use auto"
        )
    return kind(policy, max_sequences)
