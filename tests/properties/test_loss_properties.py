"""Losses, gradients and counts of random batches, cut at random, against loops over their formulas in float64."""

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.rl.losses import BatchSize, LossInputs, importance_weights, policy_loss
from qerl.rl.rewards import group_advantages
from qerl.settings.run import LossSettings

LONGEST = 7


@st.composite
def loss_settings(draw):
    name = draw(st.sampled_from(["grpo", "dapo", "dr_grpo", "gspo", "bnpo", "ppo"]))
    correction = ["off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
    return LossSettings(
        name=name,
        clip_low=draw(st.sampled_from([0.05, 0.2, 0.9])),
        clip_high=draw(st.sampled_from([0.05, 0.28, 4.0])),
        kl=draw(st.sampled_from([0.0, 0.04, 2.0])),
        entropy=draw(st.sampled_from([0.0, 0.3])),
        correction=draw(st.sampled_from(correction)),
        correction_cap=draw(st.sampled_from([1.1, 2.0, 50.0])),
    )


@st.composite
def batches(draw):
    """Log-probabilities of new, old, reference and sampling policy, entropies [5, N, T], advantages, lengths, cuts."""
    count = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, LONGEST), min_size=count, max_size=count))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.2, 1.0]))
    logprobs = spread * torch.randn(5, count, LONGEST, generator=generator, dtype=torch.float64) - 6
    advantages = torch.randn(count, LONGEST, generator=generator, dtype=torch.float64) * draw(
        st.sampled_from([0.0, 1.0])
    )
    cuts = draw(st.lists(st.integers(1, max(count - 1, 1)), unique=True, max_size=2))
    return logprobs, advantages, lengths, sorted({0, count, *(cut for cut in cuts if cut < count)})


def by_hand(logprobs, advantages, lengths, places, chosen):
    """The loss, its gradients by the new log-probabilities and entropies, and clipped and all ratios, by token."""
    new, old, reference, sampler, entropy = logprobs.tolist()
    gradient, of_entropy = torch.zeros(2, *logprobs[0].shape, dtype=torch.float64)
    low = high = ratios = loss = 0.0
    per_token = chosen.name != "gspo"
    for first, last in pairwise(places):
        part = sum(lengths[first:last])
        for n in range(first, last):
            length = lengths[n]
            mismatches = [old[n][t] - sampler[n][t] for t in range(length)]
            moved = [new[n][t] - old[n][t] for t in range(length)]
            if not per_token:
                moved = [sum(moved) / max(length, 1)] * length
            divisor = {
                "dapo": max(sum(lengths), 1),
                "ppo": max(sum(lengths), 1),
                "dr_grpo": len(lengths) * LONGEST,
                "bnpo": max(part, 1) * (len(places) - 1),
            }.get(chosen.name, max(length, 1) * len(lengths))
            kept = clipped_low = clipped_high = 0.0
            for t in range(length):
                ratio, advantage = math.exp(moved[t]), advantages[n][t if len(advantages[n]) > 1 else 0].item()
                is_low = ratio < 1 - chosen.clip_low and advantage < 0
                is_high = ratio > 1 + chosen.clip_high and advantage > 0
                bound = min(max(ratio, 1 - chosen.clip_low), 1 + chosen.clip_high)
                weight = importance(mismatches, t, chosen)
                away = reference[n][t] - new[n][t]
                term = -weight * min(ratio * advantage, bound * advantage)
                loss += (term + chosen.kl * (math.exp(away) - 1 - away) - chosen.entropy * entropy[n][t]) / divisor
                of_entropy[n, t] -= chosen.entropy / divisor
                slope = 0.0 if is_low or is_high else -weight * advantage * ratio / divisor
                gradient[n, t] += chosen.kl * (1 - math.exp(away)) / divisor + (slope if per_token else 0.0)
                kept += slope
                clipped_low, clipped_high = clipped_low + is_low, clipped_high + is_high
            if not per_token:  # each token has its share in the mean of the sequence
                gradient[n, :length] += kept / max(length, 1)
            share = 1.0 if per_token else 1 / max(length, 1)
            low, high = low + share * clipped_low, high + share * clipped_high
            ratios += length if per_token else 1
    return loss, gradient, of_entropy, (low, high, ratios)


def importance(mismatches, t, chosen):
    if chosen.correction == "off":
        return 1.0
    level, action = chosen.correction.split("-")
    weight = math.exp(mismatches[t] if level == "token" else sum(mismatches))
    if weight <= chosen.correction_cap:
        return weight
    return chosen.correction_cap if action == "truncate" else 0.0


@given(batch=batches(), chosen=loss_settings())
@settings(max_examples=150)
def test_loss_gradient_and_counts_of_micro_batches_are_those_of_the_formulas(batch, chosen):
    logprobs, advantages, lengths, places = batch
    if chosen.name != "ppo":
        advantages = advantages[:, :1]  # of the sequence
    mask = (torch.arange(LONGEST) < torch.tensor(lengths)[:, None]).double()
    new, old, reference, sampler, entropy = (part * mask for part in logprobs)
    new.requires_grad_(), entropy.requires_grad_()
    whole = BatchSize(len(lengths), sum(lengths), LONGEST, len(places) - 1)
    loss, counts = 0.0, torch.zeros(3, dtype=torch.float64)
    for first, last in pairwise(places):
        rows = slice(first, last)
        weights = importance_weights(old[rows], sampler[rows], mask[rows], chosen)
        kept = reference[rows] if chosen.kl else None
        inputs = LossInputs(new[rows], old[rows], advantages[rows], mask[rows], kept, weights, entropy[rows])
        made = policy_loss(inputs, chosen, whole)
        made.loss.backward()
        loss += made.loss.item()
        counts += torch.stack([made.clipped_low, made.clipped_high, made.ratios])
    expected, gradient, of_entropy, counted = by_hand(logprobs, advantages, lengths, places, chosen)
    assert math.isclose(loss, expected, rel_tol=1e-9, abs_tol=1e-12)
    torch.testing.assert_close(new.grad, gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(entropy.grad, of_entropy, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(counts, torch.tensor(counted, dtype=torch.float64), rtol=0, atol=1e-9)


REWARDS = st.sampled_from([0.0, 0.1, 1.0, 1.1, -3.0, 1e15])


@given(
    rewards=st.lists(REWARDS, min_size=2, max_size=9)
    | st.builds(lambda reward, count: [reward] * count, REWARDS, st.integers(2, 9)),
    scale=st.booleans(),
)
def test_advantages_are_those_of_exact_arithmetic_and_exactly_zero_for_equal_rewards(rewards, scale):
    found = group_advantages(torch.tensor([rewards]), scale)[0].double()
    exact = torch.tensor(rewards).double()
    deviation = exact.std().item() + 1e-4 if scale else 1.0
    expected = (exact - exact.mean()) / deviation
    if len(set(rewards)) == 1:
        assert not found.any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * (max(map(abs, rewards)) / deviation + 1))
