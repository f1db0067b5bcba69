"""The sampler that the settings choose; vLLM itself is tested in tests/parity."""

import sys

import pytest
import torch

from qerl.models.policy import load_policy
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler, native_class
from qerl.rollout.sampler import refused_by_vllm, refused_fp8_cache
from qerl.settings.base import ConfigError
from qerl.settings.run import EngineSettings, NativeSettings, RolloutSettings
from tests.families import FAMILIES
from tests.tiny import tiny_family, tiny_qwen2


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(tiny_qwen2(tmp_path_factory.mktemp("dense")), None, "float32", torch.device("cpu"))


def test_the_native_sampler_is_the_default(policy):
    sampler = make_sampler(policy, EngineSettings(), max_sequences=3)
    assert isinstance(sampler, EagerSampler)
    assert sampler.max_sequences == 3


def test_a_family_is_served_by_what_is_tested_with_it(policy, tmp_path):
    folder = tiny_family(tmp_path, "qwen2", model_type="olmo2", bos_token_id=0)
    other = load_policy(folder, None, "float32", torch.device("cpu"))
    assert native_class(on_gpu=True, config=policy.lm.config) is EngineSampler
    assert native_class(on_gpu=True, config=other.lm.config) is EagerSampler
    with pytest.raises(ConfigError, match="not 'olmo2'; the eager sampler serves it"):
        EngineSampler(other, NativeSettings())
    with pytest.raises(ConfigError, match=r"not 'olmo2'; use engine=native"):
        make_sampler(other, EngineSettings(engine="vllm"))
    with pytest.raises(ConfigError, match=r"not 'olmo2'; use rollout\.engine=native"):
        make_sampler(other, RolloutSettings(engine="vllm"))


def test_experts_without_a_grouped_product_are_sampled_eagerly():
    config = FAMILIES["qwen3_moe"].config()
    chosen = [native_class(on_gpu=True, config=config, weights=weights) for weights in (None, "nvfp4", "mxfp4", "nf4")]
    assert chosen == [EngineSampler] * 3 + [EagerSampler]
    assert native_class(on_gpu=True, config=FAMILIES["qwen3"].config(), weights="nf4") is EngineSampler


def test_soft_caps_of_logits_are_the_eager_samplers():
    config = FAMILIES["gemma3"].config(final_logit_softcapping=30.0)
    assert refused_by_vllm(config)
    assert native_class(on_gpu=True, config=config) is EagerSampler


def test_a_cache_in_fp8_is_refused_where_there_is_none(policy):
    settings = EngineSettings(native=NativeSettings(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8 is an option of the engine on a GPU.*use auto"):
        make_sampler(policy, settings)
    assert "needs a GPU of compute capability 8.9" in refused_fp8_cache((8, 6))
    assert refused_fp8_cache((8, 9)) is refused_fp8_cache((12, 0)) is None


def test_a_missing_vllm_is_one_sentence(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="vLLM isn't installed"):
        make_sampler(policy, EngineSettings(engine="vllm"))
