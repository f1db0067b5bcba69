"""The native engine on a GPU: its Triton kernels against float64, its CUDA graphs against Hugging Face."""

import numpy as np
import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.decode_state import IDLE, DecodeState, SamplingState
from qerl.kernels.geometry import CHUNK, PAGE, Heads, Norm, splits_of
from qerl.kernels.kv_cache import KVCache
from qerl.policy.policy import with_adapter
from qerl.random_models.checkpoint import write_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.engine.cuda_graphs import bucket_of
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import EngineSettings, NativeSettings
from qerl.settings.training import AdapterSettings, NoiseSettings
from tests.gpu.backends import HOPPER, kernels_of, with_portable
from tests.tiny import tiny_llama, tiny_qwen3

pytest.importorskip("triton", reason="Triton isn't installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32]
BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]


@pytest.fixture(autouse=True)
def poisoned():
    """Fill freed memory, from which outputs are allocated, with NaN."""
    torch.manual_seed(torch.seed() % 2**31)
    filled = [torch.full((size,), torch.nan, device=CUDA) for size in (2**9, 2**14, 2**20, 2**26) for _ in range(4)]
    del filled


@pytest.fixture(params=[True, False], ids=["pdl", "plain"])
def dependent_launch(request, monkeypatch):
    monkeypatch.setattr("qerl.kernels.launch.ENABLED", request.param)


def tolerance(dtype):
    return {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}


def normed(x, norm):
    scale = norm.weight.double() + norm.offset + (0 if norm.noise is None else norm.noise.double())
    return scale * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 80), (7, 1537), (256, 3584), (5, 8192)])
@pytest.mark.usefixtures("dependent_launch")
def test_rms_norm(dtype, rows, width):
    from qerl.kernels.norm import add_normed, rms_norm

    x = torch.randn(rows, width, device=CUDA).mul_(3).to(dtype)
    for weight_dtype in DTYPES:
        weight = (1 + torch.randn(width, device=CUDA) * 0.3).to(weight_dtype)
        for noise in (None, torch.randn(width, device=CUDA) * 0.1):
            norm, then = Norm(weight, noise, 1e-6, 0.0), Norm(weight, None, 1e-5, 1.0)
            expected = normed(x.double(), norm)
            torch.testing.assert_close(rms_norm(x, norm).double(), expected, **tolerance(dtype))
            to = torch.randn(rows, width, device=CUDA).to(dtype)
            total = to.double() + expected
            after = add_normed(to, x, norm, then)
            torch.testing.assert_close(to.double(), total, **tolerance(dtype))
            torch.testing.assert_close(after.double(), normed(to.double(), then), **tolerance(dtype))


@pytest.mark.usefixtures("dependent_launch")
@pytest.mark.parametrize("rank", [0, 20, 32])
def test_narrow_products(rank):
    from qerl.kernels.narrow import narrow_product

    weight, down = torch.randn(96, 5120, device=CUDA).bfloat16(), torch.randn(rank, 5120, device=CUDA).bfloat16()
    up = torch.randn(96, rank, device=CUDA).bfloat16()
    for rows in (1, 8, 17, 64, 128):
        x = torch.randn(rows, 5120, device=CUDA).bfloat16()
        exact = x.double() @ weight.double().T + (x.double() @ down.double().T).bfloat16().double() @ up.double().T
        outs = [x.new_full((rows, 96), torch.nan) for _ in range(2)]
        for out in outs:
            narrow_product(x, weight, down, up, out)
        assert (outs[0].double() - exact).norm() < 6e-3 * exact.norm()
        assert torch.equal(*outs), "not deterministic"


# --- attention ---


def paged(lengths, heads, dtype):
    """Slots whose last token is at `lengths` - 1, and a cache that is NaN where it holds none of their tokens."""
    each = max(-(-length // PAGE) for length in lengths)
    state = DecodeState.empty(len(lengths), 1, each, CUDA)
    order = torch.randperm(len(lengths) * each, device=CUDA).view(len(lengths), each) + 1
    state.pages[:-1] = order.int()
    state.position[:-1] = torch.tensor(lengths, device=CUDA).int() - 1
    cache = torch.full((1 + order.numel(), 2, heads.kv, PAGE, heads.dim), torch.nan, dtype=dtype, device=CUDA)
    for slot, length in enumerate(lengths):
        for token in range(length - 1):
            cache[order[slot, token // PAGE], :, :, token % PAGE] = torch.randn(2, heads.kv, heads.dim, device=CUDA)
    return state, cache


def rotated(x, norm, heads, cos, sin):
    """x [heads, D], rotated in float64. The norm rounds where that of transformers does, for Qwen3 or with an offset.

    Without this rounding, one row of two tokens in some 4,000 is beyond the tolerance of bfloat16.
    """
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + heads.eps).sqrt()
        if not heads.norm_offset:
            x = x.to(norm.dtype).double()
        x = ((heads.norm_offset + norm.double()) * x).to(norm.dtype).double()
    rotary = 2 * cos.shape[-1]
    first, second = x[..., :rotary].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary:]], -1)


