"""The Triton kernels of decode steps on a GPU, against float64."""

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.state import CHUNK, IDLE, PAGE, DecodeState, KVCache, Norm, SamplingState, splits_of
from qerl.kernels.triton import add_normed, attention, draw, rms_norm
from qerl.kernels.triton.linear import narrow_product
from tests.gpu.exact import CUDA, expected_attention, heads_of, kernels_order, normed, paged

DTYPES = [torch.bfloat16, torch.float32]


pytestmark = pytest.mark.usefixtures("poisoned")


def tolerance(dtype):
    return {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}


# --- norms and narrow products ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 80), (7, 1537), (256, 3584), (5, 8192)])
@pytest.mark.usefixtures("dependent_launch")
def test_rms_norm(dtype, rows, width):
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
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    heads, rope = heads_of(dtype, query, kv, dim, normed, rotary, window, sinks)
    state, cache = paged([1, 2, 64, 65, 129, 512, 513, 1500, 2100], heads, dtype)
    state.position[3] = IDLE
    rows = torch.tensor([8, 3, 0, 9, 1, 2, 9, 4, 5, 6, 7], dtype=torch.int32, device=CUDA)
    qkv = torch.randn(len(rows), (query + 2 * kv) * dim, device=CUDA).to(dtype)
    before, splits = cache.clone(), splits_of(state.pages.shape[1])
    out = attention.attend(qkv, KVCache(cache), state, rows, rope, heads, splits)
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
        one, copy = slice(row, row + 1), KVCache(cache.clone())
        alone = attention.attend(qkv[one], copy, state, rows[one], rope, heads, splits)
        assert torch.equal(alone[0], out[row])
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "kv"), [(28, 4), (32, 8), (40, 8)])
@pytest.mark.usefixtures("dependent_launch")
def test_rows_that_share_a_prompt_have_the_bits_of_rows_alone(dtype, query, kv, monkeypatch):
    heads, rope = heads_of(dtype, query, kv, 128, False, 128, None, False)
    lengths = torch.tensor([300, 193, 256, 1000, 257, 640, 321, 400] * 32)
    state = DecodeState.empty(len(lengths), 1, 16, CUDA)
    state.position[:-1] = lengths.to(CUDA).int() - 1
    state.position[[3, 17]] = IDLE
    state.pages[:-1] = torch.randperm(16 * len(lengths), device=CUDA).view(-1, 16).int() + 1
    for slot in range(len(lengths)):  # three pages are the prompt's; for every other prompt some rows have a fourth
        shared = 3 if slot // 8 % 2 or slot % 8 in (1, 2) else 4
        state.pages[slot, :shared] = state.pages[slot - slot % 8, :shared]
    cache = torch.randn(1 + 16 * len(lengths), 2, kv, PAGE, 128, device=CUDA).to(dtype)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=CUDA)
    qkv = torch.randn(len(rows), (query + 2 * kv) * 128, device=CUDA).to(dtype)
    outcomes = []
    for least, number in ((1, 2), (1e6, 1)):
        monkeypatch.setattr(attention, "_LEAST_SHARED_PROGRAMS", least)
        multiprocessors = torch.cuda.get_device_properties(CUDA).multi_processor_count
        assert attention._rows_together(heads, len(rows), multiprocessors) == number
        copy = cache.clone()
        outcomes.append((attention.attend(qkv, KVCache(copy), state, rows, rope, heads, 4), copy))
    assert all(map(torch.equal, *outcomes))
    for slot in (0, 1, 2, 8, 11, 255):
        expected, _, _ = expected_attention(qkv[slot], cache, state, slot, rope, heads)
        torch.testing.assert_close(outcomes[0][0][slot].double(), expected, **tolerance(dtype))


# --- drawing ---


def sampling_of(temperature, seed=3, top_p=1.0, top_k=0, stops=()):
    sampling = SamplingState.empty(CUDA)
    sampling.set(temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, stops=stops)
    return sampling


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1000, CHUNK, CHUNK + 1, 151_936])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (1.2, 1.0, 20)]
)
@pytest.mark.usefixtures("dependent_launch")
def test_draw_is_that_of_the_reference(dtype, width, temperature, top_p, top_k):
    count, truncated = 33, top_p < 1 or top_k > 0
    logits = (torch.randn(count, width, device=CUDA) * 3).to(dtype)
    rows = torch.randperm(count + 1, device=CUDA)[:count].int()
    sampling = sampling_of(temperature, seed=2**63 + 12345, top_p=top_p, top_k=top_k, stops=range(2))
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
    assert torch.equal(found.position, expected.position)
    assert torch.equal(found.drawn, expected.drawn)
    assert torch.equal(found.token, expected.token)
    wide = torch.log_softmax(logits.double() / (temperature or 1), -1)
    for row, slot in enumerate(rows.tolist()):
        if 0 < slot < count:
            number = slot % 4
            logprob = wide[row, found.tokens[slot, number].long()]
            assert found.logprobs[slot, number].item() == pytest.approx(logprob.item(), abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_a_replayed_draw_takes_the_tokens_that_are_there(temperature):
    count, width = 33, 50_000
    logits = (torch.randn(count, width, device=CUDA) * 3).bfloat16()
    sampling = sampling_of(temperature, stops=range(2))
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


@pytest.mark.parametrize("place", [0, 7, 49_999])
def test_a_logit_that_is_nan_makes_the_logprob_nan(place):
    logits = torch.randn(4, 50_000, device=CUDA).bfloat16()
    logits[1, place], logits[2] = torch.nan, torch.nan
    state = DecodeState.empty(4, 4, 1, CUDA)
    state.position[:-1], state.limit[:], state.sequence[:-1] = 5, 4, torch.arange(4, device=CUDA)
    draw(logits, torch.arange(4, device=CUDA).int(), state, sampling_of(1.0), False)
    assert state.logprobs[:4, 0].isnan().tolist() == [False, True, True, False]
    assert ((state.tokens[:4, 0] >= 0) & (state.tokens[:4, 0] < 50_000)).all()


def test_a_draw_does_not_depend_on_the_batch():
    logits = torch.randn(64, 50_000, device=CUDA).bfloat16()
    drawn = []
    for parts in (1, 64):
        state = DecodeState.empty(64, 4, 1, CUDA)
        state.position[:-1], state.limit[:], state.sequence[:-1] = 5, 4, torch.arange(64, device=CUDA)
        for rows in torch.arange(64, device=CUDA).int().chunk(parts):
            draw(logits[rows.long()], rows, state, sampling_of(1.0), False)
        drawn.append((state.tokens, state.logprobs))
    assert all(map(torch.equal, *drawn))
    assert len(drawn[0][0][:, 0].unique()) > 50
