"""Kernels of the update against autograd of the plain formulas in float64: norms, activations and rotary positions.

Packed blocks with all of them are compared with transformers' own.
"""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qerl.models import blocks
from qerl.models.blocks import NoisyRMSNorm, rotate
from qerl.models.experts import swiglu
from tests.gpu.backends import adapted
from tests.gpu.exact import CUDA, ROUNDING, assert_rounded_once, draw
from tests.gpu.test_update_gpu import of_all, one_by_one, packed
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.unit.rl.test_packing import samples

EPS = 1e-6
DTYPES = list(ROUNDING)
MODELS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}


def noisy_norm(width, trained=True):
    norm = NoisyRMSNorm(torch.nn.Parameter(1 + 0.3 * draw(width), requires_grad=trained), EPS)
    norm.noise.copy_(0.1 * draw(width, seed=1))
    return norm


def exact_norm(norm, hidden):
    """The output of the norm, and its input and weight in float64."""
    wide, weight = hidden.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    scale = weight + norm.noise.double()
    return scale * wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt(), wide, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 65), (1, 1, 3584), (1, 1200, 65), (1, 1001, 3584), (2, 3, 1536), (5, 8192)])
def test_norm(shape, dtype):
    norm, hidden = noisy_norm(shape[-1]), draw(*shape, dtype=dtype, scale=3, seed=2).requires_grad_()
    grad = draw(*shape, dtype=dtype, seed=3)
    out = norm(hidden)
    exact, wide, weight = exact_norm(norm, hidden)
    assert_rounded_once(out, exact)
    grads = torch.autograd.grad(out, (hidden, norm.weight), grad)
    assert [g.dtype for g in grads] == [dtype, torch.float32]
    for found, expected in zip(grads, torch.autograd.grad(exact, (wide, weight), grad.double()), strict=True):
        assert_rounded_once(found, expected)


def test_a_frozen_weight_gets_no_gradient_and_the_input_the_same_one():
    grads = []
    for trained in (True, False):
        norm, hidden = noisy_norm(896, trained), draw(1, 700, 896, dtype=torch.bfloat16, seed=2).requires_grad_()
        norm(hidden).backward(draw(1, 700, 896, dtype=torch.bfloat16, seed=3))
        assert (norm.weight.grad is not None) == trained
        grads.append(hidden.grad)
    assert torch.equal(*grads)


def test_a_norm_makes_no_float32_copy():
    norm, hidden = noisy_norm(3584, trained=False), draw(1, 4096, 3584, dtype=torch.bfloat16).requires_grad_()
    grad, size = torch.ones_like(hidden), hidden.nbytes
    norm(hidden).backward(grad)  # What is compiled or allocated once.
    hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm(hidden).backward(grad)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * size  # The output and the gradient, in 16 bits.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 65), (1, 1, 18944), (1, 333, 4864), (3, 2, 2048)])
def test_swiglu(shape, dtype):
    inputs = [draw(*shape, dtype=dtype, scale=scale, seed=scale).requires_grad_() for scale in (4, 1)]
    grad = draw(*shape, dtype=dtype, seed=3)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = wide[0] * wide[0].sigmoid() * wide[1]
    out = swiglu(*inputs)
    assert_rounded_once(out, exact)
    grads = torch.autograd.grad(out, inputs, grad)
    assert [g.dtype for g in grads] == [dtype, dtype]
    for found, expected in zip(grads, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        assert_rounded_once(found, expected)


def test_swiglu_of_large_gates_is_finite():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=CUDA, requires_grad=True)
    up = torch.ones_like(gate).requires_grad_()
    out = swiglu(gate, up)
    grads = torch.autograd.grad(out.sum(), (gate, up))
    torch.testing.assert_close(out.tolist(), [[0.0, 0.0, 0.0, 100.0, 1e4]])
    torch.testing.assert_close(grads[0].tolist(), [[0.0, 0.0, 0.5, 1.0, 1.0]])
    assert torch.equal(grads[1], out)


