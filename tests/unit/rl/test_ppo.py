"""Advantages and losses of PPO against the published formulas, written out in float64."""

import numpy as np
import pytest
import torch

from qerl.rl.losses import BatchSize, LossInputs, policy_loss
from qerl.rl.value import Moments, gae, terminal_rewards, value_loss, whiten
from qerl.settings.run import LossSettings, PPOSettings

CORNERS = [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 1.0), (0.9, 0.0), (0.0, 0.95), (0.0, 0.0)]


def ragged(seed: int, rows: int = 6, longest: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards at every token, values and mask; one row is empty, one full, padding holds garbage."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, longest
    mask = (torch.arange(longest) < lengths[:, None]).float()
    return *torch.randn(2, rows, longest, generator=generator), mask


def double_sum(rewards, values, mask, gamma, lam):
    """Eq. 16 for each token: sum over l of (gamma lam)^l delta_{t+l} over what is left of the episode."""
    rewards, values = (x.double().numpy() for x in (rewards, values))
    advantages = np.zeros_like(rewards)
    for n in range(len(rewards)):
        steps = np.flatnonzero(mask[n].numpy())
        r, v = rewards[n, steps], np.append(values[n, steps], 0.0)
        delta = r + gamma * v[1:] - v[:-1]
        for t in range(len(steps)):
            advantages[n, steps[t]] = sum((gamma * lam) ** l * delta[t + l] for l in range(len(steps) - t))  # noqa: E741
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), CORNERS)
@pytest.mark.parametrize("holes", [False, True])
def test_advantages_are_the_published_sum(gamma, lam, holes):
    rewards, values, mask = ragged(seed=int(10 * gamma + 100 * lam))
    if holes:
        mask = mask * (torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) > 0.3)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = double_sum(rewards, values, mask, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, atol=2e-6)
    np.testing.assert_allclose(returns.numpy(), (expected + values.double().numpy()) * mask.numpy(), atol=2e-6)


def test_advantages_depend_on_nothing_behind_the_last_token_and_carry_no_gradient():
    rewards, values, mask = ragged(5)
    expected = gae(rewards, values, mask, 0.9, 0.8)
    garbage = torch.where(mask.bool(), 0.0, torch.nan)
    found = gae(rewards + garbage, (values + garbage).requires_grad_(), mask, 0.9, 0.8)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


def test_the_reward_stands_at_the_last_token():
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    found = terminal_rewards(torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0]), mask)
    expected = [[0.0, 0, 1, 0], [-2, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 5, 0]]
    assert found.tolist() == expected


# --- whitening ---


def test_whitened_over_the_whole_batch_however_it_is_split():
    advantages, _, mask = ragged(6, rows=12)
    advantages = 1000 + 3 * advantages
    parts = [Moments.of(advantages[i : i + 5], mask[i : i + 5]) for i in (0, 5, 10)]
    found = torch.cat([whiten(advantages[i : i + 5], mask[i : i + 5], sum(parts, Moments())) for i in (0, 5, 10)])
    chosen = advantages[mask.bool()].double().numpy()
    expected = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found[mask.bool()].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not found[~mask.bool()].any()
    assert found.dtype == torch.float32


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_advantages_or_too_few_become_zero(count):
    mask = (torch.arange(6) < count).float()[None]
    advantages = torch.full((1, 6), 0.1)
    assert whiten(advantages, mask, Moments.of(advantages, mask)).abs().max() < 1e-6


# --- losses ---


def numpy_policy_loss(logprobs, old, advantages, mask, low, high):
    """Eq. 7 of arXiv 1707.06347 as a loss, averaged over tokens."""
    ratio = np.exp(logprobs - old)
    return -(np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages) * mask).sum() / mask.sum()


def numpy_value_loss(values, old, returns, mask, clip):
    near = np.clip(values, old - clip, old + clip)
    return 0.5 * (np.maximum((values - returns) ** 2, (near - returns) ** 2) * mask).sum() / mask.sum()


def numeric_gradient(function, x, step=1e-6):
    """Central differences."""
    gradient = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        bump = np.zeros_like(x)
        bump[place] = step
        gradient[place] = (function(x + bump) - function(x - bump)) / (2 * step)
    return gradient


def batch64(seed):
    first, second, mask = ragged(seed)
    third = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed + 1))
    return [x.double() for x in (first, second, third, mask)]


