"""Updates without silent completions against updates with them, which a KL weight of nearly zero makes; statistics."""

import copy
import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch

from qerl.models.linear import POLICY_ADAPTER
from qerl.models.policy import Policy
from qerl.rl.losses import ratio_sums
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rl.parallel import start_processes
from qerl.rl.update import Updater, UpdateStats, find_silent, warmup_cosine
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.unit.rl.tiny_trainer import UPDATE, batch, updater

#: A weight whose term rounds away, but with which every completion has a gradient.
FULL = 1e-30


def gradients(made: Updater) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in made.policy.trainable()}


LOSSES = [
    *({"name": name, "mask_truncated": mask} for name in ("grpo", "dapo", "bnpo") for mask in (False, True)),
    {"name": "dr_grpo"},
    {"name": "gspo", "updates_per_rollout": 2, "clip_low": 1e-4, "clip_high": 1e-4},
    {"name": "grpo", "updates_per_rollout": 3, "correction": "token-mask", "clip_low": 1e-3, "clip_high": 1e-3},
    {"name": "dapo", "correction": "sequence-truncate"},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_gradient_loss_and_clipping_are_those_of_all_completions(checkpoints, loss):
    """Several micro-batches, dropout, updates on one rollout and corrections take part."""
    full, short = updater(checkpoints, **loss, kl=FULL), updater(checkpoints, **loss, silent_sample=1.0)
    expected, found = full.update(1, batch()), short.update(1, batch())
    assert (expected["silent/completions"], expected["silent/sampled"]) == (0, 0)
    assert found["silent/completions"] == (13 if loss.get("mask_truncated") else 10)
    assert loss.get("updates_per_rollout", 1) == 1 or found["clip_ratio/low"] + found["clip_ratio/high"] > 0
    # Ratios of the first update are 1 to the bit; a correction's weights are as exact as log-probabilities.
    assert found["loss"] == (pytest.approx(expected["loss"], rel=1e-5) if "correction" in loss else expected["loss"])
    for key in ("grad_norm", "entropy", "mismatch/kl", "mismatch/max_ratio", "ess/tokens", "ess/sequences"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    for key in ("clip_ratio/low", "clip_ratio/high"):
        assert found[key] == expected[key]
    assert all(gradient.any() for gradient in gradients(short).values())
    torch.testing.assert_close(gradients(short), gradients(full), rtol=1e-4, atol=1e-7)


def tokens_read(made: Updater, samples: list[Sample]) -> dict[bool, int]:
    """The tokens of the forward passes of an update, with and without a gradient."""
    read = {True: 0, False: 0}

    def count(module, inputs):
        read[torch.is_grad_enabled()] += inputs[0].numel()

    hook = made.policy.lm.get_input_embeddings().register_forward_pre_hook(count)
    made.update(1, samples)
    hook.remove()
    return read


def test_only_a_sample_of_silent_completions_is_read_and_that_without_gradient(checkpoints):
    """The row of a group's teaching completions has a gradient; that of its sampled ones has none."""
    samples = batch()
    made = updater(checkpoints, silent_sample=0.3)
    teaching = [i for i, sample in enumerate(samples) if sample.advantage]
    sampled = find_silent(samples, made.settings, 1).sampled
    assert (len(teaching), len(sampled)) == (10, 3)
    assert tokens_read(made, samples) == {True: tokens_of(samples, teaching), False: tokens_of(samples, sampled)}


def tokens_of(samples: list[Sample], index: list[int]) -> int:
    """Each group's prompt once, and its completions without their last tokens."""
    groups = {i // 4 for i in index}
    completions = sum(len(samples[i].completion.token_ids) - 1 for i in index)
    return sum(len(samples[4 * group].prompt) for group in groups) + completions


def entropies(policy: Policy, samples: list[Sample]) -> list[float]:
    """The sum over tokens of each completion's entropy."""
    alone = [micro_batch(samples, [i], policy.device) for i in range(len(samples))]
    with torch.no_grad():
        return [logprobs_and_entropy(policy, one, 1.0)[1].sum().item() for one in alone]


def test_the_sample_stands_for_all_silent_completions_in_the_entropy(checkpoints):
    samples, made = batch(), updater(checkpoints, silent_sample=0.5)
    of_each = entropies(made.policy, samples)
    lengths = [len(sample.completion.token_ids) for sample in samples]
    sampled = find_silent(samples, made.settings, 1).sampled
    made.policy.lm.eval()
    for module in made.policy.lm.modules():
        if type(module).__name__ == "KeyedDropout":
            module.p = 0.0
    row = made.update(1, samples)
    mean = sum(of_each[i] for i in sampled) / sum(lengths[i] for i in sampled)
    teaching = [i for i, sample in enumerate(samples) if sample.advantage]
    silent = sum(lengths) - sum(lengths[i] for i in teaching)
    assert row["silent/entropy"] == pytest.approx(mean, rel=1e-6)
    expected = (sum(of_each[i] for i in teaching) + silent * mean) / sum(lengths)
    assert row["entropy"] == pytest.approx(expected, rel=1e-6)
    assert (row["silent/completions"], row["silent/sampled"]) == (10, 5)


def test_a_step_without_any_gradient_decays_weights_and_follows_momentum_as_before(checkpoints):
    """The step of torch's AdamW on gradients of zero, after a step with momentum."""
    made = updater(checkpoints)
    made.update(1, batch())
    expected = {name: p.detach().clone().requires_grad_() for name, p in made.policy.trainable()}
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
    )
    row = made.update(2, batch(advantages=[[0.0] * 4] * 5))
    state = copy.deepcopy(made.optimizer.state_dict())
    assert (row["loss"], row["grad_norm"], row["silent/completions"], row["silent/sampled"]) == (0, 0, 20, 3)
    again = updater(checkpoints)
    again.update(1, batch())
    oracle.load_state_dict(again.optimizer.state_dict())
    for group, now in zip(oracle.param_groups, state["param_groups"], strict=True):
        group["lr"] = now["lr"]
    for parameter in expected.values():
        parameter.grad = torch.zeros_like(parameter)
    oracle.step()
    assert any(POLICY_ADAPTER in name for name in expected)
    torch.testing.assert_close(dict(made.policy.trainable()), expected, rtol=0, atol=0)


def test_what_is_silent_and_which_are_sampled():
    samples = batch()
    find = lambda step=1, seed=0, **loss: find_silent(  # noqa: E731
        samples, parse(RunSettings, {**UPDATE, "seed": seed, "loss": loss}, "test"), step
    )
    silent = {4, 5, 6, 7, 9, 11, 12, 13, 14, 15}
    assert find().index == silent
    assert find().tokens == sum(len(samples[i].completion.token_ids) for i in silent)
    assert find(mask_truncated=True).index == silent | {2, 10, 18}
    for none in (find(kl=0.1), find(name="ppo")):
        assert (none.index, none.sampled, none.tokens) == (frozenset(), [], 0)
    # An eighth of ten is rounded up; the choice is one of seed and step, without repetition and in order.
    drawn = [find(step, seed).sampled for step in range(1, 30) for seed in (0, 1)]
    assert all(len(one) == 2 and set(one) < silent and one[0] < one[1] for one in drawn)
    assert set().union(*drawn) == silent
    assert [find(step).sampled for step in range(1, 30)] == drawn[::2] != drawn[1::2]
    assert find(silent_sample=1.0).sampled == sorted(silent)


#: The only teaching completions fit into one micro-batch: a second process has none.
LONELY = [[0.0] * 4, [0.0] * 4, [1.0, -1.0, 0.0, 0.0]]


def record_updates(checkpoints, folder) -> None:
    """Write metrics and gradients of an update in which a process has no gradient, and of one in which none has."""
    made = updater(checkpoints, updates_per_rollout=2)
    rows = [made.update(1, batch(advantages=LONELY))]
    lonely = gradients(made)
    rows.append(made.update(2, batch(advantages=[[0.0] * 4] * 3)))
    weights = {name: p.detach() for name, p in made.policy.trainable()}
    torch.save((rows, lonely, weights), folder / f"{made.processes.count}-{made.processes.rank}.pt")


def test_a_process_without_work_takes_part(checkpoints, tmp_path, forking):
    for count in (1, 2):
        start_processes(count, record_updates, checkpoints, tmp_path) or record_updates(checkpoints, tmp_path)
    (rows, lonely, weights), *others = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert rows[0]["grad_norm"] > 0 == rows[1]["grad_norm"]
    for other_rows, other_lonely, other_weights in others:
        for row, other in zip(rows, other_rows, strict=True):
            assert other == pytest.approx(row, rel=1e-5, abs=1e-9)
        torch.testing.assert_close(other_lonely, lonely, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", [{"name": "grpo", "kl": 0.1}, {"name": "gspo"}, {"name": "ppo"}], ids=str)
@pytest.mark.parametrize("lengths", [(0, 3), (0, 0)])
def test_completions_without_a_token_have_no_part_in_an_update(checkpoints, loss, lengths):
    made = updater(checkpoints, **loss)
    samples = [
        Sample([3, 4], Completion([7] * length, [-3.0] * length, True), 1.0, 1.0 - 2 * place)
        for place, length in enumerate(lengths)
    ]
    metrics = made.update(1, samples)
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["grad_norm"] > 0) == (max(lengths) > 0)
    assert metrics["entropy"] > 0 or not max(lengths)
    assert all(parameter.isfinite().all() for _, parameter in made.policy.trainable())


@pytest.mark.parametrize("loss", [{}, {"name": "ppo"}], ids=str)
def test_a_dry_run_changes_no_update(checkpoints, loss):
    found = []
    for compiled in (False, True):
        one = updater(checkpoints, **loss)
        if compiled:
            one._compile()
        metrics = one.update(1, batch())
        found.append((metrics, [weight.detach().clone() for _, weight in one.policy.trainable()]))
    (metrics, weights), (after_metrics, after_weights) = found
    assert metrics == after_metrics
    assert all(torch.equal(before, after) for before, after in zip(weights, after_weights, strict=True))


def test_learning_rate_warms_up_and_decays_to_zero():
    rates = [warmup_cosine(0.1, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 1e-3


# --- statistics of updates ---


NAMES = [field.name for field in fields(UpdateStats)]


def numbered(start=1.0):
    return UpdateStats(**{name: start + place for place, name in enumerate(NAMES)})


def test_a_sample_stands_for_all_in_sums_over_tokens_and_over_sequences():
    """Half of the tokens in a third of the sequences; counts of clipped ratios and the loss stay out."""
    found = numbered().standing_for(2 * int(numbered().tokens), 3 * int(numbered().sequences))
    doubled = {"tokens", "entropy", "mismatch_kl", "token_ratios", "token_squares"}
    tripled = {"sequences", "sequence_ratios", "sequence_squares"}
    for name in NAMES:
        factor = 2 if name in doubled else 3 if name in tripled else 0
        expected = factor * getattr(numbered(), name)
        assert getattr(found, name) == (numbered().max_ratio if name == "max_ratio" else expected), name
    assert UpdateStats().standing_for(0, 0) == UpdateStats()


def test_effective_sample_sizes_are_those_of_the_definition():
    """Two micro-batches, in numpy: the share (sum w)^2 / (n sum w^2) of tokens and of sequences."""
    generator = np.random.default_rng(1)
    trainer, sampler = generator.normal(-1, 0.5, size=(2, 6, 5))
    mask = (np.arange(5) < generator.integers(1, 6, size=(6, 1))).astype(float)
    stats = UpdateStats()
    for rows in (slice(0, 2), slice(2, 6)):
        sums = ratio_sums(*(torch.tensor(values[rows], dtype=torch.float64) for values in (trainer, sampler, mask)))
        stats += UpdateStats(**sums, tokens=mask[rows].sum(), sequences=len(mask[rows]))
    tokens = np.exp(trainer - sampler)[mask > 0]
    sequences = np.exp(((trainer - sampler) * mask).sum(1))
    metrics = stats.metrics()
    assert metrics["ess/tokens"] == pytest.approx(tokens.sum() ** 2 / (len(tokens) * (tokens**2).sum()))
    assert metrics["ess/sequences"] == pytest.approx(sequences.sum() ** 2 / (6 * (sequences**2).sum()))


def test_a_ratio_beyond_floats_is_cut():
    sums = ratio_sums(torch.zeros(1, 2), torch.full((1, 2), -500.0), torch.ones(1, 2))
    assert np.isfinite([*sums.values()]).all()
