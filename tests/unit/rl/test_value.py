"""PPO: advantages and losses against the published formulas in float64, and the value function on the frozen base."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from qerl.models.blocks import noisy_norms
from qerl.models.loading import load_model
from qerl.models.lora import register_lora
from qerl.models.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rl.value import Moments, add_value, gae, is_value, terminal_rewards, value_adapter, value_loss, values, whiten
from qerl.rollout.sampler import Completion
from qerl.settings.run import AdapterSettings, NoiseSettings, PPOSettings
from tests.parity.family_models import perturbed
from tests.tiny import tiny_bases

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


def numpy_value_loss(values, old, returns, mask, clip):
    near = np.clip(values, old - clip, old + clip)
    return 0.5 * (np.maximum((values - returns) ** 2, (near - returns) ** 2) * mask).sum() / mask.sum()


@pytest.mark.parametrize("seed", [0, 1])
def test_value_loss_and_its_gradient(seed):
    old, moved, mask = ragged(seed)
    returns = torch.randn(old.shape, generator=torch.Generator().manual_seed(seed + 1))
    old, moved, returns, mask = (x.double() for x in (old, moved, returns, mask))
    values = (old + 0.5 * moved).requires_grad_()
    fixed = old, returns, mask
    loss, clipped = value_loss(values, *fixed, 0.2, mask.sum().item())
    loss.backward()
    expected = numpy_value_loss(*(x.detach().numpy() for x in (values, *fixed)), 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, *fixed, 0.2, mask.sum().item())[0], values)
    # Held back: the value has moved towards the return by more than the clip, so the gradient there is zero.
    still = (values.grad == 0) & mask.bool()
    assert 0 < clipped.item() == pytest.approx(still.sum().item() / mask.sum().item())
    assert not clipped.requires_grad


# --- the value function ---


CPU = torch.device("cpu")
PPO = PPOSettings(rank=4, alpha=8)
FORMATS = ["bf16", "nvfp4", "mxfp4", "nf4"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_bases(tmp_path_factory.mktemp("bases"), *FORMATS[1:])


def samples(count=5):
    generator = torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(2, 90, (length,), generator=generator).tolist()  # noqa: E731
    lengths = [(3 + i % 3, 1 + 2 * i % 7) for i in range(count)]
    return [Sample(draw(p), Completion(draw(c), [-1.0] * c, True), 0.0, 0.0) for p, c in lengths]


def batch(rows=None, drawn=None):
    drawn = drawn or samples()
    return micro_batch(drawn, list(range(len(drawn))) if rows is None else rows, CPU)


def make(checkpoints, weights="nvfp4", dtype="float32", value=True, **adapter):
    policy = with_adapter(checkpoints / weights, AdapterSettings(rank=4, **adapter), dtype, 0, CPU)
    if value:
        add_value(policy, PPO)
    return policy


def names(policy):
    return [name for name, _ in policy.trainable()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", FORMATS)
def test_the_policy_is_the_same_bit_by_bit_and_values_start_at_zero(checkpoints, weights, dtype):
    policy = make(checkpoints, weights, dtype, value=False)
    perturbed(policy, 0.2)
    before, prior = names(policy), logprobs_and_entropy(policy, batch(), 1.0)[0]
    add_value(policy, PPO)
    assert [name for name in names(policy) if not is_value(name)] == before
    assert torch.equal(logprobs_and_entropy(policy, batch(), 1.0)[0], prior)
    assert values(policy, batch()).abs().max() == 0
    perturbed(policy, 0.2, chosen=is_value)
    found = values(policy, batch())
    assert found.dtype == torch.float32
    assert found.shape == batch().mask_NT.shape
    assert torch.equal(found != 0, batch().mask_NT.bool())
    assert torch.equal(logprobs_and_entropy(policy, batch(), 1.0)[0], prior)
    assert all(parameter.dtype == torch.float32 for _, parameter in policy.trainable())


@pytest.mark.parametrize("weights", FORMATS)
def test_values_are_those_of_a_model_with_the_value_adapter_alone(checkpoints, tmp_path, weights):
    """Saved and read by stock PEFT on a base of its own: hidden states before each token, through the head."""
    policy = make(checkpoints, weights)
    perturbed(policy, 0.2)
    policy.save(tmp_path)
    lm = load_model(checkpoints / weights, torch.float32, CPU)
    config = register_lora(policy.peft.peft_config["value"])
    model = PeftModel.from_pretrained(lm, str(tmp_path / "value"), config=config)
    head = load_file(tmp_path / "value" / "value_head.safetensors")
    found = values(policy, batch())
    for row, sample in enumerate(samples()):
        ids = torch.tensor([sample.prompt + sample.completion.token_ids])
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        states = hidden[len(sample.prompt) - 1 : -1]
        expected = (states @ head["weight"].T + head["bias"])[:, 0]
        torch.testing.assert_close(found[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)


def test_what_is_trainable_never_changes(checkpoints):
    policy = make(checkpoints)
    expected = names(policy)
    assert sum(map(is_value, expected)) == 2 * 7 * 2 + 2
    with value_adapter(policy):
        assert names(policy) == expected
        with value_adapter(policy):
            pass
        assert policy.peft.active_adapter == "value"
    assert policy.peft.active_adapter == "default"
    with pytest.raises(KeyError), value_adapter(policy):
        raise KeyError
    assert policy.peft.active_adapter == "default"
    values(policy, batch())
    with policy.reference():
        pass
    assert names(policy) == expected


def gradients(policy, *losses):
    for _, parameter in policy.trainable():
        parameter.grad = None
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in policy.trainable() if p.grad is not None and p.grad.any()}


def test_the_two_losses_share_no_gradient_and_commute(checkpoints):
    policy = make(checkpoints)
    perturbed(policy, 0.2)
    of_policy = lambda: logprobs_and_entropy(policy, batch(), 1.0)[0].sum()  # noqa: E731
    of_values = lambda: values(policy, batch()).square().sum()  # noqa: E731
    policy_alone, values_alone = gradients(policy, of_policy()), gradients(policy, of_values())
    assert set(policy_alone) == {name for name in names(policy) if not is_value(name)}
    assert set(values_alone) == {name for name in names(policy) if is_value(name)}
    first, second = of_policy(), of_values()
    together = gradients(policy, first, second)
    torch.testing.assert_close(together, {**policy_alone, **values_alone}, rtol=0, atol=0)


def test_values_with_recomputed_blocks_have_the_same_gradient_or_are_refused(checkpoints):
    policy = make(checkpoints)
    perturbed(policy, 0.2)
    expected = gradients(policy, values(policy, batch()).square().sum())
    policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.lm.train()
    with pytest.raises(ValueError, match="inside value_adapter"):
        values(policy, batch())
    with value_adapter(policy):
        found = gradients(policy, values(policy, batch()).square().sum())
    torch.testing.assert_close(found, expected)


def test_the_value_function_reads_the_bases_norms_with_the_steps_noise(checkpoints):
    policy = make(checkpoints)
    perturbed(policy, 0.2, chosen=is_value)
    clean = values(policy, batch())
    perturbed(policy, 0.2, chosen=lambda name: "layernorm" in name)
    assert torch.equal(values(policy, batch()), clean)
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), 0)
    with noise.at(1, 10):
        noisy = values(policy, batch())
        assert all(norm.noise.any() for found in noisy_norms(policy.lm).values() for norm in found)
    assert torch.equal(values(policy, batch()), clean)
    assert not torch.equal(noisy, clean)
    # The same as weights w + z in the base.
    other = make(checkpoints, train_norms=False)
    perturbed(other, 0.2, chosen=is_value)
    torch.testing.assert_close(values(other, batch()), clean)
    with noise.at(1, 10), torch.no_grad():
        for [plain], norms in zip(noisy_norms(other.lm).values(), noisy_norms(policy.lm).values(), strict=True):
            plain.weight.add_(norms[0].noise)
    torch.testing.assert_close(values(other, batch()), noisy)
