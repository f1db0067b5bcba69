"""Kernels of mixtures against float64, on a GPU at the widths of Qwen3-30B-A3B with fewer experts."""

from itertools import product

import pytest
import torch
from torch import nn

from qerl.formats.codecs import dequantize, quantize
from qerl.formats.layouts import Words
from qerl.kernels import reference
from qerl.kernels.state import BLOCK_SIZES, Groups, block_size, captured
from qerl.kernels.triton import experts
from qerl.kernels.triton.experts import GroupedOperands, multiply
from qerl.models.experts import GroupedAdapters, PortableGroupedLinear, TorchGroupedLinear, grouped, grouped_product
from qerl.models.linear import Lora, PackedLinear
from tests.conftest import in_nightly
from tests.gpu.exact import DEVICE, DTYPES, INTERPRETED, assert_near

DTYPE, DENSE = (torch.float32, "float32") if INTERPRETED else (torch.bfloat16, "bf16")
EXPERTS, CHOSEN, HIDDEN, WIDE = (5, 2, 256, 20) if INTERPRETED else (16, 4, 2048, 768)
#: Tokens of every size of block; the last have more pairs than one launch groups.
TOKENS = (1, 12, 30, 70, 129, 330) if INTERPRETED else (1, 8, 30, 50, 100, 200, 1000, 2000)


def route_of(tokens):
    """The experts of tokens; the third is never chosen, and the fourth often."""
    scores = torch.randn(tokens, EXPERTS, device=DEVICE)
    scores[:, 3], scores[:, 4] = -torch.inf, scores[:, 4] + 1
    return reference.route(scores, CHOSEN, True)[0]


def layer_of(weights, rows, columns):
    """A layer, and its weight and bias in float64; on a GPU without a bias."""
    dense = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) * columns**-0.5
    bias = nn.Parameter(torch.randn(rows), requires_grad=False) if INTERPRETED else None
    exact_bias = torch.zeros(rows, device=DEVICE) if bias is None else bias
    if weights == DENSE:
        made = nn.Linear(columns, rows, bias=False, device="meta")
        made.weight, made.bias = nn.Parameter(dense, requires_grad=False), bias
        return made, dense.double(), exact_bias.double()
    packed = quantize(dense, weights)
    return PackedLinear.from_packed(packed, bias), dequantize(packed, torch.float32).double(), exact_bias.double()


#: Weights, ranks of gate's and up's adapters, columns, and numbers of tokens with whether x has rows by token.
ALL = [(tokens, True) for tokens in TOKENS]
LAYERS = (
    [
        ("float32", (), 256, [(70, True)]),
        ("nvfp4", (), 192, [(12, True), (12, False)]),  # columns that end within a block
        *(("nvfp4", (3, 80), 208, [(12, True)]), ("float32", (80, 80), 256, [(3, True)])),
        *(("mxfp4", (), 256, [(1, True), (30, False)]), ("mxfp4", (32, 32), 256, [(129, False)])),
        *in_nightly(("nvfp4", (), 256, ALL), ("float32", (3, 5), 192, ALL), ("mxfp4", (3, 80), 256, ALL)),
    ]
    if INTERPRETED
    else [
        *((weights, (), HIDDEN, ALL) for weights in ("bf16", "nvfp4", "mxfp4")),
        *(
            (weights, (rank, rank), HIDDEN, [(1, True), (1000, True), (2000, True), (13, False), (2000, False)])
            for weights, rank in product(("bf16", "nvfp4", "mxfp4"), (16, 32))
        ),
    ]
)


