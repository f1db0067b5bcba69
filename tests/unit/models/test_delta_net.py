"""The gated delta rule against one by tokens in float64, and delta nets beside libraries that transformers takes."""

import logging
from functools import partial
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from qerl.models import delta_net
from qerl.models.delta_net import INSTALLED, PLAIN, functions_for, gated_delta_rule, use_packed_delta_nets
from tests.families import FAMILIES

LENGTHS = (1, 64, 65, 200)
NAMES = ("query", "key", "value", "g", "beta", "initial_state")
#: Heads of keys and of values.
HEADS = [(2, 2), (2, 6)]


def inputs(tokens, heads=(2, 6), features=(8, 12), dtype=torch.float64, sequences=2):
    torch.manual_seed(tokens)
    (groups, count), (wide, deep) = heads, features
    like = [torch.randn(sequences, tokens, groups, wide) for _ in range(2)]
    like += [torch.randn(sequences, tokens, count, deep), -2 * torch.rand(sequences, tokens, count)]
    like += [torch.rand(sequences, tokens, count), torch.randn(sequences, count, wide, deep)]
    return [x.to(dtype).requires_grad_() for x in like]


def repeated(query, key, value):
    """Queries and keys with a head for each head of values."""
    return (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))


def by_tokens(query, key, value, g, beta, state):
    query, key = repeated(query, key, value)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outs = []
    for q, k, v, decay, rate in zip(*(x.unbind(1) for x in (query, key, value, g, beta)), strict=True):
        state = state * decay.exp()[..., None, None]
        change = rate[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + torch.einsum("bhk,bhv->bhkv", k, change)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q) / q.shape[-1] ** 0.5)
    return torch.stack(outs, 1), state


def by_chunks(*asked):
    return gated_delta_rule(*asked, output_final_state=True, use_qk_l2norm_in_kernel=True)


def by_transformers(query, key, value, g, beta, state):
    query, key = repeated(query, key, value)
    rest = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return unwrap(torch_chunk_gated_delta_rule)(query, key, value, g, beta, **rest)


def results(rule, asked):
    """Outputs, last states, and gradients of all inputs through both."""
    made = rule(*asked)
    torch.manual_seed(0)
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in made)
    named = dict(zip(("out", "last", *NAMES), (*made, *torch.autograd.grad(loss, asked)), strict=True))
    return {name: x.detach().double() for name, x in named.items()}


def errors(rule, asked, exact):
    """The largest error of each result, as a part of the largest value."""
    return {k: ((x - exact[k]).abs().max() / exact[k].abs().max()).item() for k, x in results(rule, asked).items()}


