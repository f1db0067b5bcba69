"""Mixtures' kernels against PyTorch and float64, in Triton's interpreter, which `test_interpreter.py` starts."""

from itertools import chain

import pytest
import torch
from torch import nn

from qerl.formats.codecs import dequantize, quantize
from qerl.formats.layouts import Words
from qerl.kernels import reference
from qerl.kernels.state import BLOCK_SIZES, GroupedLora, Groups
from qerl.kernels.triton import experts
from qerl.kernels.triton.experts import GroupedOperands, input_gradient, multiply
from qerl.models.experts import (
    PortableGroupedLinear,
    TorchGroupedLinear,
    grouped_product,
)
from qerl.models.linear import Lora, PackedLinear
from tests.conftest import in_nightly

EXPERTS, ROWS = 5, 40
#: Tokens of one block size after the other; expert 3 is never chosen.
TOKENS = (1, 12, 30, 70, 129, 330)


def chosen(tokens):
    """Two experts of each token, of which the second is skewed."""
    return torch.tensor([[t * 7 % 3, 4 if t % 5 else 1 + (t * 7 % 3 == 1)] for t in range(tokens)], dtype=torch.int32)


def operands_of(weights, columns, bias=False):
    """Operands, and the weights in float64 [EXPERTS, ROWS, columns]; each layer of 20 rows has a scale of its own."""
    dense = torch.randn(2 * EXPERTS, ROWS // 2, columns) * torch.rand(2 * EXPERTS, 1, 1)
    made, factors = dense.view(-1, columns), None
    if weights != "float32":
        packed = [quantize(layer, weights) for layer in dense]
        dense = torch.stack([dequantize(one, torch.float32) for one in packed])
        made = Words.pack(packed)
        factors = torch.tensor(made.factors).repeat_interleave(ROWS // 2)
    added = torch.randn(EXPERTS * ROWS) if bias else None
    return GroupedOperands(made, ROWS, factors, added), dense.double().view(EXPERTS, ROWS, columns)


@pytest.mark.parametrize(
    ("tokens", "count", "many"),
    [
        *((tokens, 2, EXPERTS) for tokens in TOKENS),
        *((700, 3, 5), (2048, 1, 3), (2049, 1, 1)),
        *in_nightly((1500, 2, 128)),
    ],
)
def test_groups_are_those_of_the_reference(tokens, count, many):
    """Some experts have no pairs, and others more than a program reads at a time; over 2,048 take two launches."""
    scores = torch.randn(tokens, many) - 2 * torch.arange(many).float()
    numbers = chosen(tokens) if tokens in TOKENS else scores.topk(count).indices.int()
    found, expected = experts.group(numbers, many), reference.group(numbers, many)
    assert (found.count, found.chosen) == (expected.count, expected.chosen)
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.pairs[found.experts >= 0], expected.pairs[expected.experts >= 0])


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [
        *(("nvfp4", 12), ("nvfp4", 129), ("float32", 70), ("mxfp4", 1), ("mxfp4", 30)),
        *in_nightly(("nvfp4", 1), ("nvfp4", 30), ("nvfp4", 70), ("float32", 12)),
    ],
)
@torch.no_grad()
def test_products_and_gradients_of_pairs(weights, tokens):
    columns = 192 if tokens == 12 else 256  # the former is no multiple of a block
    operands, exact = operands_of(weights, columns, bias=True)
    numbers = chosen(tokens)
    groups, owner = reference.group(numbers, EXPERTS), numbers.flatten()
    token = torch.arange(tokens).repeat_interleave(2)
    for x in (torch.randn(tokens, columns), torch.randn(2 * tokens, columns)):
        read = x[token] if len(x) == tokens else x
        y = torch.einsum("pk,pnk->pn", read.double(), exact[owner]) + operands.bias.view(EXPERTS, ROWS)[owner]
        for silu in (False, True):
            out = torch.full((2 * tokens, ROWS // (1 + silu)), torch.nan)
            multiply(operands, x, groups, out, silu)
            gate, up = y.chunk(2, 1)
            assert_close(out, torch.nn.functional.silu(gate) * up if silu else y)
    for grad in (torch.randn(tokens, ROWS), torch.randn(2 * tokens, ROWS)):
        out = torch.full((2 * tokens, columns), torch.nan)
        input_gradient(operands, grad, groups, out)
        read = grad[token] if len(grad) == tokens else grad
        assert_close(out, torch.einsum("pn,pnk->pk", read.double(), exact[owner]))


@pytest.mark.parametrize(("weights", "size"), [*(("nvfp4", size) for size in BLOCK_SIZES), ("float32", BLOCK_SIZES[1])])
@torch.no_grad()
def test_a_block_may_have_any_number_of_its_pairs(size, weights):
    """Blocks of 1, 2, 3 and so on pairs, of which those that don't exist are written by no program."""
    counts = range(1, size + 1) if size < 64 else (1, size // 2, size - 1, size)
    operands, exact = operands_of(weights, 128)
    owners = torch.tensor([number % EXPERTS for number, _ in enumerate(counts)])
    of_pairs, pairs = owners.repeat_interleave(torch.tensor(counts)), sum(counts)
    table = torch.full((len(counts), size), pairs, dtype=torch.int32)
    places = torch.randperm(pairs, dtype=torch.int32).split(list(counts))
    for row, place in zip(table, places, strict=True):
        row[: len(place)] = place
    x, out = torch.randn(pairs, 128), torch.full((pairs + 1, ROWS), torch.nan)
    multiply(operands, x, Groups(table, owners.int(), pairs, 1), out[:pairs])
    expected = torch.einsum("pk,pnk->pn", x[torch.cat(places)].double(), exact[of_pairs])
    assert_close(out[torch.cat(places)], expected)
    assert out[pairs].isnan().all()


@pytest.mark.parametrize(
    ("weights", "tokens", "rank"), [("float32", 3, 80), ("nvfp4", 12, 3), ("nvfp4", 12, 80), ("mxfp4", 129, 32)]
)
@torch.no_grad()
def test_an_adapter_is_added_before_the_activation(weights, tokens, rank):
    """By A x of pairs, which a dense product of few rows computes, also of columns that end within a block."""
    columns = 208 if tokens == 12 else 256
    operands, exact = operands_of(weights, columns, bias=weights == "mxfp4")
    numbers = chosen(tokens)
    groups, owner = reference.group(numbers, EXPERTS), numbers.flatten()
    x, down = torch.randn(tokens, columns), torch.randn(EXPERTS, rank, columns) / 16
    up = torch.randn(EXPERTS, ROWS, rank)
    read = x[torch.arange(tokens).repeat_interleave(2)].double()
    shrunk, exactly = torch.full((2 * tokens, rank), torch.nan), torch.einsum("pk,prk->pr", read, down.double()[owner])
    experts.dense_product(down, x, groups, shrunk)
    assert_close(shrunk, exactly)
    y = torch.einsum("pk,pnk->pn", read, exact[owner]) + torch.einsum("pr,pnr->pn", exactly, up.double()[owner])
    if operands.bias is not None:
        y += operands.bias.view(EXPERTS, ROWS)[owner]
    gate, above = y.chunk(2, 1)
    for silu, expected in ((False, y), (True, torch.nn.functional.silu(gate) * above)):
        out = torch.full((2 * tokens, ROWS // (1 + silu)), torch.nan)
        multiply(operands, x, groups, out, silu, GroupedLora(shrunk, up))
        assert_close(out, expected)


@pytest.mark.parametrize(("rank", "tokens"), [(3, 1), (32, 12), (80, 30), (3, 70), (80, 129)])
@torch.no_grad()
def test_gradients_of_adapters_are_sums_over_the_pairs_of_an_expert(tokens, rank):
    """A reads x by tokens, and B reads A x by pairs; an expert without pairs has zeros."""
    numbers = chosen(tokens)
    groups, owner = reference.group(numbers, EXPERTS), numbers.flatten()
    token = torch.arange(tokens).repeat_interleave(2)
    for rows, columns, by_token in ((rank, 72, True), (72, rank, False)):
        grad, x = torch.randn(2 * tokens, rows), torch.randn(tokens if by_token else 2 * tokens, columns)
        found = experts.dense_weight_gradient(grad, x, groups, EXPERTS)
        products = torch.einsum("pn,pk->pnk", grad.double(), (x[token] if by_token else x).double())
        assert_close(found, torch.zeros(EXPERTS, rows, columns).double().index_add_(0, owner, products))
        assert_close(reference.dense_weight_gradient(grad, x, groups, EXPERTS), found.double())
        assert not found[3].any()
        weights, out = torch.randn(EXPERTS, rows, columns), torch.randn(2 * tokens, columns)
        before = out.double()
        experts.dense_input_gradient(weights, grad, groups, out, add=True)
        assert_close(out, before + torch.einsum("pn,pnk->pk", grad.double(), weights.double()[owner]))


@pytest.mark.parametrize("weights", ["float32", "nvfp4"])
@pytest.mark.parametrize(("ranks", "by_token"), [((), True), ((3, 5), True), ((3, 5), False)])
def test_layers_of_experts_and_their_gradients_are_those_of_autograd(weights, ranks, by_token):
    """Two layers, also with an adapter each, against float64. The layers keep their weights, in one copy."""
    torch.manual_seed(2)
    experts = [[layer_of(weights, 16, 192), layer_of(weights, 24, 192)] for _ in range(EXPERTS)]
    x = torch.randn(6 if by_token else 12, 192, requires_grad=True)
    downs = [torch.randn(EXPERTS, rank, 192, requires_grad=True) for rank in ranks]
    ups = [torch.randn(EXPERTS, rows, rank, requires_grad=True) for rows, rank in zip((16, 24), ranks, strict=False)]
    numbers, grads = chosen(6), torch.randn(12, 40)
    dense = [dense_of(two) for two in experts]
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *downs, *ups)]
    changed = [torch.cat(two).double() for two in dense]
    if ranks:
        changed = [
            torch.cat([w + 0.5 * up[e] @ down[e] for w, down, up in zip(two, wide[1:3], wide[3:], strict=True)])
            for e, two in enumerate(dense)
        ]
    bias = torch.stack([torch.cat([layer.bias for layer in two]) for two in experts]).double()
    owner = numbers.flatten()
    read = wide[0].repeat_interleave(2, 0) if by_token else wide[0]
    exact = torch.einsum("pk,pnk->pn", read, torch.stack(changed)[owner]) + bias[owner]
    expected = torch.autograd.grad((exact * grads).sum(), wide)
    for linear in (TorchGroupedLinear(experts), PortableGroupedLinear(experts, torch.float32)):
        loras = [Lora(down, up, 0.5) for down, up in zip(downs, ups, strict=True)]
        out = grouped_product(x, reference.group(numbers, EXPERTS), linear, loras)
        assert_close(out, exact)
        for found, one in zip(torch.autograd.grad((out * grads).sum(), [x, *downs, *ups]), expected, strict=True):
            assert_close(found, one)
    assert all(map(torch.equal, chain(*map(dense_of, experts)), chain(*dense)))


def dense_of(layers):
    return [one.dense_weight(torch.float32) if isinstance(one, PackedLinear) else one.weight for one in layers]


def layer_of(weights, rows, columns):
    layer = nn.Linear(columns, rows).requires_grad_(False)
    return layer if weights == "float32" else PackedLinear.from_packed(quantize(layer.weight.data, weights), layer.bias)


def assert_close(out, expected):
    assert (out.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("biased", [False, True])
def test_scores_are_those_of_float64(biased):
    """Some tokens are computed by one launch, and more of them by cuBLAS."""
    for tokens in (1, 3, 9, experts.MOST_SCORED + 1):
        x, weight, bias = torch.randn(tokens, 72), torch.randn(EXPERTS, 72), torch.randn(EXPERTS) if biased else None
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        for one in (experts, reference):
            assert_close(one.scores(x, weight, bias), expected)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_route_is_the_references(normalised):
    scores = torch.randn(9, 12) * 3
    for chosen_experts in (1, 3, 8):
        found, weights = experts.route(scores, chosen_experts, normalised)
        numbers, expected = reference.route(scores, chosen_experts, normalised)
        assert torch.equal(found, numbers)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)


def test_of_equal_scores_the_first_wins():
    """By a stable sort, which the reference hasn't; a negative zero equals zero."""
    scores = torch.randint(-1, 2, (13, 20)).float()
    scores = torch.where((scores == 0) & (torch.rand(scores.shape) < 0.5), -0.0, scores)
    assert torch.equal(experts.route(scores, 8, True)[0], (-scores).sort(dim=1, stable=True)[1][:, :8].int())


@pytest.mark.parametrize("residual", [False, True])
def test_outputs_of_experts_are_added_by_their_weights(residual):
    y, weights, before = torch.randn(6, 1100), torch.rand(3, 2), torch.randn(3, 1100)
    found, expected = before.clone(), before.clone()
    experts.combine(y, weights, found, residual)
    reference.combine(y, weights, expected, residual)
    torch.testing.assert_close(found, expected)
    exact = weights[:, :1] * y[::2] + weights[:, 1:] * y[1::2] + before * residual
    torch.testing.assert_close(expected, exact)
