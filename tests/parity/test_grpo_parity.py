"""Loss, gradient, advantages and logged figures against TRL's GRPOTrainer on the same batch."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from qerl.config import LossSettings
from qerl.models.policy import Policy
from qerl.rl.advantages import group_advantages
from qerl.rl.batches import Sample, logprobs_and_entropy, micro_batches
from qerl.rl.losses import grpo_loss
from qerl.rollout.sampler import Completion
from tests.tiny import tiny_qwen2

TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("dense"), dtype=torch.float32)


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    """TRL on its own copy of the model."""
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=TEMPERATURE,
        num_generations=4,
        per_device_train_batch_size=8,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = Dataset.from_dict({"prompt": ["a"] * 8})
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), arguments, data, None, tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch(seed: int) -> tuple[list[Sample], torch.Tensor]:
    """Two groups of four completions of different lengths, one group with equal rewards; old log-probabilities."""
    numbers = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([[1.1, 0.0, 0.1, 1.0], [0.1, 0.1, 0.1, 0.1]])
    advantages = group_advantages(rewards).flatten().tolist()
    samples = []
    for i, advantage in enumerate(advantages):
        prompt = torch.randint(2, 100, (3 + 4 * (i // 4),), generator=numbers).tolist()
        ids = torch.randint(2, 100, (1 + int(torch.randint(9, (), generator=numbers)),), generator=numbers).tolist()
        samples.append(Sample(prompt, Completion(ids, [-1.0] * len(ids), True), advantage, 0.0))
    return samples, torch.randn(8, 16, generator=numbers)


def trl_inputs(samples: list[Sample], old: torch.Tensor) -> dict[str, torch.Tensor]:
    """TRL's layout: prompts padded on the left, completions on the right."""
    longest = max(len(s.prompt) for s in samples)
    width = max(len(s.completion.token_ids) for s in samples)
    pads = [longest - len(s.prompt) for s in samples]
    tails = [width - len(s.completion.token_ids) for s in samples]
    return {
        "prompt_ids": torch.tensor([[0] * p + s.prompt for p, s in zip(pads, samples, strict=True)]),
        "prompt_mask": torch.tensor([[0] * p + [1] * (longest - p) for p in pads]),
        "completion_ids": torch.tensor([s.completion.token_ids + [0] * t for t, s in zip(tails, samples, strict=True)]),
        "completion_mask": torch.tensor([[1] * (width - t) + [0] * t for t in tails]),
        "advantages": torch.tensor([s.advantage for s in samples]),
        "old_per_token_logps": old[:, :width],
        "num_items_in_batch": torch.tensor(sum(width - t for t in tails)),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_loss_gradient_and_entropy_equal_trl(trainer, checkpoint, seed, max_tokens):
    samples, noise = batch(seed)
    ours = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    policy = Policy(ours, None)
    inputs = trl_inputs(samples, noise)
    with torch.no_grad():
        clean, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
        )
    # Ratios on both sides of the clip, for either sign of the advantage.
    inputs["old_per_token_logps"] = clean + 0.3 * noise[:, : clean.shape[1]]
    trainer.model.zero_grad()
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()
    loss = torch.zeros(())
    entropy = tokens = 0.0
    for part in micro_batches(samples, max_tokens, torch.device("cpu")):
        logprobs, entropies = logprobs_and_entropy(policy, part, TEMPERATURE)
        old = inputs["old_per_token_logps"][part.index, : logprobs.shape[1]]
        piece = grpo_loss(logprobs, old, part.advantages_N, part.mask_NT, LossSettings(), len(samples))
        piece.backward()
        loss += piece.detach()
        entropy, tokens = entropy + entropies.sum().item(), tokens + part.mask_NT.sum().item()
    assert abs(theirs.item()) > 1e-3
    torch.testing.assert_close(loss, theirs.detach(), atol=1e-6, rtol=0)
    for (name, mine), other in zip(ours.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert entropy / tokens == pytest.approx(trainer._metrics["train"]["entropy"][-1], abs=1e-5)


def test_advantages_are_normalised_in_their_group():
    rewards = torch.tensor([[1.1, 0.0, 0.1, 1.0], [0.1, 0.1, 0.1, 0.1]])
    advantages = group_advantages(rewards)
    assert torch.equal(advantages[1], torch.zeros(4))
    expected = (rewards[0] - rewards[0].mean()) / (rewards[0].std() + 1e-4)
    torch.testing.assert_close(advantages[0], expected)
