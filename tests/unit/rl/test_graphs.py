"""Passes over rows of fixed sizes, which CUDA graphs need, against passes over rows as they are.

A CPU has no graphs and no flash attention: work is repeated by calling it, and an attention in PyTorch reads what flash
attention reads. `tests/gpu/test_pass_graphs_gpu.py` has both.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qerl.kernels import packed_sequences
from qerl.rl import passes
from qerl.rl.packing import PaddedMicroBatch, PaddedSize, micro_batch, padded_tokens, row_tokens, split
from qerl.rl.passes import PassGraphs, Recomputation
from tests.conftest import in_nightly
from tests.unit.rl import tiny_trainer


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    """Attention over pieces by their ends, as flash attention's; what no piece has is not a number."""

    def attend(query, key, value, packing, scale, window):
        assert window is None
        out = torch.full_like(query, torch.nan)
        for (q0, q1), (k0, k1) in zip(
            packing.queries_ends.unfold(0, 2, 1).tolist(), packing.keys_ends.unfold(0, 2, 1).tolist(), strict=True
        ):
            assert q1 - q0 <= packing.longest
            assert k1 - k0 <= packing.widest
            if q1 > q0:
                one = [
                    rows[a:b].transpose(0, 1)[None] for rows, a, b in ((query, q0, q1), (key, k0, k1), (value, k0, k1))
                ]
                seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0)
                found = scaled_dot_product_attention(*one, attn_mask=seen, scale=scale, enable_gqa=True)
                out[q0:q1] = found[0].transpose(0, 1)
        return out

    monkeypatch.setattr(packed_sequences, "_FlashAttention", SimpleNamespace(apply=attend))
    monkeypatch.setattr(passes, "allocatable_bytes", lambda: 2**33)


#: Groups with prompts of up to 90 tokens, one of them without a gradient.
batch = partial(
    tiny_trainer.batch,
    advantages=((1.2, -0.4, -0.4, -0.4), (0.0,) * 4, (1.0, 0.0, -1.0, 0.0), (-1.3, 0.5, 0.4, 0.4)),
    longest=60,
)


def updater(checkpoints, **loss):
    about = {"adapter": {"rank": 4}, "micro_batch_tokens": 400}
    return tiny_trainer.updater(checkpoints, about, **{"updates_per_rollout": 3, "silent_sample": 1, **loss})


def in_fixed_rows(made, recomputed: bool = False) -> list:
    """Make its passes those of fixed rows; returns a list that gets each captured work."""
    captured = []
    again = Recomputation(made.policy) if recomputed else None
    made.graphs = PassGraphs(made.policy, again, lambda work: captured.append(work) or work() or work)
    return captured


LOSSES = [
    {"name": "dapo"},
    {"name": "grpo", "kl": 0.1},
    {"name": "grpo", "correction": "token-truncate", "clip_low": 1e-3, "clip_high": 1e-3},
]


@pytest.mark.parametrize(
    "loss", [*in_nightly(LOSSES[0]), *LOSSES[1:]], ids=lambda loss: "-".join(map(str, loss.values()))
)
def test_updates_over_fixed_rows_are_those_over_rows_as_they_are(checkpoints, loss):
    """Four rollouts of different sizes, the third without a gradient and the last at another temperature."""
    plain, fixed = updater(checkpoints, **loss), updater(checkpoints, **loss)
    captured = in_fixed_rows(fixed, recomputed="kl" in loss)
    silent = batch(3, advantages=[[0.0] * 4] * 3)
    for step, (samples, temperature) in enumerate(
        [(batch(0), 1.0), (batch(1), 1.0), (silent, 1.0), (batch(2), 0.7)], 1
    ):
        plain.temperature = fixed.temperature = temperature
        expected, found = (one.update(step, samples) for one in (plain, fixed))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
    assert captured
    for (name, a), (_, b) in zip(plain.policy.trainable(), fixed.policy.trainable(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-5, msg=name)


def test_gradients_over_fixed_rows_are_exact_sums_over_micro_batches(checkpoints):
    plain, fixed = updater(checkpoints, updates_per_rollout=1), updater(checkpoints, updates_per_rollout=1)
    in_fixed_rows(fixed)
    for one in (plain, fixed):
        one.update(1, batch(0))
    for (name, a), (_, b) in zip(plain.policy.trainable(), fixed.policy.trainable(), strict=True):
        assert (b.grad - a.grad).norm() <= 1e-5 * a.grad.norm(), name


def test_rows_of_similar_sizes_are_captured_once(checkpoints):
    made = updater(checkpoints)
    captured, samples = in_fixed_rows(made), batch(0)
    made.update(1, samples)
    count = len(captured)
    for sample in samples:
        for values in (sample.completion.token_ids, sample.completion.logprobs):
            del values[max(1, len(values) - 1) :]
    made.update(2, samples)
    assert len(captured) == count


def test_a_row_has_at_least_one_token_of_padding_and_room_for_everything():
    for seed in range(20):
        samples = batch(seed)
        one = micro_batch(samples, list(range(len(samples))), tiny_trainer.CPU)
        size = PaddedSize.of(one)
        padded = PaddedMicroBatch(size, tiny_trainer.CPU)
        padded.fill(one)
        assert size.tokens > one.ids.numel()
        assert padded.packing.queries_ends[-1] == size.tokens
        assert padded.packing.keys_ends[-1] <= size.keys
        assert len(padded.states_M) >= len(one.states_M)
        assert torch.equal(padded.states_M[: len(one.states_M)], one.states_M)
        assert (padded.states_M[len(one.states_M) :] >= one.ids.numel()).all()


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_rows_of_a_large_batch_have_no_graph_however_few_teach(checkpoints, monkeypatch, share):
    """Its graphs would hold memory that other rows of the run need."""
    made = updater(checkpoints)
    captured = in_fixed_rows(made)
    samples = batch(0, advantages=[[0.0] * 4, [0.0] * 4, [0.0] * 4, [1.0, 0.0, -1.0, 0.0]])
    longest = max(row_tokens(samples, row) for row in split(samples, made.settings.micro_batch_tokens))
    monkeypatch.setattr(passes, "MOST_BYTES", share * padded_tokens(longest) * made.graphs._token_bytes)
    made.update(1, samples)
    assert bool(captured) == (share > 1)