def kernels_order(heads, rope):
    """The order of a key's elements in the kernels' cache: pairs that rotate together are half a head apart."""
    pairs = rope[0].shape[1]
    rest = heads.dim // 2 - pairs
    places = torch.arange(heads.dim, device=CUDA).split([pairs, pairs, rest, rest])
    return torch.cat([places[0], places[2], places[1], places[3]])


def with_sinks(scores, heads):
    """Scores [H, ..., T] with those of a further key, if heads have sinks."""
    if heads.sinks is None:
        return scores
    sinks = heads.sinks.double().view(-1, *[1] * (scores.ndim - 1))
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)


def expected_attention(qkv, cache, state, slot, rope, heads):
    """The attention of one row in float64, [Hq * D], with its rotated key [Hkv, D]."""
    position = int(state.position[slot])
    parts = qkv.double().view(-1, heads.dim).split([heads.query, heads.kv, heads.kv])
    angles = rope[0][position].double(), rope[1][position].double()
    query = rotated(parts[0], heads.q_norm, heads, *angles)
    key = rotated(parts[1], heads.k_norm, heads, *angles)
    pages = state.pages[slot].long()
    token = torch.arange(0 if heads.window is None else max(position + 1 - heads.window, 0), position, device=CUDA)
    held = cache[pages[token // PAGE], :, :, token % PAGE].double()  # [tokens, 2, Hkv, D]
    held[:, 0] = held[:, 0][..., kernels_order(heads, rope).argsort()]
    keys = torch.cat([held[:, 0], key[None]]).repeat_interleave(heads.query // heads.kv, 1)
    values = torch.cat([held[:, 1], parts[2][None]]).repeat_interleave(heads.query // heads.kv, 1)
    scores = torch.einsum("hd,thd->ht", query, keys) * heads.scale
    weights = with_sinks(scores, heads).softmax(-1)[..., : len(keys)]
    return torch.einsum("ht,thd->hd", weights, values).flatten(), key, parts[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("query", "kv", "dim", "normed", "rotary", "window", "sinks"),
    [
        (2, 1, 32, False, 32, None, False),
        (4, 2, 16, True, 16, None, False),
        (28, 4, 128, False, 128, None, False),
        (16, 8, 128, True, 128, None, False),
        (3, 3, 80, False, 80, None, False),
        (32, 1, 64, True, 64, None, False),
        (24, 8, 128, False, 96, None, False),
        (32, 32, 96, False, 96, 700, False),
        (4, 1, 256, "1 + w", 256, None, False),
        (4, 1, 256, "1 + w", 256, 512, False),
        (2, 1, 32, "1 + w", 24, 1, False),
        (64, 8, 64, False, 64, 128, True),
        (8, 1, 16, False, 16, None, True),
    ],
)
@pytest.mark.parametrize("least_programs", [0, 1000], ids=["whole", "split"])
@pytest.mark.usefixtures("dependent_launch")
def test_attention(dtype, query, kv, dim, normed, rotary, window, sinks, least_programs, monkeypatch):
    from qerl.kernels import attention
    from qerl.kernels.attention import attend

    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    offset = float(normed == "1 + w")
    norms = [(1 - offset + 0.3 * torch.randn(dim, device=CUDA)).to(dtype) if normed else None for _ in range(2)]
    scores = torch.randn(query, device=CUDA).to(dtype) if sinks else None
    heads = Heads(query, kv, dim, dim**-0.5, *norms, eps=1e-6, norm_offset=offset, window=window, sinks=scores)
    state, cache = paged([1, 2, 64, 65, 129, 512, 513, 1500, 2100], heads, dtype)
    state.position[3] = IDLE
    angle = torch.rand(2200, rotary // 2, device=CUDA) * 6
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    rows = torch.tensor([8, 3, 0, 9, 1, 2, 9, 4, 5, 6, 7], dtype=torch.int32, device=CUDA)
    qkv = torch.randn(len(rows), (query + 2 * kv) * dim, device=CUDA).to(dtype)
    before, splits = cache.clone(), splits_of(state.pages.shape[1])
    out = attend(qkv, KVCache(cache), state, rows, rope, heads, splits)
    for row, slot in enumerate(rows.tolist()):
        position = int(state.position[slot])
        if position == IDLE:
            assert not out[row].any()
            continue
        expected, key, value = expected_attention(qkv[row], before, state, slot, rope, heads)
        torch.testing.assert_close(out[row].double(), expected, **tolerance(dtype))
        page = int(state.pages[slot, position // PAGE])
        stored = key[..., kernels_order(heads, rope)]
        torch.testing.assert_close(cache[page, 0, :, position % PAGE].double(), stored, **tolerance(dtype))
        assert torch.equal(cache[page, 1, :, position % PAGE].double(), value)
        before[page, :, :, position % PAGE] = cache[page, :, :, position % PAGE]
        alone = attend(qkv[row : row + 1], KVCache(cache.clone()), state, rows[row : row + 1], rope, heads, splits)
        assert torch.equal(alone[0], out[row])
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "kv"), [(28, 4), (32, 8), (40, 8)])
@pytest.mark.usefixtures("dependent_launch")
def test_rows_that_share_a_prompt_have_the_bits_of_rows_alone(dtype, query, kv, monkeypatch):
    from qerl.kernels import attention

    heads, lengths = Heads(query, kv, 128, 128**-0.5), torch.tensor([300, 193, 256, 1000, 257, 640, 321, 400] * 32)
    state = DecodeState.empty(len(lengths), 1, 16, CUDA)
    state.position[:-1] = lengths.to(CUDA).int() - 1
    state.position[[3, 17]] = IDLE
    state.pages[:-1] = torch.randperm(16 * len(lengths), device=CUDA).view(-1, 16).int() + 1
    for slot in range(len(lengths)):  # three pages are the prompt's; for every other prompt some rows have a fourth
        shared = 3 if slot // 8 % 2 or slot % 8 in (1, 2) else 4
        state.pages[slot, :shared] = state.pages[slot - slot % 8, :shared]
    cache = torch.randn(1 + 16 * len(lengths), 2, kv, PAGE, 128, device=CUDA).to(dtype)
    angle = torch.rand(1100, 64, device=CUDA) * 6
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=CUDA)
    qkv = torch.randn(len(rows), (query + 2 * kv) * 128, device=CUDA).to(dtype)
    outcomes = []
    for least, number in ((1, 2), (1e6, 1)):
        monkeypatch.setattr(attention, "_LEAST_SHARED_PROGRAMS", least)
        multiprocessors = torch.cuda.get_device_properties(CUDA).multi_processor_count
        assert attention._rows_together(heads, len(rows), multiprocessors) == number
        copy = cache.clone()
        outcomes.append((attention.attend(qkv, KVCache(copy), state, rows, rope, heads, 4), copy))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    for slot in (0, 1, 2, 8, 11, 255):
        expected, _, _ = expected_attention(qkv[slot], cache, state, slot, rope, heads)
        torch.testing.assert_close(outcomes[0][0][slot].double(), expected, **tolerance(dtype))


# --- drawing ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1000, CHUNK, CHUNK + 1, 151_936])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (1.2, 1.0, 20)]
)
@pytest.mark.usefixtures("dependent_launch")
def test_draw_is_that_of_the_reference(dtype, width, temperature, top_p, top_k):
    from qerl.kernels.sampling import draw

    count, truncated = 33, top_p < 1 or top_k > 0
    logits = (torch.randn(count, width, device=CUDA) * 3).to(dtype)
    rows = torch.randperm(count + 1, device=CUDA)[:count].int()
    sampling = SamplingState.empty(CUDA)
    sampling.set(temperature=temperature, seed=2**63 + 12345, top_p=top_p, top_k=top_k, stops=range(2))
    outcomes = []
    for function in (draw, reference.draw):
        state = DecodeState.empty(count, 8, 1, CUDA)
        state.position[:-1] = torch.arange(count, device=CUDA).int() - 1
        state.drawn[:-1] = torch.arange(count, device=CUDA).int() % 4
        state.limit[:] = 4
        state.sequence[:-1] = torch.arange(count, device=CUDA) * (2**33 + 7)
        function(logits, rows, state, sampling, truncated)
        outcomes.append(state)
    found, expected = outcomes
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.progress, expected.progress)
    assert torch.equal(found.token, expected.token)
    wide = torch.log_softmax(logits.double() / (temperature or 1), -1)
    for row, slot in enumerate(rows.tolist()):
        if 0 < slot < count:
            number = slot % 4
            logprob = wide[row, found.tokens[slot, number].long()]
            assert found.logprobs[slot, number].item() == pytest.approx(logprob.item(), abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_a_replayed_draw_takes_the_tokens_that_are_there(temperature):
    from qerl.kernels.sampling import draw

    count, width = 33, 50_000
    logits = (torch.randn(count, width, device=CUDA) * 3).bfloat16()
    sampling = SamplingState.empty(CUDA)
    sampling.set(temperature=temperature, seed=3, top_p=1.0, top_k=0, stops=range(2))
    trace = torch.randint(width, (count + 1, 4), device=CUDA, dtype=torch.int32)
    trace[:5] = 1  # a stop token
    state = DecodeState.empty(count, 4, 1, CUDA)
    state.position[:-1], state.limit[:] = 7, 4
    state.drawn[:-1] = torch.arange(count, device=CUDA).int() % 4
    state.tokens.copy_(trace)
    number = state.drawn[:-1].long()
    draw(logits, torch.arange(count, device=CUDA).int(), state, sampling, False, True)
    assert torch.equal(state.tokens, trace)
    chosen = trace[:-1].gather(1, number[:, None])[:, 0].long()
    assert torch.equal(state.token[:-1], chosen)
    done = (number == 3) | (chosen < 2)
    assert torch.equal(state.position[:-1] == -1, done)
    expected = torch.log_softmax(logits.double() / (temperature or 1), -1).gather(1, chosen[:, None])[:, 0]
    found = state.logprobs[:-1].gather(1, number[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-6)


def test_a_draw_does_not_depend_on_the_batch():
    from qerl.kernels.sampling import draw

    logits = torch.randn(64, 50_000, device=CUDA).bfloat16()
    sampling = SamplingState.empty(CUDA)
    sampling.set(temperature=1.0, seed=3, top_p=1.0, top_k=0, stops=())
    drawn = []
    for parts in (1, 64):
        state = DecodeState.empty(64, 4, 1, CUDA)
        state.position[:-1], state.limit[:], state.sequence[:-1] = 5, 4, torch.arange(64, device=CUDA)
        for rows in torch.arange(64, device=CUDA).int().chunk(parts):
            draw(logits[rows.long()], rows, state, sampling, False)
        drawn.append((state.tokens, state.logprobs))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert len(drawn[0][0][:, 0].unique()) > 50


# --- the engine ---

PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117)) * 20]


def perturbed(checkpoint, dtype="bfloat16"):
    policy = with_adapter(checkpoint, AdapterSettings(rank=16), dtype, seed=0, device=torch.device("cuda", 0))
    torch.manual_seed(1)
    for _, parameter in policy.trainable():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return policy


@pytest.fixture(scope="module", params=with_portable("bf16", "nvfp4"))
def policy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "m"
    with kernels_of(request.param) as weights:
        write_checkpoint(folder, "small", weights, ["1 2 3 apples"] * 50)
        yield perturbed(folder)


def stop_at(policy, tokens):
    policy.lm.generation_config.eos_token_id = list(tokens)


def endless(policy, max_sequences=64, **settings):
    stop_at(policy, [])
    return EngineSampler(policy, NativeSettings(**settings), max_sequences)


def differences(policy, prompts, groups, temperature=1.0):
    """The log-probabilities of a Hugging Face forward pass minus those of the sampler."""
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt + completion.token_ids for completion in group], device=CUDA)
        with torch.no_grad(), policy.autocast():
            logits = policy.lm(ids).logits[:, len(prompt) - 1 : -1].float() / temperature
        ours = torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompt) :, None])[..., 0].cpu().numpy()
        found.append((ours - np.array([completion.logprobs for completion in group])).flatten())
    return np.concatenate(found)