def cast(asked, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in asked]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_values_and_gradients_are_those_of_the_recurrence(tokens, heads):
    asked = inputs(tokens, heads)
    torch.testing.assert_close(results(by_chunks, asked), results(by_tokens, asked), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_are_computed_in_float32(dtype, heads):
    """Only outputs and gradients are rounded to 16 bits. Log-decays and states are float32, as delta nets give them."""
    asked = cast(inputs(130, heads), dtype)
    asked[3], asked[5] = cast([asked[3], asked[5]], torch.float32)
    out, last = by_chunks(*asked)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    found = errors(by_chunks, asked, results(by_tokens, cast(asked, torch.float64)))
    assert found["last"] < 1e-5
    assert max(found.values()) < torch.finfo(dtype).eps


def strong(asked, strength):
    """Strong decays of some tokens."""
    asked[3][:, ::3] -= strength


def equal_keys(asked, rate, decay):
    """Each token then changes what the tokens before it have written."""
    asked[1].copy_(asked[1][:, :1].expand_as(asked[1]))
    asked[3].fill_(decay)
    asked[4].fill_(rate)


#: Changes of the inputs, the most errors, and how many times those of transformers they may be. It takes decays between
#: tokens as differences of sums, which float32 rounds by their size.
HARD = {
    "as drawn": (lambda asked: None, 1e-5, 2),
    "strong decays": (lambda asked: strong(asked, 20), 1e-6, 0.2),
    "stronger decays": (lambda asked: strong(asked, 50), 1e-6, 0.2),
    **{
        f"equal keys, rate {rate}, decay {decay}": (partial(equal_keys, rate=rate, decay=decay), 2e-5, 3)
        for rate in (0.1, 1.0)
        for decay in (0.0, -1e-3)
    },
}


@pytest.mark.parametrize(("change", "most", "times"), HARD.values(), ids=HARD)
@pytest.mark.parametrize(("tokens", "heads"), [(65, (2, 2)), (300, (2, 6))])
def test_float32_is_as_exact_as_transformers(change, most, times, tokens, heads):
    asked = inputs(tokens, heads, (32, 32))
    with torch.no_grad():
        change(asked)
    single = cast(asked, torch.float32)
    exact = results(by_tokens, cast(single, torch.float64))
    ours, theirs = errors(by_chunks, single, exact), errors(by_transformers, single, exact)
    assert max(ours.values()) < most
    assert max(ours.values()) < times * max(theirs.values())


def test_without_an_initial_state_it_is_zero():
    *rest, state = inputs(70)
    out, last = gated_delta_rule(*rest, use_qk_l2norm_in_kernel=True)
    assert last is None
    torch.testing.assert_close(out, by_tokens(*rest, torch.zeros_like(state))[0])


def test_queries_and_keys_keep_their_lengths_without_the_norm():
    query, key, *rest = inputs(70)
    query, key = (x / x.square().sum(-1, keepdim=True).sqrt() for x in (query, key))
    found = gated_delta_rule(query, key, *rest, output_final_state=True)
    torch.testing.assert_close(found, by_tokens(query, key, *rest), rtol=0, atol=1e-5)
    torch.testing.assert_close(gated_delta_rule(2 * query, key, *rest)[0], 2 * found[0])


@pytest.mark.parametrize("strength", [20.0, 1000.0])
def test_strong_decays_of_all_tokens_stay_finite(strength):
    asked = inputs(150)
    with torch.no_grad():
        asked[3].fill_(-strength)
    found = results(by_chunks, cast(asked, torch.float32))
    torch.testing.assert_close(found, results(by_tokens, asked), rtol=1e-5, atol=3e-6)


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU and a version of Triton with which the library raises, as far as the choice of functions asks."""
    delta_net.library_trains_on.cache_clear()
    monkeypatch.setattr(delta_net, "_INSTALLED", True)
    monkeypatch.setattr(delta_net, "find_spec", lambda name: None)
    monkeypatch.setattr(delta_net, "version", lambda name: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    delta_net.library_trains_on.cache_clear()


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "trains"),
    [
        ((9, 0), "3.3.1", None, True),
        ((9, 0), "3.4.0", None, False),
        ((9, 0), "3.7.0+git1234", None, False),
        ((9, 0), "3.7.1", None, True),
        ((9, 0), "3.6.0", "installed", True),
        ((8, 9), "3.6.0", None, True),
    ],
)
def test_gradients_that_the_library_lacks_are_those_of_pytorch(
    on_hopper, monkeypatch, caplog, capability, triton, tilelang, trains
):
    monkeypatch.setattr(delta_net, "find_spec", lambda name: tilelang)
    monkeypatch.setattr(delta_net, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level(logging.WARNING, logger="qerl"):
        chosen = [functions_for(on_hopper) for _ in range(2)]
        with torch.no_grad():
            assert functions_for(on_hopper) == INSTALLED
    assert chosen == [INSTALLED if trains else INSTALLED._replace(chunks=gated_delta_rule)] * 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (not trains)
    assert all(f"Triton {triton}" in one and "install Triton 3.7.1 or newer, or tilelang" in one for one in messages)


def test_a_library_of_gpu_kernels_leaves_models_on_a_cpu_alone(on_hopper):
    assert functions_for(torch.zeros(1, dtype=torch.bfloat16)) == PLAIN
    assert PLAIN.convolve is unwrap(causal_conv1d_fn)  # without the library that transformers would take


def test_without_the_library_the_rule_on_a_gpu_is_that_of_this_package(on_hopper, monkeypatch):
    monkeypatch.setattr(delta_net, "_INSTALLED", False)
    assert functions_for(on_hopper) == INSTALLED._replace(chunks=gated_delta_rule)
    on_hopper.dtype = torch.float32
    assert functions_for(on_hopper) == PLAIN


def test_heads_of_keys_are_repeated_for_other_rules_alone(monkeypatch):
    """A delta net has the same outputs by transformers' rule, which needs as many heads of keys as of values."""
    torch.manual_seed(0)
    config = FAMILIES["qwen3_5"].config(linear_num_key_heads=2, linear_num_value_heads=6)
    net = Qwen3_5GatedDeltaNet(config, 0)
    use_packed_delta_nets(net)
    row = torch.randn(2, 70, config.hidden_size)
    ours = net(row)
    monkeypatch.setattr(delta_net, "PLAIN", PLAIN._replace(chunks=unwrap(torch_chunk_gated_delta_rule)))
    torch.testing.assert_close(net(row), ours, rtol=1e-4, atol=1e-5)