@pytest.mark.parametrize("seed", [0, 1])
def test_value_loss_and_its_gradient(seed):
    old, moved, returns, mask = batch64(seed)
    values = (old + 0.5 * moved).requires_grad_()
    loss, clipped = value_loss(values, old, returns, mask, 0.2, mask.sum().item())
    loss.backward()
    fixed = [x.numpy() for x in (old, returns, mask)]
    function = lambda x: numpy_value_loss(x, *fixed, 0.2)  # noqa: E731
    assert loss.item() == pytest.approx(function(values.detach().numpy()), rel=1e-12)
    np.testing.assert_allclose(values.grad.numpy(), numeric_gradient(function, values.detach().numpy()), atol=1e-8)
    # Held back: the value has moved towards the return by more than the clip, so the gradient there is zero.
    still = (values.grad == 0) & mask.bool()
    assert 0 < clipped.item() == pytest.approx(still.sum().item() / mask.sum().item())
    assert not clipped.requires_grad


@pytest.mark.parametrize("seed", [0, 1])
def test_policy_loss_with_advantages_of_tokens_and_its_gradient(seed):
    old, moved, advantages, mask = batch64(seed)
    logprobs = (old + 0.4 * moved).requires_grad_()
    settings = LossSettings(name="ppo", clip_low=0.2, clip_high=0.3)
    whole = BatchSize(len(mask), mask.sum().item(), mask.shape[1], 1)
    outputs = policy_loss(LossInputs(logprobs, old, advantages, mask), settings, whole)
    loss = outputs.loss
    loss.backward()
    fixed = [x.numpy() for x in (old, advantages, mask)]
    function = lambda x: numpy_policy_loss(x, *fixed, 0.2, 0.3)  # noqa: E731
    assert loss.item() == pytest.approx(function(logprobs.detach().numpy()), rel=1e-12)
    np.testing.assert_allclose(logprobs.grad.numpy(), numeric_gradient(function, logprobs.detach().numpy()), atol=1e-8)
    # Held back: the ratio has left the clip on the side that the advantage favours, so the gradient there is zero.
    still = (logprobs.grad == 0) & mask.bool()
    rising = advantages > 0
    counts = (outputs.clipped_low, outputs.clipped_high, outputs.ratios)
    assert [x.item() for x in counts] == [(still & ~rising).sum(), (still & rising).sum(), mask.sum()]
    assert min(outputs.clipped_low, outputs.clipped_high) > 0
    assert not any(count.requires_grad for count in counts)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "bnpo"])
def test_equal_advantages_of_all_tokens_are_that_of_the_sequence(name):
    old, moved, advantages, mask = batch64(2)
    whole = BatchSize(len(mask), mask.sum().item(), mask.shape[1], 1)
    of_rows, settings = advantages[:, 0], LossSettings(name=name)
    by_row, by_token = (
        policy_loss(LossInputs(old + moved, old, advantages, mask), settings, whole).loss
        for advantages in (of_rows[:, None], of_rows[:, None].expand_as(mask))
    )
    torch.testing.assert_close(by_token, by_row)


def test_losses_of_micro_batches_add_up():
    old, moved, other, mask = batch64(3)
    new, tokens, settings = old + 0.5 * moved, mask.sum().item(), LossSettings(name="ppo")
    whole = BatchSize(len(mask), tokens, mask.shape[1], 2)
    rows = [slice(0, 2), slice(2, None)]
    values = [value_loss(new[i], old[i], other[i], mask[i], 0.2, tokens) for i in rows]
    inputs = [LossInputs(*(x[i] for x in (new, old, other, mask))) for i in (*rows, slice(None))]
    *policies, total = (policy_loss(one, settings, whole).loss for one in inputs)
    for index, expected in enumerate(value_loss(new, old, other, mask, 0.2, tokens)):
        torch.testing.assert_close(sum(part[index] for part in values), expected)
    torch.testing.assert_close(sum(policies), total)


def test_the_first_update_is_not_clipped():
    """V = V_old and pi = pi_old: plain regression to the return and the plain policy gradient."""
    old, _, other, mask = batch64(4)
    tokens = mask.sum()
    values, logprobs = old.clone().requires_grad_(), old.clone().requires_grad_()
    loss, clipped = value_loss(values, old, other, mask, PPOSettings().value_clip, tokens.item())
    whole = BatchSize(len(mask), tokens.item(), mask.shape[1], 1)
    policy = policy_loss(LossInputs(logprobs, old, other, mask), LossSettings(name="ppo"), whole)
    (loss + policy.loss).backward()
    assert clipped == policy.clipped_low == policy.clipped_high == 0
    torch.testing.assert_close(values.grad, (old - other) * mask / tokens)
    torch.testing.assert_close(logprobs.grad, -other * mask / tokens)
