"""Kernels of mixtures on a GPU in bfloat16 against float64, at the widths of Qwen3-30B-A3B with fewer experts."""

import pytest
import torch
from torch import nn

from qerl.formats.codecs import dequantize, quantize
from qerl.kernels import reference
from qerl.kernels.operations import operations
from qerl.kernels.state import BLOCK_SIZES, block_size, captured
from qerl.models.experts import (
    GroupedAdapters,
    PortableGroupedLinear,
    grouped,
    grouped_product,
    weighted_sum,
)
from qerl.models.linear import Lora, PackedLinear

DEVICE = torch.device("cuda")
EXPERTS, CHOSEN, HIDDEN, WIDE = 16, 4, 2048, 768
#: Tokens of every size of block; 1,000 have more pairs than one launch groups.
TOKENS = (1, 8, 30, 50, 100, 200, 1000, 2000)


def layer(weights, rows, columns):
    """A layer, and its weight in float64."""
    dense = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) * columns**-0.5
    if weights == "bf16":
        made = nn.Linear(columns, rows, bias=False, device="meta")
        made.weight = nn.Parameter(dense, requires_grad=False)
        return made, dense.double()
    packed = quantize(dense, weights)
    return PackedLinear.from_packed(packed), dequantize(packed, torch.float32).double()


@pytest.mark.parametrize("rank", [0, 16, 32])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "mxfp4"])
def test_products_and_gradients_are_near_those_of_float64(weights, rank):
    """Gate and up read x by tokens, down reads it by pairs; the sampler's product has the same adapter before SiLU."""
    torch.manual_seed(rank)
    pairs = [[layer(weights, WIDE, HIDDEN) for _ in range(2)] for _ in range(EXPERTS)]
    linear = grouped([[one for one, _ in two] for two in pairs], torch.bfloat16)
    assert type(linear) is PortableGroupedLinear
    exact = torch.stack([torch.cat([weight for _, weight in two]) for two in pairs])
    parts = range(2 if rank else 0)
    downs = [(torch.randn(EXPERTS, rank, HIDDEN, device=DEVICE) / HIDDEN**0.5).requires_grad_() for _ in parts]
    ups = [torch.randn(EXPERTS, WIDE, rank, device=DEVICE).requires_grad_() for _ in parts]
    loras = [Lora(down, up, 0.5) for down, up in zip(downs, ups, strict=True)]
    of_tokens = [(tokens, True) for tokens in TOKENS]
    for tokens, by_token in [*of_tokens[:1], *of_tokens[-2:], (13, False), (2000, False)] if rank else of_tokens:
        numbers, _ = operations(DEVICE).route(torch.randn(tokens, EXPERTS, device=DEVICE), CHOSEN, True)
        groups, owner = operations(DEVICE).group(numbers, EXPERTS), numbers.flatten().long()
        rows = tokens if by_token else tokens * CHOSEN
        x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        out = grouped_product(x, groups, linear, loras)
        grads = torch.randn(out.shape, device=DEVICE, dtype=torch.bfloat16)
        found = [out, *torch.autograd.grad(out, [x, *downs, *ups], grads)]
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, *downs, *ups)]
        whole = by_experts(wide, exact, owner, CHOSEN if by_token else 1)
        for one, other in zip(found, [whole, *torch.autograd.grad(whole, wide, grads.double())], strict=True):
            assert (one.double() - other).norm() < (0.01 if rank else 0.006) * other.norm(), (tokens, weights)
        silu, added = out.new_empty(len(out), WIDE), None
        if rank:
            added = GroupedAdapters(loras, linear.dense, torch.bfloat16)(x.detach(), groups)
        linear(x.detach(), groups, silu, True, added)
        gate, above = whole.detach().chunk(2, 1)
        gated = nn.functional.silu(gate) * above
        assert (silu.double() - gated).norm() < (0.015 if rank else 0.006) * gated.norm(), (tokens, weights)


def by_experts(tensors, exact, owner, fan):
    """Outputs of x, and of two A and two B if there are adapters, in float64, one expert after the other."""
    x, *adapters = tensors
    downs, ups = adapters[:2], adapters[2:]
    read, out = x.repeat_interleave(fan, 0), x.new_zeros(len(owner), 2 * WIDE)
    for number in owner.unique().tolist():
        (pair,) = torch.where(owner == number)
        result = read[pair] @ exact[number].T
        if adapters:
            low = [read[pair] @ a[number].T @ b[number].T for a, b in zip(downs, ups, strict=True)]
            result = result + 0.5 * torch.cat(low, 1)
        out = out.index_put((pair,), result)
    return out


def test_scores_are_near_those_of_float64():
    torch.manual_seed(5)
    weight, bias = torch.randn(128, HIDDEN, device=DEVICE) / HIDDEN**0.5, torch.randn(128, device=DEVICE)
    for tokens in (1, 6, 32, 100):
        x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        for one in (None, bias):
            found = operations(DEVICE).scores(x, weight, one)
            expected = x.double() @ weight.double().T + (0 if one is None else one.double())
            assert (found.double() - expected).norm() < 1e-6 * expected.norm()


def test_routes_groups_and_sums_are_those_of_pytorch():
    torch.manual_seed(1)
    kernels = operations(DEVICE)
    for tokens in TOKENS:
        scores = torch.randn(tokens, 128, device=DEVICE)
        numbers, weights = kernels.route(scores, 8, True)
        expected = reference.route(scores, 8, True)
        assert torch.equal(numbers, expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=0)
        groups, exact = kernels.group(numbers, 128), reference.group(numbers, 128)
        assert torch.equal(groups.experts, exact.experts)
        assert torch.equal(groups.pairs[exact.experts >= 0], exact.pairs[exact.experts >= 0])
        y = torch.randn(tokens * 8, HIDDEN, device=DEVICE)
        torch.testing.assert_close(weighted_sum(y, weights), (y.view(tokens, 8, -1) * weights[..., None]).sum(1))
    assert {block_size(tokens, CHOSEN, EXPERTS) for tokens in TOKENS} == {*BLOCK_SIZES}


def test_a_captured_graph_follows_another_choice_of_experts_and_the_adapters_that_were_synced_last():
    torch.manual_seed(2)
    kernels, rows = operations(DEVICE), [[layer("nvfp4", WIDE, HIDDEN)[0]] for _ in range(EXPERTS)]
    linear = grouped(rows, torch.bfloat16)
    down = torch.randn(EXPERTS, 16, HIDDEN, device=DEVICE)
    up = torch.zeros(EXPERTS, WIDE, 16, device=DEVICE)
    adapters = GroupedAdapters([Lora(down, up, 2.0)], linear.dense, torch.bfloat16)
    x, scores = torch.randn(300, HIDDEN, device=DEVICE).bfloat16(), torch.randn(300, EXPERTS, device=DEVICE)
    out = torch.empty(300 * 8, WIDE, device=DEVICE, dtype=torch.bfloat16)

    def compute() -> None:
        numbers, _ = kernels.route(scores, 8, True)
        groups = kernels.group(numbers, EXPERTS)
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