def assert_close(policy, prompts, groups, temperature=1.0):
    difference = differences(policy, prompts, groups, temperature)
    assert np.abs(difference).max() <= 0.03
    assert np.mean(np.exp(difference) - 1 - difference) <= 1e-4


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


@pytest.mark.parametrize("write", [tiny_qwen3, tiny_llama])
def test_other_architectures_in_float32(tmp_path, write):
    policy = perturbed(write(tmp_path, max_position_embeddings=1024), "float32")
    prompts = [[5, 6, 7], list(range(2, 66)), [9, 10, 11, 12, 13, 14, 15] * 20]
    groups = endless(policy).generate(prompts, SamplingParams(max_tokens=80, count=4, seed=2))
    assert np.abs(differences(policy, prompts, groups)).max() < 1e-3


def test_tokens_do_not_depend_on_the_batch_where_asked(policy):
    params = SamplingParams(max_tokens=60, count=8, seed=3)
    whole = endless(policy, 32, batch_invariant=True).generate(PROMPTS, params)
    parts = [
        endless(policy, 32, batch_invariant=True).generate(
            [prompt], SamplingParams(max_tokens=60, count=8, seed=3, first=place)
        )[0]
        for place, prompt in enumerate(PROMPTS)
    ]
    assert parts == whole


def test_the_same_call_gives_the_same_completions(policy):
    sampler, params = endless(policy), SamplingParams(max_tokens=60, count=8, seed=3, top_p=0.9)
    assert sampler.generate(PROMPTS, params) == sampler.generate(PROMPTS, params)


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


def test_sync_takes_under_a_millisecond(policy):
    sampler = endless(policy)
    sampler.sync()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    sampler.sync()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 1