@pytest.mark.parametrize(("weights", "ranks", "columns", "sizes"), LAYERS, ids=str)
def test_products_and_gradients_are_near_those_of_float64(weights, ranks, columns, sizes):
    """Gate and up read x by tokens, down reads it by pairs; the sampler's product has the same adapter before SiLU.

    The layers keep their weights, in one copy.
    """
    torch.manual_seed(sum(ranks))
    made = [[layer_of(weights, WIDE, columns) for _ in range(2)] for _ in range(EXPERTS)]
    layers = [[layer for layer, _, _ in two] for two in made]
    exact, bias = (torch.stack([torch.cat([one[n] for one in two]) for two in made]) for n in (1, 2))
    linears = [grouped(layers, DTYPE)]
    assert type(linears[0]) is (TorchGroupedLinear if INTERPRETED else PortableGroupedLinear)
    if INTERPRETED:
        linears.append(PortableGroupedLinear(layers, DTYPE))
    downs = [(torch.randn(EXPERTS, rank, columns, device=DEVICE) / columns**0.5).requires_grad_() for rank in ranks]
    ups = [torch.randn(EXPERTS, WIDE, rank, device=DEVICE).requires_grad_() for rank in ranks]
    loras = [Lora(down, up, 0.5) for down, up in zip(downs, ups, strict=True)]
    limit, gated_limit = (1e-5, 1e-5) if INTERPRETED else (0.01, 0.015) if ranks else (0.006, 0.006)
    for tokens, by_token in sizes:
        numbers = route_of(tokens)
        groups, owner = experts.group(numbers, EXPERTS), numbers.flatten().long()
        rows = tokens if by_token else tokens * CHOSEN
        x = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE, requires_grad=True)
        grads = torch.randn(len(owner), 2 * WIDE, device=DEVICE, dtype=DTYPE)
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, *downs, *ups)]
        whole = by_experts(wide, exact, bias, owner, CHOSEN if by_token else 1)
        expected = [whole, *torch.autograd.grad(whole, wide, grads.double())]
        gate, above = whole.detach().chunk(2, 1)
        for linear in linears:
            out = grouped_product(x, groups, linear, loras)
            for one, other in zip([out, *torch.autograd.grad(out, [x, *downs, *ups], grads)], expected, strict=True):
                assert_near(one, other, limit)
            silu, added = out.new_full((len(out), WIDE), torch.nan), None
            if ranks:
                added = GroupedAdapters(loras, linear.dense, DTYPE)(x.detach(), groups)
            linear(x.detach(), groups, silu, True, added)
            assert_near(silu, nn.functional.silu(gate) * above, gated_limit)
    for layer, weight, _ in (one for two in made for one in two):
        kept = layer.dense_weight(torch.float32) if isinstance(layer, PackedLinear) else layer.weight
        assert torch.equal(kept.double(), weight)


def by_experts(tensors, exact, bias, owner, fan):
    """Outputs of x, and of two A and two B if there are adapters, in float64, one expert after the other."""
    x, *adapters = tensors
    downs, ups = adapters[:2], adapters[2:]
    read, out = x.repeat_interleave(fan, 0), x.new_zeros(len(owner), 2 * WIDE)
    for number in owner.unique().tolist():
        (pair,) = torch.where(owner == number)
        result = read[pair] @ exact[number].T + bias[number]
        if adapters:
            low = [read[pair] @ a[number].T @ b[number].T for a, b in zip(downs, ups, strict=True)]
            result = result + 0.5 * torch.cat(low, 1)
        out = out.index_put((pair,), result)
    return out


