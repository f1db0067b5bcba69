"""Verified drafts on a GPU: attention among rows of a sequence, and completions to the bit."""

import numpy as np
import pytest
import torch

from qerl.kernels.state import PAGE, DecodeState, Heads, KVCache, splits_of
from qerl.models.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rollout import speculation
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.tiny import random_checkpoint, tiny_qwen3

pytest.importorskip("triton", reason="Triton isn't installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
#: Tokens of each sequence before the step, and its rows in the step.
LENGTHS, ROWS = [1, 2, 62, 64, 130, 513, 1500], [8, 1, 5, 3, 8, 2, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("query", "kv", "dim", "normed"), [(2, 1, 32, False), (28, 4, 128, False), (16, 8, 128, True), (3, 3, 80, False)]
)
@pytest.mark.parametrize("least_programs", [0, 1000], ids=["whole", "split"])
@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "plain"])
def test_rows_of_a_sequence_attend_as_steps_one_after_the_other(
    dtype, query, kv, dim, normed, least_programs, pdl, monkeypatch
):
    """To the bit, output and cache, in each of several launches."""
    from qerl.kernels.triton import attention

    monkeypatch.setattr("qerl.kernels.triton.launch.ENABLED", pdl)
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    norms = [(1 + 0.3 * torch.randn(dim, device=CUDA)).to(dtype) if normed else None for _ in range(2)]
    heads = Heads(query, kv, dim, dim**-0.5, *norms, eps=1e-6)
    each, count = 24, sum(ROWS)
    pages = torch.randperm(len(LENGTHS) * each, device=CUDA).view(len(LENGTHS), each).int() + 1
    cache = torch.randn(1 + pages.numel(), 2, kv, PAGE, dim, device=CUDA).to(dtype)
    state = DecodeState.empty(count, 1, each, CUDA)
    places = [(sequence, ahead) for sequence, rows in enumerate(ROWS) for ahead in range(rows)]
    position = [LENGTHS[sequence] - 1 + ahead for sequence, ahead in places]
    state.position[:-1] = torch.tensor(position, device=CUDA).int()
    state.pages[:-1] = pages[[sequence for sequence, _ in places]]
    angle = torch.rand(2000, dim // 2, device=CUDA) * 6
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    qkv = torch.randn(count, (query + 2 * kv) * dim, device=CUDA).to(dtype)
    splits, numbers = splits_of(each), torch.arange(count, device=CUDA)

    expected, steps = torch.zeros(count, query * dim, device=CUDA, dtype=dtype), cache.clone()
    for ahead in range(max(ROWS)):
        chosen = torch.tensor([place for place, (_, other) in enumerate(places) if other == ahead], device=CUDA)
        rows = torch.full((count,), count, device=CUDA)  # idle ones, so that each launch has the same size
        rows[: len(chosen)] = chosen
        out = attention.attend(qkv[rows.clamp(max=count - 1)], KVCache(steps), state, rows.int(), rope, heads, splits)
        expected[chosen] = out[: len(chosen)]
    for _ in range(5):
        together = cache.clone()
        out = attention.attend(qkv, KVCache(together), state, numbers.int(), rope, heads, splits, drafted=True)
        assert torch.equal(out, expected)
        assert torch.equal(together, steps)


@pytest.mark.parametrize("letters", [3, 60])
def test_guesses_are_those_of_the_reference(letters):
    from tests.unit.kernels import draft_cases

    draft_cases.test_guesses_are_those_of_the_reference(letters)


@pytest.mark.parametrize(("count", "replayed"), [(16, True), (37, False), (64, False)])
def test_rows_and_what_follows_from_them_are_those_of_the_reference(count, replayed):
    from tests.unit.kernels import draft_cases

    draft_cases.test_rows_and_what_follows_from_them_are_those_of_the_reference(count, replayed)


# --- the engine ---

PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117)) * 20]


