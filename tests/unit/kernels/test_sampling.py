"""The native engine's draws on the CPU; `tests/gpu` compares the kernels with them."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from qerl.kernels.reference import draw, gumbel, philox
from qerl.kernels.state import MAX_STOPS, DecodeState, SamplingState

CPU = torch.device("cpu")


def sampling_of(temperature=1.0, seed=0, top_p=1.0, top_k=0, stops=()):
    sampling = SamplingState.empty(CPU)
    sampling.set(temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, stops=stops)
    return sampling


def drawn(logits, sampling, *, truncated=False, limit=4, sequences=None):
    """The slots after one draw from each row of logits [B, V]."""
    state = DecodeState.empty(len(logits), 4, 1, CPU)
    rows = torch.arange(len(logits), dtype=torch.int32)
    state.position[:-1] = 7
    state.limit[:] = limit
    state.sequence[:-1] = torch.arange(len(logits)) if sequences is None else sequences
    draw(logits, rows, state, sampling, truncated)
    return state


# Known answers of Random123, the authors' own implementation: counter, key, result.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = philox([torch.tensor([word]) for word in counter], torch.tensor([key]))
    assert tuple(int(word) for word in words) == expected


def test_noise_is_a_function_of_its_keys_alone():
    keys = torch.tensor([3, 2**40, 3]), torch.tensor([0, 5, 1])
    noise = gumbel(torch.tensor([9]), *keys, 9000)
    alone = gumbel(torch.tensor([9]), keys[0][1:2], keys[1][1:2], 9000)
    assert torch.equal(noise[1:2], alone)
    columns = noise.flatten().tolist()
    assert len(set(columns)) > 0.999 * len(columns)
    # The distribution's mean is Euler's constant, its variance pi^2 / 6.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.08)


def expected_probs(logits, temperature, top_p, top_k):
    """Exact probabilities by the definition, in float64: of the top_k, the smallest set that reaches top_p of them."""
    probs = np.exp(logits / temperature - np.max(logits / temperature))
    first = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or len(probs)]
    probs /= probs[first].sum()
    kept, mass = [], 0.0
    for token in first:
        if mass < top_p:
            kept.append(token)
        mass += probs[token]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.75, 0), (1.0, 1.0, 3), (1.3, 0.9, 5), (1.0, 0.55, 3)],
)
def test_draws_follow_the_distribution(temperature, top_p, top_k):
    logits = np.random.default_rng(1).normal(size=12) * 1.5
    probs = expected_probs(logits, temperature, top_p, top_k)
    many = torch.tensor(logits, dtype=torch.float32).expand(20000, -1)
    state = drawn(many, sampling_of(temperature, 5, top_p, top_k), truncated=top_p < 1 or top_k > 0)
    counts = torch.bincount(state.tokens[:-1, 0].long(), minlength=12).numpy()
    assert counts[probs == 0].sum() == 0
    assert chisquare(counts[probs > 0], 20000 * probs[probs > 0]).pvalue > 1e-3
    log_softmax = torch.log_softmax(torch.tensor(logits) / temperature, -1)
    torch.testing.assert_close(
        state.logprobs[:-1, 0].double(), log_softmax[state.tokens[:-1, 0].long()], atol=1e-5, rtol=0
    )


def test_the_smallest_top_p_keeps_the_likeliest_token():
    logits = torch.randn(6, 50)
    state = drawn(logits, sampling_of(top_p=1e-60), truncated=True)
    assert state.tokens[:-1, 0].tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_largest_logit_with_its_probability_at_temperature_1():
    logits = torch.randn(6, 50)
    state = drawn(logits, sampling_of(temperature=0))
    assert state.tokens[:-1, 0].tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(state.logprobs[:-1, 0], torch.log_softmax(logits, -1).amax(-1))


def test_a_draw_advances_its_slot_until_a_stop_or_the_limit():
    logits = torch.full((3, 9), -20.0)
    logits[0, 4], logits[1, 5], logits[2, 6] = 20, 20, 20
    state = drawn(logits, sampling_of(stops=[5, 7]))
    assert state.tokens[:-1, 0].tolist() == [4, 5, 6]
    assert state.token.tolist() == [4, 5, 6, 0]
    assert state.position.tolist() == [8, -1, 8, -1]
    assert state.drawn.tolist() == [1, 1, 1, 0]
    assert drawn(logits, sampling_of(), limit=1).position.tolist() == [-1] * 4


def test_an_idle_slot_stays_as_it_is():
    state = DecodeState.empty(2, 4, 1, CPU)
    before = state.position.clone(), state.drawn.clone()
    draw(torch.randn(3, 9), torch.tensor([2, 0, 2], dtype=torch.int32), state, sampling_of(), False)
    assert torch.equal(state.position, before[0])
    assert torch.equal(state.drawn, before[1])
    assert not state.tokens.any()


def test_more_stop_tokens_than_the_table_holds_are_an_error():
    with pytest.raises(ValueError, match="17 stop tokens"):
        sampling_of(stops=range(MAX_STOPS + 1))
