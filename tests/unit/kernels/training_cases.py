"""Kernels of updates against float64 and PyTorch, in Triton's interpreter, which `test_interpreter.py` starts."""

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.triton import experts, norms
from qerl.kernels.triton.norms import rotate

EPS = 1e-6


def near(found, exact):
    """Errors are those of a few roundings of float32."""
    bound = 64 * 2.0**-24 * (exact.abs() + exact.square().mean().sqrt())
    return bool(((found.double() - exact).abs() <= bound).all())


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def normed(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "width"), [(5, 4, 2, 64), (3, 7, 1, 40), (1, 1, 1, 128)])
def test_heads_are_normalised_and_rotated_in_both_directions(tokens, heads, kv_heads, width, with_norms):
    """The halves of cos and sin differ, and queries and keys are cut out of one projection."""
    torch.manual_seed(0)
    row = 3 * torch.randn(tokens, heads + 2 * kv_heads, width)
    query, key = row[:, :heads], row[:, heads : heads + kv_heads]
    weights = (torch.randn(width), 1 + torch.rand(width)) if with_norms else ()
    cos, sin, of_query, of_key = (
        torch.randn(tokens, *rest) for rest in ((width,), (width,), (heads, width), (kv_heads, width))
    )
    found = rotate(query, key, cos, sin, weights, EPS)
    gradients = rotate(query, key, cos, sin, weights, EPS, (of_query, of_key))
    for n, (x, grad) in enumerate(((query, of_query), (key, of_key))):
        wide = x.double().requires_grad_()
        exact = turned(normed(wide, weights[n].double()) if with_norms else wide, cos.double(), sin.double())
        assert near(found[n], exact.detach())
        assert near(gradients[n], torch.autograd.grad(exact, wide, grad.double())[0])


@pytest.mark.parametrize("shape", [(1, 3), (70, 65), (5, 2048)])
def test_gate_and_up_side_by_side(shape):
    torch.manual_seed(1)
    rows, width = shape
    both, grad = 3 * torch.randn(rows, 2 * width), torch.randn(rows, width)
    wide = both.double().requires_grad_()
    gate, up = wide.chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * up
    assert near(norms.swiglu_forward(both), exact.detach())
    assert near(norms.swiglu_backward(grad, both)[0], torch.autograd.grad(exact, wide, grad.double())[0])


@pytest.mark.parametrize("width", [40, 256])
def test_gradients_of_a_weighted_sum(width):
    torch.manual_seed(2)
    y, weights, grad = torch.randn(6 * 3, width), torch.rand(6, 3), torch.randn(6, width)
    wide = [tensor.double().requires_grad_() for tensor in (y, weights)]
    exact = (wide[0].view(6, 3, -1) * wide[1][..., None]).sum(1)
    expected = torch.autograd.grad(exact, wide, grad.double())
    for found in (experts.combine_gradients(grad, y, weights), reference.combine_gradients(grad, y, weights)):
        assert [one.shape for one in found] == [y.shape, weights.shape]
        assert all(map(near, found, expected))
