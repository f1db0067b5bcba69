"""vLLM on a GPU: packed weights as they are, CUDA graphs, sleep."""

from pathlib import Path

import pytest
import torch

from qerl.checkpoints.files import weights_format_of
from qerl.models.export import merge
from qerl.models.policy import load_policy
from qerl.rl.noise import Noise
from qerl.rollout.sampler import Completion, SamplingParams
from qerl.settings.run import NoiseSettings, VllmSettings
from tests.gpu.backends import adapted
from tests.gpu.exact import differences, k3
from tests.tiny import random_checkpoint

vllm = pytest.importorskip("vllm", reason="vLLM isn't installed")
PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117))]
PARAMS = SamplingParams(max_tokens=24, count=4, seed=4)


@pytest.fixture(params=["bf16", "nvfp4"])
def policy(request, tmp_path):
    random_checkpoint(tmp_path / "m", "small", request.param)
    return adapted(tmp_path / "m", "bfloat16", 0.05)


def kl(policy, groups):
    return k3(differences(policy, PROMPTS, groups))


def test_the_engine_follows_the_policy_through_syncs_and_sleep(policy):
    from qerl.rollout.vllm import VllmSampler

    # vLLM lets one engine a process sleep.
    sleep = weights_format_of(Path(policy.lm.config.name_or_path)) == "nvfp4"
    sampler = VllmSampler(policy, VllmSettings(utilization=0.2, kv_cache_gib=1, max_model_len=512, sleep=sleep))
    assert (sampler.weights == "bf16") == (sampler.kernel == "UnquantizedLinearMethod")
    first = sampler.generate(PROMPTS, PARAMS)
    asleep = torch.cuda.mem_get_info()[0]
    assert kl(policy, first) < 1e-3
    before = sampler.checksum
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.2), seed=0)
    noise.set(1, 10)
    sampler.sync()
    assert not sleep or torch.cuda.mem_get_info()[0] < asleep - 2**30
    noisy = sampler.generate(PROMPTS, PARAMS)
    assert kl(policy, noisy) < 1e-3
    noise.clear()
    assert kl(policy, noisy) > 1e-2
    sampler.sync()
    assert sampler.checksum == before
    assert kl(policy, sampler.generate(PROMPTS, PARAMS)) < 1e-3
    sampler.close()


def test_a_merge_packed_to_nvfp4_loads_in_stock_vllm(policy, tmp_path):
    """vLLM draws from the merge as this project reads it, which isn't the base any more."""
    pytest.importorskip("llmcompressor", reason="llmcompressor, which packs the merge, isn't installed")
    policy.save(tmp_path / "trained")
    merge(tmp_path / "m", tmp_path / "trained", tmp_path / "merged", "nvfp4")
    engine = vllm.LLM(
        model=str(tmp_path / "merged"), dtype="bfloat16", enforce_eager=True, max_model_len=512,
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=2**28,
    )  # fmt: skip
    params = vllm.SamplingParams(max_tokens=24, n=4, seed=4, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    groups = [[completion_of(choice) for choice in answer.outputs] for answer in engine.generate(prompts, params)]
    assert kl(load_policy(tmp_path / "merged", None, "bfloat16"), groups) < 1e-3
    assert kl(load_policy(tmp_path / "m", None, "bfloat16"), groups) > 1e-2
    engine.llm_engine.engine_core.shutdown()


def completion_of(choice):
    logprobs = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    return Completion(list(choice.token_ids), logprobs, finished=False)
