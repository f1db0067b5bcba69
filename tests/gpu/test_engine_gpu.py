"""The native engine on a GPU: its CUDA graphs against Hugging Face."""

import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from qerl.kernels.state import LEAST_FP8_CAPABILITY, PAGE
from qerl.kernels.triton import attention, norms, prompt_attention, sampling
from qerl.models.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rollout.decoder import Pool, bucket_of
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, EngineSettings, NativeSettings, NoiseSettings
from tests.gpu.backends import HOPPER, adapted, kernels_of, with_portable
from tests.gpu.exact import differences, k3
from tests.tiny import random_checkpoint, tiny_qwen3
from tests.unit.rollout.test_turns import Counted

CUDA = torch.device("cuda", 0)
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_FP8_CAPABILITY,
    reason="needs a CUDA device that converts FP8",
)
BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117)) * 20]
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(scope="module", params=with_portable("bf16", "nvfp4"))
def policy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "m"
    with kernels_of(request.param) as weights:
        random_checkpoint(folder, "small", weights)
        yield adapted(folder, "bfloat16")


def stop_at(policy, tokens):
    policy.lm.generation_config.eos_token_id = list(tokens)


def endless(policy, max_sequences=64, **settings):
    stop_at(policy, [])
    return EngineSampler(policy, NativeSettings(**settings), max_sequences)


def assert_close(policy, prompts, groups, temperature=1.0):
    difference = differences(policy, prompts, groups, temperature)
    assert np.abs(difference).max() <= 0.03
    assert k3(difference) <= 1e-4


def test_a_dry_run_compiles_what_a_rollout_launches_and_changes_no_result(policy, monkeypatch, tmp_path):
    params = SamplingParams(max_tokens=70, count=8, seed=4, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "compile", lambda *arguments: None)
        without = endless(policy).generate(PROMPTS, params)
    kernels = [k for m in (attention, norms, prompt_attention, sampling) for k in vars(m).values()]
    for kernel in kernels:
        if isinstance(kernel, JITFunction):
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compiled = defaultdict(set)

    def listen(*, src, metadata, **rest):
        compiled[threading.current_thread() is threading.main_thread()].add(metadata["name"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    assert endless(policy).generate(PROMPTS, params) == without
    assert {"_rms_norm", "_attend", "_rotate_and_store", "_chunks", "_choose"} <= compiled[False]
    assert not {"_rms_norm", "_attend", "_rotate_and_store"} & compiled[True]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_logprobs_are_those_of_hugging_face_with_noise_and_after_a_sync(policy, temperature, request):
    sampler = make_sampler(policy, EngineSettings(), 64)
    name = request.node.callspec.params["policy"]
    product = {"bf16": "TorchLinear", "nvfp4": "W4Linear" if HOPPER else "PortableLinear"}
    assert product.get(name, "PortableLinear") in sampler.served
    params = SamplingParams(max_tokens=100, temperature=temperature, count=8, seed=4, ignore_eos=True)
    clean = sampler.generate(PROMPTS, params)
    assert_close(policy, PROMPTS, clean, temperature)
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=0).at(1, 10):
        noisy = sampler.generate(PROMPTS, params)
        assert_close(policy, PROMPTS, noisy, temperature)
    assert np.abs(differences(policy, PROMPTS, noisy, temperature)).max() > 0.03
    for name, parameter in policy.trainable():
        if "lora_B" in name:
            parameter.data *= -1
    assert_close(policy, PROMPTS, sampler.generate(PROMPTS, params), temperature)
    sampler.release()
    assert_close(policy, PROMPTS, sampler.generate(PROMPTS, params), temperature)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_batch_size(policy, bucket):
    """The batch has one sequence less than its bucket, so that idle rows fill it up."""
    count = bucket if bucket < 8 else bucket - 1
    assert bucket_of(count) == bucket
    sampler = endless(policy, max_sequences=bucket)
    groups = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=20, count=count, seed=1))
    assert_close(policy, PROMPTS[:1], groups)
    sampler.release()


