"""Passes of updates: what is recomputed for less memory, and passes over rows of fixed sizes, as CUDA graphs need them.

A CPU has no graphs and no flash attention: work is repeated by calling it, and an attention in PyTorch reads what flash
attention reads. `tests/gpu/test_pass_graphs_gpu.py` has both.
"""

import gc
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qerl.host.gpus import allocatable_bytes
from qerl.kernels import packed_sequences
from qerl.models.linear import PackedLinear
from qerl.models.policy import with_adapter
from qerl.rl import passes
from qerl.rl.packing import (
    PaddedMicroBatch,
    PaddedSize,
    Sample,
    logprobs_and_entropy,
    micro_batch,
    padded_tokens,
    row_tokens,
    split,
)
from qerl.rl.passes import PassGraphs, Recomputation, blocks, kept_bytes, recomputed_blocks, saved_for_backward
from qerl.rollout.sampler import Completion
from qerl.settings.run import AdapterSettings
from tests.conftest import in_nightly
from tests.tiny import random_checkpoint, tiny_qwen2
from tests.unit.rl import tiny_trainer
from tests.unit.rl.tiny_trainer import CPU

LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)


def adapted(checkpoint):
    policy = with_adapter(checkpoint, AdapterSettings(rank=4), "bfloat16", 0, CPU)
    policy.lm.train()
    return policy


