"""The engine with keys and values in FP8, against a float64 model whose keys and values are rounded or disturbed."""

from copy import deepcopy

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from qerl.kernels.state import rounded
from qerl.models.policy import load_policy
from qerl.rl.losses import mismatch
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import NativeSettings
from tests.parity.family_models import CPU, forced
from tests.tiny import tiny_qwen3

PROMPTS = [[5, 6, 7], list(range(2, 68))]
#: The root of the mean square of E4M3's relative errors: a step is 1/8 of the power of two below a number.
_ERROR = 0.026


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Weights with which attention matters; with those of an initialisation all tokens are equally likely.
    return tiny_qwen3(tmp_path_factory.mktemp("m"), initializer_range=0.2)


@pytest.fixture(scope="module")
def policy(folder):
    made = load_policy(folder, None, "float32", CPU)
    made.lm.generation_config.eos_token_id = []
    return made


@pytest.fixture(scope="module")
def exact(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def sampled(policy, count=1, tokens=8, slots=8, **settings):
    sampler = EngineSampler(policy, NativeSettings(**settings), slots)
    return sampler, sampler.generate(PROMPTS, SamplingParams(max_tokens=tokens, count=count, seed=4))


@torch.no_grad()
def logprobs_of(model, groups):
    """Log-probabilities of each completion's tokens, from one pass in float64 without a cache."""
    pairs = zip(PROMPTS, groups, strict=True)
    return torch.cat([forced(model, prompt, one.token_ids) for prompt, group in pairs for one in group])


def with_keys(exact, change):
    """The model in float64, in which `change` sees all keys and values [..., D] after rotation."""

    def attention(module, query, key, value, attention_mask, scaling, **_):
        key, value = (change(x).repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None

    name = f"test-{change.__name__}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = deepcopy(exact)
    model.set_attn_implementation(name)
    return model


def in_fp8(x):
    codes, scales = rounded(x.float())
    return (codes.double() * scales[..., None].double()).to(x.dtype)


def test_logprobs_are_those_of_float64_with_rounded_keys_and_values(policy, exact, folder):
    """As near as transformers' float32 with the same keys, whose error depends on the processor's order of sums."""
    _, groups = sampled(policy, kv_cache_dtype="fp8")
    ours = torch.tensor([c.logprobs for group in groups for c in group], dtype=torch.float64).flatten()
    expected = logprobs_of(with_keys(exact, in_fp8), groups)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    error = (logprobs_of(with_keys(stock, in_fp8), groups) - expected).abs().max().item()
    assert error < 5e-5
    torch.testing.assert_close(ours, expected, atol=1e-5 + error, rtol=0)
    assert (ours - logprobs_of(exact, groups)).abs().max() > 1e-3  # rounding is seen


def kl(exact, ours, groups):
    """`mismatch/kl` of the metrics, against the policy itself."""
    return mismatch(logprobs_of(exact, groups)[None], ours[None], torch.ones_like(ours)[None])[0].item() / len(ours)


def test_the_mismatch_rises_by_what_errors_of_this_size_explain(policy, exact):
    values = {}
    for dtype in ("auto", "fp8"):
        _, groups = sampled(policy, count=2, tokens=40, kv_cache_dtype=dtype)
        ours = torch.tensor([c.logprobs for group in groups for c in group], dtype=torch.float64).flatten()
        values[dtype] = kl(exact, ours, groups)
    generator = torch.Generator().manual_seed(0)

    def disturbed(x):
        return x * (1 + _ERROR * torch.randn(x.shape, dtype=torch.float64, generator=generator))

    random = kl(exact, logprobs_of(with_keys(exact, disturbed), groups), groups)
    assert values["auto"] < 1e-9
    assert random / 3 < values["fp8"] < 3 * random, (values, random)


def test_the_same_memory_holds_more_pages(policy):
    """An element has one byte in place of four, and each of a token's heads of 16 a scale."""
    plain, rounded_ = (sampled(policy, kv_cache_dtype=dtype)[0].cache_bytes for dtype in ("auto", "fp8"))
    assert plain / rounded_ == 4 * 16 / (16 + 4)
