"""Rotary positions by their kernel against the plain formula in float64; packed blocks against transformers' own."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qerl.models import blocks
from qerl.models.blocks import rotate
from tests.gpu.test_update_gpu import adapted, of_all, one_by_one, packed
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.unit.rl.test_packing import samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
#: Half the distance of neighbours near 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
MODELS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def assert_rounded_once(found, expected):
    """Errors are those of the dtype's rounding and of a few in float32."""
    few = 8 * ROUNDING[torch.float32]
    bound = (ROUNDING[found.dtype] + few) * expected.abs() + few * expected.square().mean().sqrt()
    assert ((found.double() - expected).abs() <= bound).all()


def turned(query, key, cos, sin, grads):
    """Rotated queries and keys and their gradients by the kernel, and the same in float64."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key)]
    outs = rotate(*inputs, cos, sin)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = [exact(tensor, cos.double(), sin.double()) for tensor in wide]
    gradients = torch.autograd.grad(outs, inputs, grads)
    exact_gradients = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    return [*(out.detach() for out in outs), *gradients], [*(out.detach() for out in expected), *exact_gradients]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (12, 2), (40, 8), (5, 5), (1, 1)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (333, 128), (77, 64), (41, 80), (9, 2)])
def test_values_and_gradients(tokens, width, heads, kv_heads, dtype):
    """The halves of cos and sin differ, so that a transpose which takes them for equal is seen."""
    cos, sin = (draw(tokens, width, dtype=dtype, seed=seed) for seed in (0, 1))
    query, key, of_query, of_key = (
        draw(tokens, count, width, dtype=dtype, seed=2 + n) for n, count in enumerate((heads, kv_heads) * 2)
    )
    found, expected = turned(query, key, cos, sin, (of_query, of_key))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        assert_rounded_once(a, b)


def test_views_of_a_wider_row_and_gradients_with_gaps():
    """Queries and keys cut out of one projection, a transposed gradient, and one that is a single number for all."""
    cos, sin = (draw(50, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    row = draw(50, (14 + 2 + 2) * 64, dtype=torch.bfloat16, seed=2).unflatten(1, (-1, 64))
    of_query = draw(14, 50, 64, dtype=torch.bfloat16, seed=3).transpose(0, 1)
    of_key = draw(1, 1, 1, dtype=torch.bfloat16, seed=4).expand(50, 2, 64)
    for a, b in zip(*turned(row[:, :14], row[:, 14:16], cos, sin, (of_query, of_key)), strict=True):
        assert_rounded_once(a, b)


def test_norms_of_heads_and_their_gradients():
    """In bfloat16, of queries and keys cut out of one projection, against autograd in float64."""
    cos, sin = (draw(333, 128, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    row = draw(333, (32 + 4 + 4) * 128, dtype=torch.bfloat16, seed=2).unflatten(1, (-1, 128))
    inputs = [part.detach().requires_grad_() for part in (row[:, :32], row[:, 32:36])]
    norms = [Qwen3RMSNorm(128, 1e-6).to(DEVICE).requires_grad_(False) for _ in inputs]
    for seed, norm in enumerate(norms):
        norm.weight.copy_(draw(128, seed=seed))
    grads = [draw(*x.shape, dtype=torch.bfloat16, seed=5) for x in inputs]
    outs = rotate(*inputs, cos, sin, norms)
    found = [*outs, *torch.autograd.grad(outs, inputs, grads)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    scaled = [
        x * norm.weight / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x, norm in zip(wide, norms, strict=True)
    ]
    expected = [exact(x, cos.double(), sin.double()) for x in scaled]
    expected += torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    for one, other in zip(found, expected, strict=True):
        assert_rounded_once(one.detach(), other.detach())


def test_more_than_two_to_the_31_elements():
    tokens, heads = 2**31 // (64 * 128) + 1, 64
    query = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    key, ones = query[:, :1], torch.ones(tokens, 128, dtype=torch.bfloat16, device=DEVICE)
    query[-1] = 1
    out, _ = rotate(query, key, ones, ones)
    assert out[-1, :, :64].eq(0).all()
    assert out[-1, :, 64:].eq(2).all()
    assert not out[:-1].any()


def test_cosines_and_sines_alone_are_kept():
    query, key = (draw(30, heads, 64).requires_grad_() for heads in (4, 2))
    cos, sin = (draw(30, 64, seed=seed) for seed in (0, 1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotate(query, key, cos, sin)
    assert sorted(t.data_ptr() for t in kept) == sorted((cos.data_ptr(), sin.data_ptr()))


@pytest.fixture
def calls(monkeypatch):
    """Tokens of each call of the kernels."""
    tokens = []
    monkeypatch.setattr(blocks, "rotate", lambda query, *others: tokens.append(len(query)) or rotate(query, *others))
    return tokens


@pytest.fixture(params=MODELS)
def outcomes(request, tmp_path, calls):
    """A function of the dtype: log-probabilities and gradients, packed, and one by one in float32."""
    folder = MODELS[request.param](
        tmp_path / "m", hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=1024
    )
    drawn = samples(((37, (300, 1, 129, 2)), (1, (65, 64)), (200, (7, 31)), (64, (128,))))
    weights = [draw(len(s.completion.token_ids), seed=n) for n, s in enumerate(drawn)]

    def both(dtype):
        ours, theirs = adapted(folder, dtype), adapted(folder, "float32")
        found = packed(ours, drawn, weights, 700)
        assert len(calls) >= 2 * 2  # Blocks and micro-batches.
        del calls[:]
        expected = one_by_one(theirs, drawn, weights)
        assert not calls
        rows = (torch.cat([row for row, _ in outcome]) for outcome in (found, expected))
        return *rows, *(torch.cat(list(of_all(policy).values())) for policy in (ours, theirs))

    return both


def test_a_packed_update_in_bfloat16_follows_transformers(outcomes):
    found, expected, gradient, exact_gradient = outcomes("bfloat16")
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
    assert torch.cosine_similarity(gradient, exact_gradient, dim=0) > 0.999
    assert abs(gradient.norm() / exact_gradient.norm() - 1) < 0.02


def test_a_packed_update_in_float32_is_that_of_transformers(outcomes):
    found, expected, gradient, exact_gradient = outcomes("float32")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (gradient - exact_gradient).norm() < 1e-4 * exact_gradient.norm()