@pytest.fixture(scope="module", params=with_portable("bf16", "nvfp4", "qwen3"))
def policy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "m"
    with kernels_of(request.param) as name:
        if name == "qwen3":
            folder.mkdir()
            tiny_qwen3(folder, max_position_embeddings=1024)
        else:
            random_checkpoint(folder, "small", name)
        dtype = "float32" if name == "qwen3" else "bfloat16"
        policy = with_adapter(folder, AdapterSettings(rank=16), dtype, seed=0, device=torch.device("cuda", 0))
        torch.manual_seed(1)
        for _, parameter in policy.trainable():
            parameter.data += 0.02 * torch.randn_like(parameter)
        yield policy


def sampler_of(policy, drafts, max_sequences=64, stops=(), **settings):
    policy.lm.generation_config.eos_token_id = list(stops)
    return EngineSampler(policy, NativeSettings(drafts=drafts, **settings), max_sequences)


def prompts_of(policy):
    return [[token % policy.lm.config.vocab_size for token in prompt] for prompt in PROMPTS]


def with_guesses(policy, plain, **settings):
    """A sampler that remembers the completions to come, of which every eleventh token is another one."""
    sampler = sampler_of(policy, True, **settings)
    for prompt, group in zip(prompts_of(policy), plain, strict=True):
        guesses = [[t ^ (n % 11 == at) for n, t in enumerate(c.token_ids)] for at, c in enumerate(group)]
        sampler.earlier.add(prompt, guesses)
    return sampler


def accepted(sampler):
    return sum(source.accepted for source in sampler.drafts.sources.values())


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 20}, {"temperature": 0.0}],
    ids=["warm", "top-p", "top-k", "greedy"],
)
@pytest.mark.parametrize("most", [8, 32])
def test_all_bits_are_those_of_plain_steps_where_asked(policy, sampling, most):
    """Also with noise, more sequences than slots, and stop tokens."""
    params = SamplingParams(**{"max_tokens": 100, "count": 4, "seed": 3} | sampling)
    settings = {"max_sequences": most, "batch_invariant": True, "stops": [3, 50]}
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.05), seed=0).at(1, 10):
        plain = sampler_of(policy, False, **settings).generate(prompts_of(policy), params)
        sampler = with_guesses(policy, plain, **settings)
        assert sampler.generate(prompts_of(policy), params) == plain
    assert most == 8 or not params.temperature or accepted(sampler) > 10


def test_logprobs_are_those_of_hugging_face(policy, monkeypatch):
    """Whatever the roundings of larger batches change; rows cost nothing, so that all drafts are verified."""
    monkeypatch.setattr(speculation, "_DOUBLING_ROWS", 1e9)
    prompts, params = prompts_of(policy), SamplingParams(max_tokens=100, count=4, seed=4)
    plain = sampler_of(policy, False).generate(prompts, params)
    sampler = with_guesses(policy, plain)
    groups = sampler.generate(prompts, params)
    assert accepted(sampler) > 50
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt + completion.token_ids for completion in group], device=CUDA)
        with torch.no_grad(), policy.autocast():
            logits = policy.lm(ids).logits[:, len(prompt) - 1 : -1].float()
        theirs = torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompt) :, None])[..., 0].cpu().numpy()
        assert np.abs(theirs - np.array([completion.logprobs for completion in group])).max() < 0.03


def test_a_replay_with_drafts_is_the_trace(policy):
    numbers = np.random.default_rng(0)
    trace = tuple(tuple(tuple(numbers.integers(2, 5, size=n).tolist()) for n in (90, 17)) for _ in PROMPTS)
    params = SamplingParams(max_tokens=90, count=2, replay=trace)
    plain = sampler_of(policy, False).generate(prompts_of(policy), params)
    sampler = sampler_of(policy, True)
    drafted = sampler.generate(prompts_of(policy), params)
    assert [[tuple(c.token_ids) for c in group] for group in drafted] == [list(group) for group in trace]
    assert accepted(sampler) > 20
    for ours, theirs in zip(drafted, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0.03)
