"""The KV cache in FP8 on a GPU: kernels against PyTorch's operations on the cache that they left, and the engine."""

import numpy as np
import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import (
    FP8,
    LEAST_FP8_CAPABILITY,
    PAGE,
    DecodeState,
    KVCache,
    PromptRow,
    pack,
    rounded,
    splits_of,
)
from qerl.kernels.triton import attend_prompts, attention
from qerl.models.policy import with_adapter
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.gpu.exact import differences, heads_of
from tests.tiny import tiny_qwen3

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_FP8_CAPABILITY,
    reason="needs a CUDA device that converts FP8",
)

CUDA = torch.device("cuda", 0)
LENGTHS = [1, 2, 64, 65, 129, 513, 2100]
HEADS = [
    (28, 4, 128, False, 128, None, False),
    (16, 8, 128, True, 128, None, False),
    (4, 1, 256, "1 + w", 256, 512, False),
    (4, 2, 16, True, 16, 70, False),
]


def cache_of(pages, heads):
    return KVCache(*rounded(torch.randn(pages, 2, heads.kv, PAGE, heads.dim, device=CUDA)))


def copied(cache):
    return KVCache(cache.data.view(torch.uint8).clone().view(FP8), cache.scales.clone())


def close(dtype):
    return {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}


def assert_stored_alike(ours, plain):
    """Roundings before the one to FP8 may move an element by a step, or a scale by a power of two, rarely."""
    pages = torch.arange(ours.pages, device=CUDA)
    found, expected = (cache.pages_of(pages, torch.float32) for cache in (ours, plain))
    assert ((found - expected).abs() > 1e-6).float().mean() < 2e-2
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0.15)


class Stored(KVCache):
    """A cache that keeps what the kernels stored."""

    def put(self, page, place, key, value):
        held = self.pages_of(page.long()[:, None], key.dtype)
        return held[torch.arange(len(page), device=CUDA), 0, :, :, place.long()].unbind(1)


@pytest.mark.usefixtures("dependent_launch")
@pytest.mark.parametrize("least_programs", [0, 1000], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_steps(shape, dtype, least_programs, monkeypatch):
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    torch.manual_seed(0)
    heads, rope = heads_of(dtype, *shape)
    each = -(-max(LENGTHS) // PAGE)
    state = DecodeState.empty(len(LENGTHS), 1, each, CUDA)
    state.pages[:-1] = (torch.randperm(len(LENGTHS) * each, device=CUDA).view(-1, each) + 1).int()
    state.position[:-1] = torch.tensor(LENGTHS, device=CUDA).int() - 1
    before = cache_of(1 + len(LENGTHS) * each, heads)
    rows = torch.randperm(len(LENGTHS), device=CUDA).int()
    qkv = torch.randn(len(rows), heads.width, device=CUDA).to(dtype)
    ours, plain = copied(before), copied(before)
    found = attention.attend(qkv, ours, state, rows, rope, heads, splits_of(each))
    reference.attend(qkv, plain, state, rows, rope, heads, splits_of(each))
    assert_stored_alike(ours, plain)
    expected = reference.attend(qkv, Stored(ours.data, ours.scales), state, rows, rope, heads, splits_of(each))
    torch.testing.assert_close(found, expected, **close(dtype))


@pytest.mark.usefixtures("dependent_launch")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_prompts(shape, dtype):
    torch.manual_seed(0)
    heads, rope = heads_of(dtype, *shape)
    lengths = [1, 64, 300, 65]
    numbers = iter((torch.randperm(20) + 1).tolist())
    pages = [[next(numbers) for _ in range(-(-length // PAGE))] for length in lengths]
    packed = torch.from_numpy(pack([[1] * n for n in lengths], pages, PAGE, sum(lengths))).to(CUDA)
    row = PromptRow.of(packed, sum(lengths), len(lengths), Packing.of(lengths, [None] * len(lengths), CUDA))
    before = cache_of(21, heads)
    qkv = torch.randn(sum(lengths), heads.width, device=CUDA).to(dtype)
    ours, plain = copied(before), copied(before)
    found = attend_prompts(qkv.clone(), ours, row, rope, heads)
    reference.attend_prompts(qkv, plain, row, rope, heads)
    assert_stored_alike(ours, plain)
    expected = reference.attend_prompts(qkv, Stored(ours.data, ours.scales), row, rope, heads)
    torch.testing.assert_close(found, expected, **close(dtype))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.manual_seed(0)
    folder = tiny_qwen3(tmp_path_factory.mktemp("m"), initializer_range=0.2)
    made = with_adapter(folder, AdapterSettings(rank=4), "bfloat16", seed=0, device=CUDA)
    made.lm.generation_config.eos_token_id = []
    return made


PROMPTS = [[5, 6, 7], [8], list(range(2, 66)), [9, 10, 11, 12, 13, 14, 15] * 20]


def test_the_engine_draws_the_same_tokens_in_any_batch(policy):
    params = SamplingParams(max_tokens=150, count=4, seed=3)

    def drawn(slots):
        sampler = EngineSampler(policy, NativeSettings(kv_cache_dtype="fp8", batch_invariant=True), slots)
        groups = sampler.generate(PROMPTS, params)
        return [[(c.token_ids, c.logprobs) for c in group] for group in groups], sampler

    whole, sampler = drawn(16)
    assert drawn(16)[0] == whole
    half = EngineSampler(policy, NativeSettings(batch_invariant=True), 16)
    half.generate(PROMPTS, params)
    assert half.cache_bytes / sampler.cache_bytes == 2 * 16 / (16 + 4)


def test_log_probabilities_stay_near_those_of_the_policy(policy):
    """In bfloat16 and in FP8, with the same tokens: errors of FP8 are larger, and small."""
    params = SamplingParams(max_tokens=100, count=4, seed=3)
    errors = {}
    for dtype in ("auto", "fp8"):
        sampler = EngineSampler(policy, NativeSettings(kv_cache_dtype=dtype), 16)
        errors[dtype] = np.abs(differences(policy, PROMPTS, sampler.generate(PROMPTS, params))).mean()
    assert errors["auto"] < errors["fp8"] < 0.2, errors
