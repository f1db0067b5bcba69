"""Draws of tokens on a GPU: those of the reference, which test_sampling.py compares with the distribution."""

from dataclasses import fields, replace

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.state import CHUNK, DecodeState, SamplingState
from qerl.kernels.triton import draw
from tests.gpu.exact import DTYPES

CUDA = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("poisoned")


def sampling_of(temperature, seed=3, top_p=1.0, top_k=0, stops=()):
    sampling = SamplingState.empty(CUDA)
    sampling.set(temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, stops=stops)
    return sampling


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, CHUNK, CHUNK + 1, 151_936])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (1.2, 1.0, 20)]
)
@pytest.mark.usefixtures("dependent_launch")
def test_draw_is_that_of_the_reference(dtype, width, temperature, top_p, top_k):
    count, truncated = 33, top_p < 1 or top_k > 0
    logits = (torch.randn(count, width, device=CUDA) * 3).to(dtype)
    rows = torch.randperm(count + 1, device=CUDA)[:count].int()
    sampling = sampling_of(temperature, seed=2**63 + 12345, top_p=top_p, top_k=top_k, stops=range(2))
    outcomes = []
    for function in (draw, reference.draw):
        state = DecodeState.empty(count, 8, 1, CUDA)
        state.position[:-1] = torch.arange(count, device=CUDA).int() - 1
        state.drawn[:-1] = torch.arange(count, device=CUDA).int() % 4
        state.limit[:] = 4
        state.sequence[:-1] = torch.arange(count, device=CUDA) * (2**33 + 7)
        function(logits, rows, state, sampling, truncated)
        outcomes.append(state)
    found, expected = outcomes
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.position, expected.position)
    assert torch.equal(found.drawn, expected.drawn)
    assert torch.equal(found.token, expected.token)
    wide = torch.log_softmax(logits.double() / (temperature or 1), -1)
    for row, slot in enumerate(rows.tolist()):
        if 0 < slot < count:
            number = slot % 4
            logprob = wide[row, found.tokens[slot, number].long()]
            assert found.logprobs[slot, number].item() == pytest.approx(logprob.item(), abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_a_replayed_draw_takes_the_tokens_that_are_given(temperature):
    count, width = 33, 50_000
    logits = (torch.randn(count, width, device=CUDA) * 3).bfloat16()
    sampling = sampling_of(temperature, stops=range(2))
    trace = torch.randint(width, (count + 1, 4), device=CUDA, dtype=torch.int32)
    trace[:5] = 1  # a stop token
    state = DecodeState.empty(count, 4, 1, CUDA)
    state.position[:-1], state.limit[:] = 7, 4
    state.drawn[:-1] = torch.arange(count, device=CUDA).int() % 4
    state.sequence[:-1] = torch.arange(count, device=CUDA)
    state.tokens.copy_(trace)
    state.given[:] = 2
    number = state.drawn[:-1].long()
    drawn = replace(state, **{one.name: getattr(state, one.name).clone() for one in fields(state)})
    rows = torch.arange(count, device=CUDA).int()
    draw(logits, rows, state, sampling, False, True)
    draw(logits, rows, drawn, sampling, False)
    given = number < 2
    chosen = torch.where(given, trace[:-1].gather(1, number[:, None])[:, 0].long(), drawn.token[:-1])
    assert torch.equal(state.token[:-1], chosen)
    assert torch.equal(state.tokens[:-1].gather(1, number[:, None])[:, 0].long(), chosen)
    done = (number == 3) | (chosen < 2) & ~given
    assert torch.equal(state.position[:-1] == -1, done)
    expected = torch.log_softmax(logits.double() / (temperature or 1), -1).gather(1, chosen[:, None])[:, 0]
    found = state.logprobs[:-1].gather(1, number[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("place", [0, 7, 49_999])
def test_a_logit_that_is_nan_makes_the_logprob_nan(place):
    logits = torch.randn(4, 50_000, device=CUDA).bfloat16()
    logits[1, place], logits[2] = torch.nan, torch.nan
    state = DecodeState.empty(4, 4, 1, CUDA)
    state.position[:-1], state.limit[:], state.sequence[:-1] = 5, 4, torch.arange(4, device=CUDA)
    draw(logits, torch.arange(4, device=CUDA).int(), state, sampling_of(1.0), False)
    assert state.logprobs[:4, 0].isnan().tolist() == [False, True, True, False]
    assert ((state.tokens[:4, 0] >= 0) & (state.tokens[:4, 0] < 50_000)).all()


def test_a_draw_does_not_depend_on_the_batch():
    logits = torch.randn(64, 50_000, device=CUDA).bfloat16()
    drawn = []
    for parts in (1, 64):
        state = DecodeState.empty(64, 4, 1, CUDA)
        state.position[:-1], state.limit[:], state.sequence[:-1] = 5, 4, torch.arange(64, device=CUDA)
        for rows in torch.arange(64, device=CUDA).int().chunk(parts):
            draw(logits[rows.long()], rows, state, sampling_of(1.0), False)
        drawn.append((state.tokens, state.logprobs))
    assert all(map(torch.equal, *drawn))
    assert len(drawn[0][0][:, 0].unique()) > 50
