"""Tiled log-probabilities against log_softmax of all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qerl.models import logprobs as linear_logprobs

#: Tiles that fit the sizes and tiles that don't.
TILES = [(1024, 16384), (4, 8), (5, 7), (3, 40), (12, 1)]


@pytest.fixture(params=TILES)
def tiles(request, monkeypatch):
    rows, columns = request.param
    monkeypatch.setattr(linear_logprobs, "ROWS", rows)
    monkeypatch.setattr(linear_logprobs, "COLUMNS", columns)


def case(dtype=torch.float64, rows=12, width=16, vocabulary=40, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, head = (scale * draw(rows, width)).to(dtype), draw(vocabulary, width).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    return hidden.requires_grad_(), head.requires_grad_(), targets, draw(rows).to(dtype)


def expected(hidden, head, targets, temperature):
    logprobs = torch.log_softmax(hidden @ head.T / temperature, -1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_values_and_gradients_are_those_of_log_softmax(tiles, dtype, tolerance, temperature):
    hidden, head, targets, weights = case(dtype)
    found = linear_logprobs.logprobs_and_entropy(hidden, head, targets, temperature)
    reference = expected(hidden, head, targets, temperature)
    assert found[0].dtype == found[1].dtype == dtype
    for ours, theirs in zip(found, reference, strict=True):
        assert relative(ours, theirs) < tolerance
    losses = {
        "log-probabilities": lambda values: (values[0] * weights).sum(),
        "entropies": lambda values: (values[1] * weights.flip(0)).sum(),
        "both": lambda values: (values[0] * weights).sum() + (values[1] * weights.flip(0)).sum(),
    }
    for name, loss in losses.items():
        ours, theirs = (
            torch.autograd.grad(loss(values), (hidden, head), retain_graph=True) for values in (found, reference)
        )
        # An entropy's gradient has the product p (log p + H), whose sum cancels: three roundings instead of one.
        most = tolerance if name == "log-probabilities" else 3 * tolerance
        for a, b in zip(ours, theirs, strict=True):
            assert relative(a, b) < most, name


@pytest.mark.parametrize("cap", [None, linear_logprobs.SoftCap(3.0, 0.25)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_and_a_cap_are_those_of_autograd(tiles, cap, frozen):
    hidden, head, targets, weights = case()
    bias = torch.linspace(-1, 1, len(head), dtype=torch.float64, requires_grad=not frozen)
    leaves = (hidden, head) if frozen else (hidden, head, bias)
    logits = hidden @ head.T + bias
    if cap is not None:
        logits = 3.0 * (0.25 * logits).tanh()
    logprobs = torch.log_softmax(logits / 0.7, -1)
    reference = logprobs[torch.arange(12), targets]
    found, entropy = linear_logprobs.logprobs_and_entropy(hidden, head, targets, 0.7, bias=bias, cap=cap)
    assert relative(found, reference) < 1e-13
    assert relative(entropy, -(logprobs.exp() * logprobs).sum(-1)) < 1e-13
    spread = -(logprobs.exp() * logprobs).sum(-1)
    both = ((found, entropy), (reference, spread))
    ours, theirs = (torch.autograd.grad((one * weights + other * weights).sum(), leaves) for one, other in both)
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_flat_and_peaked_distributions_stay_finite(tiles, scale):
    """exp of the largest logit, over 1000, is infinite in float64 too."""
    hidden, head, targets, _ = case(scale=scale)
    found, reference = linear_logprobs.logprobs_and_entropy(hidden, head, targets), expected(hidden, head, targets, 1.0)
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert torch.isfinite(torch.autograd.grad(found[0].sum(), hidden)[0]).all()


def test_bfloat16_products_give_float32_results(tiles):
    hidden, head, targets, _ = case(torch.bfloat16)
    logprobs, entropy = linear_logprobs.logprobs_and_entropy(hidden, head, targets)
    rounded = (hidden @ head.T).double()
    reference = torch.log_softmax(rounded, -1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    chosen = reference[torch.arange(12), targets]
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(logprobs.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(expected(wide, head.double(), targets, 1.0)[0].sum(), wide)
    assert found.dtype == torch.bfloat16
    assert relative(found.double(), exact) < 0.02


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operator returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.size = max([self.size, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("of_head", [False, True])
def test_no_tensor_is_larger_than_a_tile_or_its_arguments(monkeypatch, of_head):
    monkeypatch.setattr(linear_logprobs, "ROWS", 16)
    monkeypatch.setattr(linear_logprobs, "COLUMNS", 32)
    hidden, head, targets, _ = case(torch.float32, rows=96, width=4, vocabulary=160)
    head.requires_grad_(of_head)
    with Largest() as largest:
        linear_logprobs.logprobs_and_entropy(hidden, head, targets)[0].sum().backward()
    assert largest.size <= max(16 * 32, hidden.numel(), head.numel())
    assert (head.grad is not None) == of_head


def test_hidden_states_and_two_numbers_a_row_are_kept_for_the_backward_pass():
    hidden, head, targets, _ = case(torch.float32, rows=96, width=4, vocabulary=160)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear_logprobs.logprobs_and_entropy(hidden, head, targets)
    assert sorted(kept) == sorted([hidden.shape, head.shape, *[targets.shape] * 3])
