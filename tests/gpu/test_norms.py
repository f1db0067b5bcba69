"""Norms, gates, rotary positions, narrow products and weighted sums against float64, forward and backward."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qerl.kernels import reference
from qerl.kernels.state import Norm
from qerl.kernels.triton import experts, norms
from qerl.kernels.triton.linear import narrow_product
from qerl.models.blocks import NoisyRMSNorm, rotate
from qerl.models.experts import swiglu
from tests.gpu.exact import DEVICE, DTYPES, INTERPRETED, assert_near, assert_rounded_once, close_in, draw

EPS = 1e-6
on_gpu = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no kernels of PyTorch's autograd functions")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normed(x, norm):
    scale = norm.weight.double() + norm.offset + (0 if norm.noise is None else norm.noise.double())
    return scale * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


# --- decode steps ---


@dtypes
@pytest.mark.parametrize(
    ("rows", "width"), [(3, 80)] if INTERPRETED else [(1, 64), (3, 80), (7, 1537), (256, 3584), (5, 8192)]
)
@pytest.mark.usefixtures("dependent_launch", "poisoned")
def test_norms_of_decode_steps(dtype, rows, width):
    x = torch.randn(rows, width, device=DEVICE).mul_(3).to(dtype)
    for weight_dtype in DTYPES:
        weight = (1 + torch.randn(width, device=DEVICE) * 0.3).to(weight_dtype)
        for noise in (None, torch.randn(width, device=DEVICE) * 0.1):
            norm, then = Norm(weight, noise, 1e-6, 0.0), Norm(weight, None, 1e-5, 1.0)
            expected = normed(x.double(), norm)
            for module in (norms, reference):
                torch.testing.assert_close(module.rms_norm(x, norm).double(), expected, **close_in(dtype))
                for first, second in ((norm, then), (then, norm)):
                    to = torch.randn(rows, width, device=DEVICE).to(dtype)
                    total = to.double() + normed(x.double(), first)
                    after = module.add_normed(to, x, first, second)
                    torch.testing.assert_close(to.double(), total, **close_in(dtype))
                    torch.testing.assert_close(after.double(), normed(to.double(), second), **close_in(dtype))


@pytest.mark.parametrize(
    ("rows", "width", "columns", "rank"),
    [(1, 96, 1536, 32), (70, 20, 700, 5), (129, 33, 640, 0)]
    if INTERPRETED
    else [*((rows, 96, 5120, rank) for rank in (0, 20, 32) for rows in (1, 8, 17, 64, 128))],
)
@pytest.mark.usefixtures("dependent_launch", "poisoned")
def test_narrow_products(rows, width, columns, rank):
    dtype = DTYPES[0]
    x, weight = (torch.randn(n, columns, device=DEVICE).to(dtype) for n in (rows, width))
    down, up = torch.randn(rank, columns, device=DEVICE).to(dtype), torch.randn(width, rank, device=DEVICE).to(dtype)
    exact = x.double() @ weight.double().T + (x.double() @ down.double().T).to(dtype).double() @ up.double().T
    outs = [x.new_full((rows, width), torch.nan) for _ in range(2)]
    for out in outs:
        narrow_product(x, weight, down, up, out)
    assert_near(outs[0], exact, 1e-6 if INTERPRETED else 6e-3)
    assert torch.equal(*outs), "not deterministic"


def test_the_gate_of_gpt_oss():
    both = draw(3, 2 * 1100, scale=8)
    gate, up = (part.double() for part in both.view(3, 1100, 2).unbind(-1))
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    for module in (norms, reference):
        torch.testing.assert_close(module.clamped_glu(both, 1.702, 7.0).double(), expected, rtol=1e-5, atol=1e-5)


# --- updates ---


def noisy_norm(width, trained=True):
    norm = NoisyRMSNorm(torch.nn.Parameter(1 + 0.3 * draw(width), requires_grad=trained), EPS)
    norm.noise.copy_(0.1 * draw(width, seed=1))
    return norm


@on_gpu
@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 65), (1, 1, 3584), (1, 1200, 65), (1, 1001, 3584), (2, 3, 1536), (5, 8192)])
def test_norm(shape, dtype):
    norm, hidden = noisy_norm(shape[-1]), draw(*shape, dtype=dtype, scale=3, seed=2).requires_grad_()
    grad = draw(*shape, dtype=dtype, seed=3)
    out = norm(hidden)
    wide, weight = hidden.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = (weight + norm.noise.double()) * wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_rounded_once(out, exact)
    grads = torch.autograd.grad(out, (hidden, norm.weight), grad)
    assert [g.dtype for g in grads] == [dtype, torch.float32]
    for found, expected in zip(grads, torch.autograd.grad(exact, (wide, weight), grad.double()), strict=True):
        assert_rounded_once(found, expected)


@on_gpu
def test_a_frozen_weight_gets_no_gradient_and_the_input_the_same_one():
    grads = []
    for trained in (True, False):
        norm, hidden = noisy_norm(896, trained), draw(1, 700, 896, dtype=torch.bfloat16, seed=2).requires_grad_()
        norm(hidden).backward(draw(1, 700, 896, dtype=torch.bfloat16, seed=3))
        assert (norm.weight.grad is not None) == trained
        grads.append(hidden.grad)
    assert torch.equal(*grads)


@on_gpu
def test_a_norm_makes_no_float32_copy():
    norm, hidden = noisy_norm(3584, trained=False), draw(1, 4096, 3584, dtype=torch.bfloat16).requires_grad_()
    grad, size = torch.ones_like(hidden), hidden.nbytes
    norm(hidden).backward(grad)  # What is compiled or allocated once.
    hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm(hidden).backward(grad)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * size  # The output and the gradient, in 16 bits.


@dtypes
@pytest.mark.parametrize(
    "shape", [(1, 3), (70, 65), (5, 2048)] if INTERPRETED else [(1, 65), (1, 18944), (333, 4864), (6, 2048)]
)
@pytest.mark.parametrize("apart", [True, False])
def test_gate_and_up(shape, dtype, apart):
    """As two tensors, and side by side in one."""
    rows, width = shape
    gate, up = (draw(rows, width, dtype=dtype, scale=scale, seed=scale) for scale in (4, 1))
    inputs, grad = (gate, up) if apart else (torch.cat([gate, up], 1),), draw(rows, width, dtype=dtype, seed=3)
    wide = [part.double().requires_grad_() for part in (gate, up)]
    exact = wide[0] * wide[0].sigmoid() * wide[1]
    assert_rounded_once(norms.swiglu_forward(*inputs), exact)
    found = norms.swiglu_backward(grad, *inputs)
    assert {one.dtype for one in found} == {dtype}
    for one, expected in zip(
        found if apart else found[0].chunk(2, 1), torch.autograd.grad(exact, wide, grad.double()), strict=True
    ):
        assert_rounded_once(one, expected)


@on_gpu
def test_swiglu_of_large_gates_is_finite_and_keeps_gate_and_up_alone():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE, requires_grad=True)
    up, kept = torch.ones_like(gate).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = swiglu(gate, up)
    assert sorted(t.data_ptr() for t in kept) == sorted((gate.data_ptr(), up.data_ptr()))
    grads = torch.autograd.grad(out.sum(), (gate, up))
    torch.testing.assert_close(out.tolist(), [[0.0, 0.0, 0.0, 100.0, 1e4]])
    torch.testing.assert_close(grads[0].tolist(), [[0.0, 0.0, 0.5, 1.0, 1.0]])
    assert torch.equal(grads[1], out)


@on_gpu
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


def turned(x, cos, sin, weight=None):
    if weight is not None:
        x = x * weight / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


@dtypes
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "width"),
    [(5, 4, 2, 64), (3, 7, 1, 40), (1, 1, 1, 128)]
    if INTERPRETED
    else [(1, 28, 4, 128), (333, 32, 4, 128), (77, 40, 8, 64), (41, 5, 5, 80), (9, 1, 1, 16)],
)
def test_heads_are_normalised_and_rotated_in_both_directions(tokens, heads, kv_heads, width, with_norms, dtype):
    """The halves of cos and sin differ, so that a transpose which takes them for equal is seen."""
    roundings = 64 if INTERPRETED else 32 if with_norms else 8
    cos, sin = (draw(tokens, width, dtype=dtype, seed=seed) for seed in (0, 1))
    row = draw(tokens, heads + 2 * kv_heads, width, dtype=dtype, scale=3, seed=2)
    inputs = row[:, :heads], row[:, heads : heads + kv_heads]  # cut out of one projection
    weights = (draw(width, dtype=dtype, seed=3), draw(width, dtype=dtype, seed=4)) if with_norms else ()
    grads = [draw(*x.shape, dtype=dtype, seed=5) for x in inputs]
    found = norms.rotate(*inputs, cos, sin, weights, EPS)
    gradients = norms.rotate(*inputs, cos, sin, weights, EPS, grads)
    for n, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        assert found[n].dtype == dtype
        wide = x.double().requires_grad_()
        exact = turned(wide, cos.double(), sin.double(), weights[n].double() if with_norms else None)
        assert_rounded_once(found[n], exact, roundings)
        assert_rounded_once(gradients[n], torch.autograd.grad(exact, wide, grad.double())[0], roundings)


@on_gpu
@pytest.mark.parametrize("with_norms", [False, True])
def test_gradients_of_rotations_with_gaps(with_norms):
    """A transposed gradient, and one that is a single number; without norms cosines and sines alone are kept."""
    cos, sin = (draw(50, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    row = draw(50, (14 + 2 + 2) * 64, dtype=torch.bfloat16, seed=2).unflatten(1, (-1, 64))
    inputs = [part.detach().requires_grad_() for part in (row[:, :14], row[:, 14:16])]
    layers = [Qwen3RMSNorm(64, EPS).to(DEVICE).requires_grad_(False) for _ in inputs] if with_norms else []
    for seed, norm in enumerate(layers):
        norm.weight.copy_(draw(64, seed=seed))
    grads = draw(14, 50, 64, dtype=torch.bfloat16, seed=3).transpose(0, 1), draw(1, 1, 1, dtype=torch.bfloat16, seed=4)
    grads = grads[0], grads[1].expand(50, 2, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outs = rotate(*inputs, cos, sin, layers) if with_norms else rotate(*inputs, cos, sin)
    assert with_norms or sorted(t.data_ptr() for t in kept) == sorted((cos.data_ptr(), sin.data_ptr()))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    weights = [norm.weight.double() for norm in layers] or [None, None]
    exact = [turned(x, cos.double(), sin.double(), weight) for x, weight in zip(wide, weights, strict=True)]
    found = torch.autograd.grad(outs, inputs, grads)
    for one, other in zip(found, torch.autograd.grad(exact, wide, [grad.double() for grad in grads]), strict=True):
        assert_rounded_once(one, other, 8)


@on_gpu
def test_more_than_two_to_the_31_elements():
    tokens, heads = 2**31 // (64 * 128) + 1, 64
    query = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    key, ones = query[:, :1], torch.ones(tokens, 128, dtype=torch.bfloat16, device=DEVICE)
    query[-1] = 1
    out, _ = rotate(query, key, ones, ones)
    assert out[-1, :, :64].eq(0).all()
    assert out[-1, :, 64:].eq(2).all()
    assert not out[:-1].any()


@pytest.mark.parametrize("width", [40, 256])
def test_gradients_of_a_weighted_sum(width):
    y, weights, grad = draw(6 * 3, width), draw(6, 3, seed=1).abs(), draw(6, width, seed=2)
    wide = [tensor.double().requires_grad_() for tensor in (y, weights)]
    exact = (wide[0].view(6, 3, -1) * wide[1][..., None]).sum(1)
    expected = torch.autograd.grad(exact, wide, grad.double())
    for module in (experts, reference):
        found = module.combine_gradients(grad, y, weights)
        assert [one.shape for one in found] == [y.shape, weights.shape]
        for one, other in zip(found, expected, strict=True):
            assert_rounded_once(one, other, 64 if INTERPRETED else 8)