def test_the_same_call_gives_the_same_completions(policy):
    sampler, params = endless(policy), SamplingParams(max_tokens=60, count=8, seed=3, top_p=0.9)
    assert sampler.generate(PROMPTS, params) == sampler.generate(PROMPTS, params)


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("turns", [Counted(3), Counted(3, longest=300), Counted(together=True, longest=300)], ids=repr)
def test_turns_go_on_in_their_slots_while_others_decode(policy, turns, settings, monkeypatch):
    """Replies come late and in another order, or together; short ones, and those of several pages."""
    passes, extend = [], Pool.extend
    monkeypatch.setattr(Pool, "extend", lambda pool, *texts: passes.append(texts) or extend(pool, *texts))
    sampler, turns = endless(policy, 16, **settings), replace(turns, asked=[], texts={}, seen=0)
    params = SamplingParams(max_tokens=500, count=8, seed=4, ignore_eos=True)
    groups = sampler.generate(PROMPTS, replace(params, turns=turns, lengths=((20, 7, 33, 20) * 2,) * 3))
    assert {len(turn) for group in groups for c in group for turn in c.turns[:-1]} == {7, 20, 33}
    assert bool(passes) != bool(settings)
    assert_close(policy, PROMPTS, groups)


def test_a_thousand_requests_of_mixed_lengths_leak_no_page(policy):
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(2, 1000, size=length).tolist() for length in numbers.integers(1, 300, size=250)]
    sampler = endless(policy, 96, kv_cache_gib=400 * 4 * 2 * 2 * PAGE * 128 * 2 / 2**30)
    stop_at(policy, range(2, 18))
    groups = sampler.generate(prompts, SamplingParams(max_tokens=200, count=4, seed=1))
    pages = sampler._pool.pages
    assert pages.count <= 400
    assert sorted(pages.take(pages.available)) == list(range(1, pages.count))
    assert all(c.finished == (c.token_ids[-1] in range(2, 18)) for group in groups for c in group)


def test_missing_memory_is_one_sentence(policy):
    params = SamplingParams(max_tokens=2**20, count=512)
    with pytest.raises(torch.OutOfMemoryError, match="lower max_tokens"):
        endless(policy, 512, kv_cache_gib=2000).generate(PROMPTS, params)
    torch.cuda.empty_cache()


# --- the KV cache in FP8 ---


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A small policy with scores far apart."""
    torch.manual_seed(0)
    folder = tiny_qwen3(tmp_path_factory.mktemp("m"), initializer_range=0.2)
    made = with_adapter(folder, AdapterSettings(rank=4), "bfloat16", seed=0, device=CUDA)
    stop_at(made, [])
    return made


SHORT = [[5, 6, 7], [8], list(range(2, 66)), [9, 10, 11, 12, 13, 14, 15] * 20]


@needs_fp8
def test_with_an_fp8_cache_the_engine_draws_the_same_tokens_in_any_batch(wide):
    params = SamplingParams(max_tokens=150, count=4, seed=3)

    def drawn(slots):
        sampler = EngineSampler(wide, NativeSettings(kv_cache_dtype="fp8", batch_invariant=True), slots)
        groups = sampler.generate(SHORT, params)
        return [[(c.token_ids, c.logprobs) for c in group] for group in groups], sampler

    whole, sampler = drawn(16)
    assert drawn(16)[0] == whole
    half = EngineSampler(wide, NativeSettings(batch_invariant=True), 16)
    half.generate(SHORT, params)
    assert half.cache_bytes / sampler.cache_bytes == 2 * 16 / (16 + 4)


@needs_fp8
@pytest.mark.parametrize("replies", [False, True])
def test_with_an_fp8_cache_log_probabilities_stay_near_those_of_the_policy(wide, replies):
    """In bfloat16 and in FP8, with the same tokens: errors of FP8 are larger, and small."""
    errors = {}
    for dtype in ("auto", "fp8"):
        params = SamplingParams(max_tokens=100, count=4, seed=3)
        if replies:
            turns = Counted(together=True, longest=100)
            params = replace(params, max_tokens=300, turns=turns, lengths=((20,) * 4,) * 4)
        sampler = EngineSampler(wide, NativeSettings(kv_cache_dtype=dtype), 16)
        errors[dtype] = np.abs(differences(wide, SHORT, sampler.generate(SHORT, params))).mean()
    assert errors["auto"] < errors["fp8"] < 0.2, errors
