"""The value function on the policy's frozen base: it learns, and the policy's output doesn't change."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from qerl.models.loading import load_model
from qerl.models.lora import register_lora
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rl.value import add_value, is_value, value_adapter, value_loss, values
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import Completion, SamplingParams
from qerl.settings.run import AdapterSettings, NoiseSettings, PPOSettings
from tests.conftest import in_nightly
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
PPO = PPOSettings(rank=4, alpha=8)
FORMATS = ["bf16", "nvfp4", "mxfp4", "nf4"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    dense = tiny_qwen2(folder / "bf16")
    for weights in FORMATS[1:]:
        quantize_checkpoint(dense, folder / weights, weights)
    return folder


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


def move(policy, chosen, seed=1):
    """Add random values to the parameters that `chosen` accepts, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if chosen(name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def names(policy):
    return [name for name, _ in policy.trainable()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", FORMATS)
def test_the_policy_is_the_same_bit_by_bit_and_values_start_at_zero(checkpoints, weights, dtype):
    policy = make(checkpoints, weights, dtype, value=False)
    move(policy, lambda name: True)
    before, prior = names(policy), logprobs_and_entropy(policy, batch(), 1.0)[0]
    add_value(policy, PPO)
    assert [name for name in names(policy) if not is_value(name)] == before
    assert torch.equal(logprobs_and_entropy(policy, batch(), 1.0)[0], prior)
    assert values(policy, batch()).abs().max() == 0
    move(policy, is_value)
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
    move(policy, lambda name: True)
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


def test_a_saved_policy_is_read_as_without_a_value_function(checkpoints, tmp_path):
    policy = make(checkpoints)
    move(policy, lambda name: True)
    policy.save(tmp_path)
    loaded = load_policy(checkpoints / "nvfp4", tmp_path, "float32", CPU)
    assert list(loaded.peft.peft_config) == ["default"]
    expected = logprobs_and_entropy(policy, batch(), 1.0)[0]
    torch.testing.assert_close(logprobs_and_entropy(loaded, batch(), 1.0)[0], expected)
    assert not any("value" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    plain = make(checkpoints, value=False)
    plain.save(tmp_path / "plain")
    assert not (tmp_path / "plain" / "value").exists()


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
    move(policy, lambda name: True)
    of_policy = lambda: logprobs_and_entropy(policy, batch(), 1.0)[0].sum()  # noqa: E731
    of_values = lambda: values(policy, batch()).square().sum()  # noqa: E731
    policy_alone, values_alone = gradients(policy, of_policy()), gradients(policy, of_values())
    assert set(policy_alone) == {name for name in names(policy) if not is_value(name)}
    assert set(values_alone) == {name for name in names(policy) if is_value(name)}
    first, second = of_policy(), of_values()
    together = gradients(policy, first, second)
    for name, gradient in {**policy_alone, **values_alone}.items():
        assert torch.equal(together[name], gradient), name


def test_values_with_recomputed_blocks_have_the_same_gradient_or_are_refused(checkpoints):
    policy = make(checkpoints)
    move(policy, lambda name: True)
    expected = gradients(policy, values(policy, batch()).square().sum())
    policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.lm.train()
    with pytest.raises(ValueError, match="inside value_adapter"):
        values(policy, batch())
    with value_adapter(policy):
        found = gradients(policy, values(policy, batch()).square().sum())
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_the_sampler_does_not_see_the_value_function(checkpoints):
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=6, count=2, seed=3)
    prompts = [[5, 6, 7], [8, 9]]
    plain, policy = make(checkpoints, value=False), make(checkpoints)
    move(policy, is_value)
    values(policy, batch())
    assert EagerSampler(policy).generate(prompts, params) == EagerSampler(plain).generate(prompts, params)


def test_the_value_function_reads_the_bases_norms_with_the_steps_noise(checkpoints):
    policy = make(checkpoints)
    move(policy, is_value)
    clean = values(policy, batch())
    move(policy, lambda name: "layernorm" in name)
    assert torch.equal(values(policy, batch()), clean)
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), 0)
    with noise.at(1, 10):
        noisy = values(policy, batch())
        norms = [m for _, _, found in noise._norms() for m in found]
        assert all(norm.noise.any() for norm in norms)
    assert torch.equal(values(policy, batch()), clean)
    assert not torch.equal(noisy, clean)
    # The same as weights w + z in the base.
    other = make(checkpoints, train_norms=False)
    move(other, is_value)
    torch.testing.assert_close(values(other, batch()), clean)
    with noise.at(1, 10), torch.no_grad():
        pairs = zip(Noise(other.lm, noise.settings, 0)._norms(), noise._norms(), strict=True)
        for (_, _, [plain]), (_, _, noisy_norms) in pairs:
            plain.weight.add_(noisy_norms[0].noise)
    torch.testing.assert_close(values(other, batch()), noisy)


def test_gradients_of_micro_batches_add_up(checkpoints):
    policy = make(checkpoints)
    move(policy, lambda name: True)
    tokens = batch().mask_NT.sum().item()

    def loss(part):
        found = values(policy, part)
        return value_loss(found, found.detach() + 0.1, torch.ones_like(found), part.mask_NT, 0.2, tokens)[0]

    whole = gradients(policy, loss(batch()))
    parts = gradients(policy, loss(batch([0, 3])), loss(batch([1, 2, 4])))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "dtype"), [("nvfp4", "bfloat16"), *in_nightly(("nvfp4", "float32"), ("bf16", "bfloat16"))]
)
def test_it_learns_a_function_of_the_prompt(checkpoints, weights, dtype):
    """The value of a state is the parity of the prompt's first token."""
    policy = make(checkpoints, weights, dtype)
    drawn = samples(16)
    part = batch(drawn=drawn)
    targets = torch.tensor([[float(s.prompt[0] % 2)] for s in drawn]) * part.mask_NT
    assert 0.2 < targets[:, 0].mean() < 0.8
    parameters = [p for name, p in policy.trainable() if is_value(name)]
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for _ in range(40):
        optimizer.zero_grad()
        found = values(policy, part)
        loss, _ = value_loss(found, found.detach(), targets, part.mask_NT, 0.2, part.mask_NT.sum().item())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
