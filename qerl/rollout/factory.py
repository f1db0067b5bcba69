"""The sampler that the settings ask for."""

from __future__ import annotations

from qerl.policy.policy import Policy
from qerl.rollout.eager import NativeSampler
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import Sampler
from qerl.settings.rollout import EngineSettings


def make_sampler(policy: Policy, settings: EngineSettings, max_sequences: int = 512) -> Sampler:
    """A sampler of `policy`, which it shares tensors with (native) or was handed a copy of (vLLM).

    A GPU is served by the native engine, a CPU by the native sampler in plain PyTorch.
    `max_sequences` bounds what these decode together; `vllm.max_sequences` does for vLLM.
    """
    if settings.engine == "vllm":
        from qerl.rollout.vllm.in_process import VllmSampler

        return VllmSampler(policy, settings.vllm)
    if settings.engine == "vllm-server":
        from qerl.rollout.vllm.server import VllmServerSampler

        return VllmServerSampler(policy, settings.vllm)
    if policy.device.type == "cuda":
        return EngineSampler(policy, settings.native, max_sequences)
    return NativeSampler(policy, max_sequences)
