"""Prompts on a GPU: their attention against float64, their logits against Hugging Face, in graphs and without."""

import numpy as np
import pytest
import torch
from torch import nn

from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import PAGE, KVCache, PromptRow, pack
from qerl.kernels.triton import attend_prompts
from qerl.models.random import random_policy
from qerl.rollout.decoder import prompt_bucket
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.gpu.exact import differences, heads_of, kernels_order, with_sinks

CUDA = torch.device("cuda", 0)
LENGTHS = [1, 64, 300, 2, 65, 128, 129, 63]


def exact(qkv, lengths, positions, rope, heads):
    """Attention, keys and values of each token in float64."""
    query, key, value = qkv.double().view(len(qkv), -1, heads.dim).split([heads.query, heads.kv, heads.kv], 1)

    def rotated(x, norm):
        if norm is not None:
            x = (heads.norm_offset + norm.double()) * x / (x.square().mean(-1, keepdim=True) + heads.eps).sqrt()
        cos, sin = (table[positions.long()].double()[:, None] for table in rope)
        rotary = 2 * cos.shape[-1]
        first, second = x[..., :rotary].chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary:]], -1)

    query, key = rotated(query, heads.q_norm), rotated(key, heads.k_norm)
    outs, group = [], heads.query // heads.kv
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * heads.scale
        behind = torch.arange(len(q), device=CUDA)[:, None] - torch.arange(len(q), device=CUDA)
        hidden = (behind < 0) | (behind >= (heads.window or len(q)))
        weights = with_sinks(scores.masked_fill(hidden, -torch.inf), heads).softmax(-1)[..., : len(k)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1))
    return torch.cat(outs), key, value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("query", "kv", "dim", "normed", "rotary", "window", "sinks"),
    [
        (28, 4, 128, False, 128, None, False),
        (16, 8, 128, True, 128, None, False),
        (3, 3, 80, False, 80, None, False),
        (32, 1, 64, True, 64, None, False),
        (24, 8, 128, False, 96, 70, False),
        (4, 1, 256, "1 + w", 256, 129, False),
        (4, 1, 256, "1 + w", 256, 1, False),
        (64, 8, 64, False, 64, 128, True),
        (8, 1, 16, False, 16, None, True),
    ],
)
@pytest.mark.parametrize("padding", [0, 117])
@pytest.mark.usefixtures("dependent_launch")
def test_attention_of_prompts(dtype, query, kv, dim, normed, rotary, window, sinks, padding):
    torch.manual_seed(torch.seed() % 2**31)
    heads, rope = heads_of(dtype, query, kv, dim, normed, rotary, window, sinks)
    tokens = sum(LENGTHS) + padding
    order = (torch.randperm(20) + 1).tolist()
    pages = [[order.pop() for _ in range(-(-length // PAGE))] for length in LENGTHS]
    packed = torch.tensor(pack([[7] * n for n in LENGTHS], pages, PAGE, tokens, 9)).to(CUDA)
    lengths = [*LENGTHS, padding] if padding else LENGTHS
    row = PromptRow.of(packed, tokens, 9, Packing.of(lengths, [None] * len(lengths), CUDA))
    qkv = torch.randn(tokens, (query + 2 * kv) * dim, device=CUDA).to(dtype)
    cache = torch.full((21, 2, kv, PAGE, dim), torch.nan, dtype=dtype, device=CUDA)
    expected, keys, values = exact(qkv, lengths, row.positions, rope, heads)
    out = attend_prompts(qkv, KVCache(cache), row, rope, heads)
    close = {"atol": 3e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(out.double(), expected, **close)
    assert (out.double() - expected).norm() <= (5e-3 if dtype == torch.bfloat16 else 1e-6) * expected.norm()
    page, place = row.places[: sum(LENGTHS)].long() // PAGE, row.places[: sum(LENGTHS)].long() % PAGE
    stored = keys[: sum(LENGTHS)][..., kernels_order(heads, rope)]
    torch.testing.assert_close(cache[page, 0, :, place].double(), stored, **close)
    assert torch.equal(cache[page, 1, :, place].double(), values[: sum(LENGTHS)])
    cache[page, :, :, place] = torch.nan
    assert cache[1:].isnan().all()


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
    for place, prompt in enumerate(prompts):
        alone = SamplingParams(max_tokens=60, count=8, seed=3, first=place)
        assert sampler_of(policy, batch_invariant=True).generate([prompt], alone) == whole[place : place + 1]
