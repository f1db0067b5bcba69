"""What tests with vLLM compute: a changed policy, its completions, and stock libraries' log-probabilities of them."""

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl.models.policy import with_adapter
from qerl.rl.noise import standard_normal
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, VllmSettings
from tests.parity.family_models import forced
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6, 8, 9]]
#: vLLM's attention on a CPU takes heads of 32 and more.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SETTINGS = VllmSettings(max_model_len=256, kv_cache_gib=0.05)
SIGMA = 0.1


def dense_base(folder):
    """Write a Qwen2 with such heads, in several files."""
    return tiny_qwen2(folder, shard_size="60KB", **HEADS)


def adapted(checkpoint):
    """A policy with an adapter, all of whose trained tensors have changed."""
    policy = with_adapter(checkpoint, AdapterSettings(rank=4, alpha=12), "float32", seed=0, device=CPU)
    change(policy, seed=1)
    return policy


def change(policy, seed, scale=0.1):
    """Change all trained tensors, as a few steps would."""
    torch.manual_seed(seed)
    for _, parameter in policy.trainable():
        parameter.data += scale * torch.randn_like(parameter)


def stock(checkpoint, adapter):
    """The policy as transformers and PEFT load it, without any code of this project."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).eval()


def add_noise(model, sigma, seed, step, norms=("input_layernorm", "post_attention_layernorm")):
    for index, layer in enumerate(model.base_model.model.model.layers):
        for role, name in enumerate(norms):
            weight = getattr(layer, name).modules_to_save.default.weight
            weight.data += sigma * standard_normal(seed, step, index, role, len(weight))


@torch.no_grad()
def assert_logprobs(groups, model, temperature=1.0):
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = forced(model, prompt, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def draw(sampler, **changes):
    return sampler.generate(PROMPTS, SamplingParams(**{"max_tokens": 12, "count": 3, "seed": 4, **changes}))


def tokens(groups):
    return [[completion.token_ids for completion in group] for group in groups]