def test_swiglu_keeps_gate_and_up_alone():
    gate, up = (draw(1, 100, 512, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (0, 1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert sorted(t.data_ptr() for t in kept) == sorted((gate.data_ptr(), up.data_ptr()))


def test_tensors_with_gaps_are_read_as_they_are_meant():
    """Slices of wider tensors, and a gradient that is one number for all."""
    both, norm = draw(3, 7, 2 * 640, dtype=torch.bfloat16), noisy_norm(640)
    apart = [part.detach().clone().requires_grad_() for part in both.chunk(2, -1)]
    parts = [part.detach().requires_grad_() for part in both.chunk(2, -1)]
    found, expected = (
        [out, *torch.autograd.grad(out.sum(), inputs)]
        for inputs in (parts, apart)
        for out in (swiglu(norm(inputs[0]), inputs[1]),)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- rotary positions ---


def by_formula(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def turned(query, key, cos, sin, grads):
    """Rotated queries and keys and their gradients by the kernel, and the same in float64."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key)]
    outs = rotate(*inputs, cos, sin)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = [by_formula(tensor, cos.double(), sin.double()) for tensor in wide]
    gradients = torch.autograd.grad(outs, inputs, grads)
    exact_gradients = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    return [*(out.detach() for out in outs), *gradients], [*(out.detach() for out in expected), *exact_gradients]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (12, 2), (40, 8), (5, 5), (1, 1)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (333, 128), (77, 64), (41, 80), (9, 2)])
def test_rotated_values_and_gradients(tokens, width, heads, kv_heads, dtype):
    """The halves of cos and sin differ, so that a transpose which takes them for equal is seen."""
    cos, sin = (draw(tokens, width, dtype=dtype, seed=seed) for seed in (0, 1))
    query, key, of_query, of_key = (
        draw(tokens, count, width, dtype=dtype, seed=2 + n) for n, count in enumerate((heads, kv_heads) * 2)
    )
    found, expected = turned(query, key, cos, sin, (of_query, of_key))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        assert_rounded_once(a, b, 8)


def test_views_of_a_wider_row_and_gradients_with_gaps():
    """Queries and keys cut out of one projection, a transposed gradient, and one that is a single number for all."""
    cos, sin = (draw(50, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    row = draw(50, (14 + 2 + 2) * 64, dtype=torch.bfloat16, seed=2).unflatten(1, (-1, 64))
    of_query = draw(14, 50, 64, dtype=torch.bfloat16, seed=3).transpose(0, 1)
    of_key = draw(1, 1, 1, dtype=torch.bfloat16, seed=4).expand(50, 2, 64)
    for a, b in zip(*turned(row[:, :14], row[:, 14:16], cos, sin, (of_query, of_key)), strict=True):
        assert_rounded_once(a, b, 8)


def test_norms_of_heads_and_their_gradients():
    """In bfloat16, of queries and keys cut out of one projection, against autograd in float64."""
    cos, sin = (draw(333, 128, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    row = draw(333, (32 + 4 + 4) * 128, dtype=torch.bfloat16, seed=2).unflatten(1, (-1, 128))
    inputs = [part.detach().requires_grad_() for part in (row[:, :32], row[:, 32:36])]
    norms = [Qwen3RMSNorm(128, 1e-6).to(CUDA).requires_grad_(False) for _ in inputs]
    for seed, norm in enumerate(norms):
        norm.weight.copy_(draw(128, seed=seed))
    grads = [draw(*x.shape, dtype=torch.bfloat16, seed=5) for x in inputs]
    outs = rotate(*inputs, cos, sin, norms)
    found = [*outs, *torch.autograd.grad(outs, inputs, grads)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    scaled = [
        x * norm.weight / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x, norm in zip(wide, norms, strict=True)
    ]
    expected = [by_formula(x, cos.double(), sin.double()) for x in scaled]
    expected += torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    for one, other in zip(found, expected, strict=True):
        assert_rounded_once(one, other, 8)


def test_more_than_two_to_the_31_elements():
    tokens, heads = 2**31 // (64 * 128) + 1, 64
    query = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16, device=CUDA)
    key, ones = query[:, :1], torch.ones(tokens, 128, dtype=torch.bfloat16, device=CUDA)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_update_follows_transformers(outcomes, dtype):
    exactly = dtype == torch.float32
    found, expected, gradient, exact_gradient = outcomes("float32" if exactly else "bfloat16")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if exactly else 0.03)
    assert torch.cosine_similarity(gradient, exact_gradient, dim=0) > 0.999
    assert abs(gradient.norm() / exact_gradient.norm() - 1) < 0.02
    if exactly:
        assert (gradient - exact_gradient).norm() < 1e-4 * exact_gradient.norm()