@pytest.mark.skipif(not INTERPRETED, reason="in float32, on small shapes")
@pytest.mark.parametrize(("weights", "size"), [*(("nvfp4", size) for size in BLOCK_SIZES), ("float32", BLOCK_SIZES[1])])
@torch.no_grad()
def test_a_block_may_have_any_number_of_its_pairs(size, weights):
    """Blocks of 1, 2, 3 and so on pairs, of which those that don't exist are written by no program."""
    counts = range(1, size + 1) if size < 64 else (1, size // 2, size - 1, size)
    dense, made, factors = torch.randn(EXPERTS, 40, 128), None, None
    if weights == "float32":
        made = dense.flatten(0, 1)
    else:
        packed = [quantize(one, weights) for one in dense]
        dense, made = torch.stack([dequantize(one, torch.float32) for one in packed]), Words.pack(packed)
        factors = torch.tensor(made.factors).repeat_interleave(40)
    owners = torch.tensor([number % EXPERTS for number, _ in enumerate(counts)])
    of_pairs, pairs = owners.repeat_interleave(torch.tensor(counts)), sum(counts)
    table = torch.full((len(counts), size), pairs, dtype=torch.int32)
    places = torch.randperm(pairs, dtype=torch.int32).split(list(counts))
    for row, place in zip(table, places, strict=True):
        row[: len(place)] = place
    x, out = torch.randn(pairs, 128), torch.full((pairs + 1, 40), torch.nan)
    multiply(GroupedOperands(made, 40, factors, None), x, Groups(table, owners.int(), pairs, 1), out[:pairs])
    expected = torch.einsum("pk,pnk->pn", x[torch.cat(places)].double(), dense.double()[of_pairs])
    assert_near(out[torch.cat(places)], expected, 1e-5)
    assert out[pairs].isnan().all()


def test_scores_are_near_those_of_float64():
    """Of few tokens by one launch, and of more by cuBLAS."""
    many, width = (EXPERTS, 72) if INTERPRETED else (128, HIDDEN)
    weight, bias = torch.randn(many, width, device=DEVICE) / width**0.5, torch.randn(many, device=DEVICE)
    for tokens, one in product((1, 6, 32, 100, experts.MOST_SCORED + 1), (None, bias)):
        x = torch.randn(tokens, width, device=DEVICE).to(DTYPES[0])
        expected = x.double() @ weight.double().T + (0 if one is None else one.double())
        for module in (experts, reference):
            assert_near(module.scores(x, weight, one), expected, 1e-6)


@pytest.mark.parametrize(
    ("tokens", "chosen", "many"),
    [*((tokens, 2, EXPERTS) for tokens in TOKENS), (700, 3, 5), (2048, 1, 3), (2049, 1, 1), *in_nightly((1500, 2, 128))]
    if INTERPRETED
    else [*((tokens, 8, 128) for tokens in TOKENS), (700, 3, 5)],
)
def test_routes_groups_and_sums_are_those_of_pytorch(tokens, chosen, many):
    """Some experts have no pairs, and others more than a program reads at a time; over 2,048 take two launches."""
    scores = 3 * torch.randn(tokens, many, device=DEVICE) - 2 * torch.arange(many, device=DEVICE) / many
    numbers, weights = reference.route(scores, chosen, True)
    few = tokens < 50 or not INTERPRETED  # a program has one token, so that more are more of the same
    for normalised in (True, False) if few else ():
        found, expected = (module.route(scores, chosen, normalised) for module in (experts, reference))
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)
    groups, exact = experts.group(numbers, many), reference.group(numbers, many)
    assert (groups.count, groups.chosen) == (exact.count, exact.chosen)
    assert torch.equal(groups.experts, exact.experts)
    assert torch.equal(groups.pairs[exact.experts >= 0], exact.pairs[exact.experts >= 0])
    if few:
        y, before = torch.randn(tokens * chosen, 1100, device=DEVICE), torch.randn(tokens, 1100, device=DEVICE)
        for module, residual in product((experts, reference), (False, True)):
            out = before.clone()
            module.combine(y, weights, out, residual)
            torch.testing.assert_close(
                out, (y.view(tokens, chosen, -1) * weights[..., None]).sum(1) + residual * before
            )


def test_tokens_have_every_size_of_block():
    assert {block_size(tokens, CHOSEN, EXPERTS) for tokens in TOKENS} == {*BLOCK_SIZES}


def test_of_equal_scores_the_first_wins():
    """By a stable sort, which the reference hasn't; a negative zero equals zero."""
    scores = torch.randint(-1, 2, (13, 20), device=DEVICE).float()
    scores = torch.where((scores == 0) & (torch.rand(scores.shape, device=DEVICE) < 0.5), -0.0, scores)
    assert torch.equal(experts.route(scores, 8, True)[0], (-scores).sort(dim=1, stable=True)[1][:, :8].int())


@pytest.mark.skipif(INTERPRETED, reason="a CUDA graph")
def test_a_captured_graph_follows_another_choice_of_experts_and_the_adapters_that_were_synced_last():
    torch.manual_seed(2)
    linear = grouped([[layer_of("nvfp4", WIDE, HIDDEN)[0]] for _ in range(EXPERTS)], torch.bfloat16)
    down = torch.randn(EXPERTS, 16, HIDDEN, device=DEVICE)
    up = torch.zeros(EXPERTS, WIDE, 16, device=DEVICE)
    adapters = GroupedAdapters([Lora(down, up, 2.0)], linear.dense, torch.bfloat16)
    x, scores = torch.randn(300, HIDDEN, device=DEVICE).bfloat16(), torch.randn(300, EXPERTS, device=DEVICE)
    out = torch.empty(300 * 8, WIDE, device=DEVICE, dtype=torch.bfloat16)

    def compute() -> None:
        numbers, _ = experts.route(scores, 8, True)
        groups = experts.group(numbers, EXPERTS)
        linear(x, groups, out, lora=adapters(x, groups))

    results = []
    with torch.no_grad():
        replay, sync = captured(compute), captured(adapters.sync)
        for choice in (torch.randn(300, EXPERTS, device=DEVICE), torch.arange(EXPERTS, device=DEVICE).expand(300, -1)):
            scores.copy_(choice)
            for _ in range(2):
                sync()
                replay()
                results.append(out.clone())
                compute()
                assert torch.equal(out, results[-1])
                up.normal_()
    assert not torch.equal(results[0], results[1])