def row(tokens):
    """One prompt alone but for its last token: a single piece, as what is measured."""
    sample = Sample(list(range(2, 90)) * (tokens // 88 + 1), Completion([5], [-1.0], True), 0.0, 0.0)
    return micro_batch([Sample(sample.prompt[:tokens], sample.completion, 0.0, 0.0)], [0], CPU)


def test_measuring_frees_what_it_has_counted(checkpoint):
    """An operation that saves its own output must not hold it, nor the blocks before it."""

    def with_history():
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.grad_fn is not None)

    policy, before = adapted(checkpoint), with_history()
    assert kept_bytes(policy) > 0
    assert with_history() == before


def forward_bytes(policy, tokens):
    with saved_for_backward(policy.lm) as saved:
        _ = logprobs_and_entropy(policy, row(tokens), 1.0)
    return saved.bytes


def test_a_storage_counts_once_and_weights_do_not():
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(10, 8, requires_grad=True)
    with saved_for_backward(layer) as saved:
        y = layer(x)
        _ = y.tanh() * x.view(10, 8)  # keeps x, tanh(y)
    assert saved.bytes == 2 * 10 * 8 * 4


def test_measured_bytes_foretell_those_of_longer_rows(checkpoint):
    policy = adapted(checkpoint)
    kept = kept_bytes(policy)
    grown = forward_bytes(policy, 240) - forward_bytes(policy, 176)
    # Without a GPU the mask of a piece is as large as the square of its length.
    assert 1 <= grown / (64 * LAYERS * kept) < 1.25


@pytest.mark.parametrize(("count", "kept", "recomputed"), [*itertools.product((1, 4, 28), (10.0, 16.0), (1.0, 4.0))])
def test_as_few_blocks_as_fit_are_recomputed(count, kept, recomputed):
    def needed(again):
        return (count - again) * kept + again * recomputed + 2 * kept

    for free in torch.linspace(0, 1.2 * needed(0), 50).tolist():
        fitting = [again for again in range(count + 1) if needed(again) <= free]
        # Where even all are too much, all of them.
        assert recomputed_blocks(count, free, kept, recomputed) == min(fitting, default=count)


def test_less_free_memory_means_more_recomputation_and_the_same_gradients(checkpoint, monkeypatch):
    policy = adapted(checkpoint)
    part, counts, held, gradients = row(200), [], [], []
    recomputation = Recomputation(policy)
    whole = LAYERS * 200 * kept_bytes(policy)
    for share in (2.0, 1.25, 1.0, 0.0):
        monkeypatch.setattr(passes, "free_bytes", lambda share=share: share * whole)
        counts.append(recomputation.choose(200))
        policy.lm.zero_grad()
        with saved_for_backward(policy.lm) as saved:
            logprobs, _ = logprobs_and_entropy(policy, part, 1.0)
        logprobs.sum().backward()
        held.append(saved.bytes)
        gradients.append(torch.cat([p.grad.flatten() for _, p in policy.trainable() if p.grad is not None]))
    assert counts[0] == 0
    assert counts[-1] == LAYERS
    assert 0 < counts[1] < counts[2] < LAYERS
    assert held == sorted(held, reverse=True)
    assert held[0] > 1.5 * held[2]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_logits_and_then_weights_are_kept_where_they_fit_beside_all_activations(tmp_path, monkeypatch):
    random_checkpoint(tmp_path / "m", "tiny", "nvfp4")
    policy = with_adapter(tmp_path / "m", AdapterSettings(rank=4), "bfloat16", 0, CPU)
    policy.lm.train()
    recomputation, tokens = Recomputation(policy), 100
    packed = [module for module in policy.lm.modules() if isinstance(module, PackedLinear)]
    unpacked = sum(2 * module.packed.shape[0] * module.packed.shape[1] for module in packed)
    activations = (len(blocks(policy.lm)) + 2) * tokens * kept_bytes(policy)
    logits = 2 * tokens * policy.lm.config.vocab_size
    monkeypatch.setattr(passes, "free_bytes", lambda: activations + logits - 1)
    assert recomputation.fitting_tokens(with_logits=True) == tokens - 1
    assert recomputation.choose(tokens) == 0
    for free, fit in ((activations + logits + unpacked, True), (activations + logits + unpacked - 1, False)):
        monkeypatch.setattr(passes, "free_bytes", lambda free=free: free)
        assert recomputation.fitting_tokens(with_logits=True) >= tokens
        with recomputation.weights(tokens):
            held = [module._dense for module in packed]
            assert sum(t.numel() * t.itemsize for t in held if t is not None) == (unpacked if fit else 0)
        assert all(module._dense is None for module in packed)
        assert recomputation.choose(tokens) == 0


def test_a_cap_bounds_what_can_be_allocated(monkeypatch):
    gpu = {
        "mem_get_info": (60, 100),
        "memory_reserved": 30,
        "memory_allocated": 20,
        "get_per_process_memory_fraction": 1.0,
        "memory_snapshot": [],
    }
    for name in gpu:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: gpu[name])
    assert allocatable_bytes() == 60 + 30 - 20
    gpu["get_per_process_memory_fraction"] = 0.5
    assert allocatable_bytes() == 50 - 20
    gpu["get_per_process_memory_fraction"] = 0.25
    assert allocatable_bytes() == 30 - 20, "what the allocator holds already may be used"
    gpu["memory_snapshot"] = [
        {"segment_pool_id": (0, 0), "total_size": 20, "allocated_size": 16},
        {"segment_pool_id": (0, 1), "total_size": 10, "allocated_size": 4},
    ]
    assert allocatable_bytes() == 4, "but not what it holds for CUDA graphs"


# --- rows of fixed sizes ---


@pytest.fixture
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


@pytest.mark.usefixtures("attention")
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
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-6)
    assert captured
    torch.testing.assert_close(*(dict(one.policy.trainable()) for one in (fixed, plain)), rtol=0, atol=2e-5)


@pytest.mark.usefixtures("attention")
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
        one = micro_batch(samples, list(range(len(samples))), CPU)
        size = PaddedSize.of(one)
        padded = PaddedMicroBatch(size, CPU)
        padded.fill(one)
        assert size.tokens > one.ids.numel()
        assert padded.packing.queries_ends[-1] == size.tokens
        assert padded.packing.keys_ends[-1] <= size.keys
        assert len(padded.states_M) >= len(one.states_M)
        assert torch.equal(padded.states_M[: len(one.states_M)], one.states_M)
        assert (padded.states_M[len(one.states_M) :] >= one.ids.numel()).all()


@pytest.mark.usefixtures("attention")
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
