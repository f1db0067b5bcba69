"""The gated delta rule by chunks, against one by tokens in float64 and against transformers' rule."""

from inspect import unwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qerl.models.delta_net import gated_delta_rule

LENGTHS = (1, 63, 64, 65, 200)
NAMES = ("query", "key", "value", "g", "beta", "initial_state")
#: Heads of keys and of values.
HEADS = [(1, 1), (2, 2), (2, 6), (1, 4)]


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
    exact = results(by_tokens, asked)
    for name, x in results(by_chunks, asked).items():
        torch.testing.assert_close(
            x, exact[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_gradients_are_those_of_differences(monkeypatch):
    monkeypatch.setattr("qerl.models.delta_net.CHUNK", 3)
    assert torch.autograd.gradcheck(by_chunks, inputs(7, (1, 2), (2, 3), sequences=1))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_float32_is_as_exact_as_transformers(tokens, heads):
    asked = inputs(tokens, heads, (32, 48))
    exact, single = results(by_tokens, asked), cast(asked, torch.float32)
    ours, theirs = errors(by_chunks, single, exact), errors(by_transformers, single, exact)
    assert max(ours.values()) < 1e-5
    assert max(ours.values()) < 2 * max(theirs.values())


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


def test_without_states_they_start_at_zero_and_stay_untold():
    *asked, state = inputs(70)
    expected = by_tokens(*asked, torch.zeros_like(state))[0]
    out, last = gated_delta_rule(*asked, use_qk_l2norm_in_kernel=True)
    assert last is None
    torch.testing.assert_close(out, expected)


def test_lengths_are_kept_where_no_norm_is_asked_for():
    query, key, *rest = inputs(70)
    query, key = (x / x.square().sum(-1, keepdim=True).sqrt() for x in (query, key))
    torch.testing.assert_close(
        gated_delta_rule(query, key, *rest, output_final_state=True), by_tokens(query, key, *rest), rtol=0, atol=1e-5
    )
    longer = gated_delta_rule(2 * query, key, *rest)[0]
    torch.testing.assert_close(longer, 2 * gated_delta_rule(query, key, *rest)[0])


@pytest.mark.parametrize("strength", [20.0, 50.0])
def test_strong_decays_of_some_tokens_leave_those_of_others_exact(strength):
    """transformers takes decays between tokens as differences of sums, which float32 rounds by their size."""
    asked = inputs(150)
    with torch.no_grad():
        asked[3][:, ::3] -= strength
    single = cast(asked, torch.float32)
    exact = results(by_tokens, cast(single, torch.float64))
    ours, theirs = errors(by_chunks, single, exact), errors(by_transformers, single, exact)
    assert max(ours.values()) < 1e-6
    assert max(ours.values()) < 0.2 * max(theirs.values())


@pytest.mark.parametrize("strength", [20.0, 50.0, 1000.0])
def test_strong_decays_of_all_tokens_stay_finite(strength):
    asked = inputs(150)
    with torch.no_grad():
        asked[3].fill_(-strength)
    exact = results(by_tokens, asked)
    for name, x in results(by_chunks, cast(asked, torch.float32)).items():
        torch.testing.assert_close(x, exact[name], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("decay", [0.0, -1e-3])
def test_equal_keys_stay_exact(rate, decay):
    """Each token then changes what the tokens before it have written."""
    asked = inputs(300, features=(32, 32))
    with torch.no_grad():
        asked[1].copy_(asked[1][:, :1].expand_as(asked[1]))
        asked[3].fill_(decay)
        asked[4].fill_(rate)
    exact, single = results(by_tokens, asked), cast(asked, torch.float32)
    ours, theirs = errors(by_chunks, single, exact), errors(by_transformers, single, exact)
    assert max(ours.values()) < 2e-5
    assert max(ours.values()) < 3 * max(theirs.values())


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy, other than those that only make a view or an empty tensor."""

    VIEWS = ("view", "permute", "transpose", "unsqueeze", "squeeze", "slice", "select", "expand", "unbind", "detach")
    VIEWS += ("_unsafe_view", "split_with_sizes", "diagonal", "alias", "as_strided", "promote_types")
    VIEWS += ("empty_like", "new_empty", "new_empty_strided", "empty")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in self.VIEWS
        return function(*args, **(kwargs or {}))


def launches(rule, tokens):
    with Launches() as counted:
        results(rule, inputs(tokens, dtype=torch.float32))
    return counted.count


def test_a_chunk_has_a_launch_in_each_direction():
    assert launches(by_chunks, 640) - launches(by_chunks, 320) == 2 * 5
    assert launches(by_chunks, 320) < 175
    assert launches(by_transformers, 640) - launches(by_transformers, 320) > 30 * 5


def kept(rule, asked):
    """Bytes that the backward pass keeps beside its inputs."""
    own, found = {x.untyped_storage().data_ptr() for x in asked}, {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = rule(*asked)
    assert made[0].requires_grad
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_no_more_is_kept_than_by_transformers(heads, dtype):
    """And less where heads of values share one of keys."""
    asked = inputs(200, heads, (64, 64), dtype)
    assert kept(by_chunks, asked) < (1 if heads[0] == heads[1] else 0.8) * kept(by_transformers, asked)
