"""Prompts in the engine on a GPU: their logits against Hugging Face, in graphs and without."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from qerl.models.random import random_policy
from qerl.rollout.decoder import prompt_bucket
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import BatchPart, SamplingParams
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.gpu.exact import differences

CUDA = torch.device("cuda", 0)
CASES = [*((name, 16) for name in with_portable("bf16", "nvfp4", "mxfp4")), ("nvfp4", 0)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def policy(request):
    name, rank = request.param
    with kernels_of(name) as weights:
        made = random_policy(Base("small", weights), rank, CUDA)
        for name, parameter in made.lm.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        yield made


def prompts_of(tokens, count, seed=0):
    """Prompts of different lengths, `tokens` in all."""
    numbers = np.random.default_rng(seed)
    cuts = sorted(numbers.choice(np.arange(1, tokens), size=count - 1, replace=False).tolist())
    ids = numbers.integers(10, 1000, size=tokens).tolist()
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]


def sampler_of(policy, **settings):
    policy.lm.generation_config.eos_token_id = []
    return EngineSampler(policy, NativeSettings(kv_cache_gib=1.0, **settings), 64)


def assert_hugging_faces(policy, prompts, groups):
    assert np.abs(differences(policy, prompts, groups)).max() <= 0.03


@pytest.mark.parametrize(
    ("tokens", "count"),
    [(20, 3), (32, 1), (50, 7), (128, 32), (200, 2), (512, 1), (500, 31), (400, 40), (700, 5), (1000, 4), (1500, 5)],
)
def test_logprobs_behind_prompts_are_those_of_hugging_face(policy, tokens, count):
    """In a graph of every size, with and without padding, and in none: too many prompts, too many tokens."""
    sampler, params = sampler_of(policy), SamplingParams(max_tokens=4, count=1, seed=1)
    prompts = prompts_of(tokens, count)
    first = sampler.generate(prompts, params)
    bucket = prompt_bucket(tokens, count)
    assert set(sampler._pool.prompts) == ({bucket} if bucket else set())
    assert_hugging_faces(policy, prompts, first)
    others = prompts_of(max(tokens - 3, count), count, seed=1)
    assert_hugging_faces(policy, others, sampler.generate(others, params))
    assert sampler.generate(prompts, params) == first


def test_a_prompt_alone_gives_the_same_bits_where_asked(policy):
    prompts, params = prompts_of(1100, 5), SamplingParams(max_tokens=60, count=8, seed=3)
    whole = sampler_of(policy, batch_invariant=True).generate(prompts, params)
    for place, group in enumerate(whole):
        alone = replace(params, part=BatchPart([place], lambda most: ()))
        assert sampler_of(policy, batch_invariant=True).generate(prompts, alone)[place] == group
