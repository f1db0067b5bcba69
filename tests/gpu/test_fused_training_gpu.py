"""Norm and activation of the update by their kernels, against autograd of the plain formulas in float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qerl.models.blocks import NoisyRMSNorm
from qerl.models.experts import swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
EPS = 1e-6
#: Half the distance of neighbours near 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
DTYPES = list(ROUNDING)


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def assert_rounded_once(found, exact):
    """Errors are those of the dtype's rounding and of a few in float32: of sums, fast roots and exponentials."""
    exact = exact.detach()
    few = 32 * ROUNDING[torch.float32]
    bound = (ROUNDING[found.dtype] + few) * exact.abs() + few * exact.square().mean().sqrt()
    errors = (found.detach().double() - exact).abs() / bound
    assert errors.max() <= 1, f"{errors.max():.3g} of the bound"


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


def test_the_gradient_of_a_weight_is_the_same_at_each_call():
    norm, hidden = noisy_norm(1536), draw(1, 5000, 1536, dtype=torch.bfloat16, seed=2)
    grad = draw(1, 5000, 1536, dtype=torch.bfloat16, seed=3)
    first, *others = (torch.autograd.grad(norm(hidden), norm.weight, grad)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


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
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE, requires_grad=True)
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


def test_recomputation_gives_the_same_gradients():
    norm, hidden = noisy_norm(640), draw(1, 50, 640, dtype=torch.bfloat16).requires_grad_()
    again = lambda x: swiglu(norm(x), x)  # noqa: E731
    found, expected = (
        torch.autograd.grad(out.square().sum(), (hidden, norm.weight))
        for out in (checkpoint(again, hidden, use_reentrant=False), again(hidden))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
