"""Loss, gradient, advantages and logged figures against TRL's GRPOTrainer on the same batch."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.models.policy import Policy
from qerl.rl.losses import BatchSize, LossInputs, importance_weights, policy_loss
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch, split
from qerl.rl.rewards import group_advantages
from qerl.rollout.sampler import Completion
from qerl.settings.run import LossSettings
from tests.conftest import in_nightly
from tests.tiny import tiny_qwen2

TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("dense"), dtype=torch.float32)


LONGEST = 12
#: How TRL names each loss.
IN_TRL = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
}


@pytest.fixture(scope="module", params=list(IN_TRL))
def loss_name(request):
    return request.param


@pytest.fixture(scope="module", params=[0.0, 0.05])
def kl(request):
    return request.param


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory, loss_name, kl):
    """A TRL trainer on its own copy of the model."""
    from trl import GRPOConfig, GRPOTrainer  # imports vLLM, too

    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        **IN_TRL[loss_name],
        beta=kl,
        use_bias_correction_kl=False,  # the paper's Eq. 3 has the plain term
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=TEMPERATURE,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=LONGEST,
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
        samples.append(Sample(prompt, Completion(ids, [-1.0] * len(ids), i % 3 > 0), 0.0, advantage))
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


def trl_logprobs(trainer, inputs):
    with torch.no_grad():
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
        )
    return logprobs


CORRECTIONS = ["off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
#: Each correction, with truncated completions masked or not, and the batch split or not; in nightly runs all pairs.
PAIRS = [
    [
        (correction, bool(masked), 40 if (number + masked) % 2 else 10_000)
        for number, correction in enumerate(CORRECTIONS)
        for masked in ((number + other) // 2 % 2,)
    ]
    for other in (0, 2)
]


@pytest.mark.parametrize(("correction", "mask_truncated", "max_tokens"), [*PAIRS[0], *in_nightly(*PAIRS[1])])
def test_loss_and_gradient_equal_trl(trainer, checkpoint, loss_name, kl, max_tokens, mask_truncated, correction):
    if loss_name == "bnpo" and max_tokens < 10_000:
        pytest.skip("bnpo depends on how the batch is split, and TRL's batch is whole")
    samples, noise = batch(seed=3)
    inputs = trl_inputs(samples, noise)
    clean = trl_logprobs(trainer, inputs)
    width = clean.shape[1]
    # Ratios on both sides of the clip, for either sign of the advantage.
    spread = 1.5 if loss_name == "gspo" else 0.3  # a sequence's mean varies less than its tokens
    inputs["old_per_token_logps"] = clean + spread * noise[:, :width]
    inputs["ref_per_token_logps"] = clean - 0.2 * noise[:, :width].flip(0)
    sampled = inputs["old_per_token_logps"] + 0.4 * noise[:, :width].flip(1)
    if mask_truncated:
        inputs["completion_mask"] = (
            inputs["completion_mask"] * torch.tensor([s.completion.finished for s in samples])[:, None]
        )
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    settings = LossSettings(
        name=loss_name, kl=kl, mask_truncated=mask_truncated, correction=correction, correction_cap=1.2
    )
    inputs["importance_sampling_ratio"] = trl_ratio(inputs, sampled, settings)
    trainer.use_vllm = correction != "off"
    trainer.model.zero_grad()
    theirs = trainer._compute_loss(trainer.model, inputs)
    trainer.use_vllm = False
    theirs.backward()
    ours = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    loss, counts = our_loss(Policy(ours, None), samples, inputs, sampled, settings, max_tokens)
    assert abs(theirs.item()) > 1e-4
    torch.testing.assert_close(loss, theirs.detach(), atol=1e-6, rtol=0)
    for (name, mine), other in zip(ours.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    low, high, ratios = counts.tolist()
    assert mask_truncated or min(low, high) > 0
    assert low / ratios == pytest.approx(logged["clip_ratio/low_mean"], abs=1e-6)
    assert high / ratios == pytest.approx(logged["clip_ratio/high_mean"], abs=1e-6)


def trl_ratio(inputs, sampled, settings):
    """The importance ratio as TRL's `vllm_importance_sampling_mode` makes it, written from its documentation."""
    difference = (inputs["old_per_token_logps"] - sampled) * inputs["completion_mask"]
    if settings.correction.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if settings.correction.endswith("truncate"):
        return ratio.clamp(max=settings.correction_cap)
    return torch.where(ratio > settings.correction_cap, 0.0, ratio)


def our_loss(policy, samples, inputs, sampled, settings, max_tokens):
    """Loss and clipped ratios of the batch from its micro-batches; gradients accumulate in the policy."""
    batches = [micro_batch(samples, rows, torch.device("cpu")) for rows in split(samples, max_tokens)]
    masks = [b.mask_NT * b.finished_N[:, None] if settings.mask_truncated else b.mask_NT for b in batches]
    whole = BatchSize(len(samples), sum(m.sum().item() for m in masks), LONGEST, len(batches))
    loss, counts = torch.zeros(()), torch.zeros(3)
    for part, mask in zip(batches, masks, strict=True):
        logprobs, _ = logprobs_and_entropy(policy, part, TEMPERATURE)
        rows = lambda name, part=part: inputs[name][part.index, : part.mask_NT.shape[1]]  # noqa: E731
        old, reference = rows("old_per_token_logps"), rows("ref_per_token_logps")
        weights = importance_weights(old, sampled[part.index, : mask.shape[1]], mask, settings)
        reference = reference if settings.kl else None
        tokens = LossInputs(logprobs, old, part.advantages_N[:, None], mask, reference, weights)
        outputs = policy_loss(tokens, settings, whole)
        outputs.loss.backward()
        loss += outputs.loss.detach()
        counts += torch.stack([outputs.clipped_low, outputs.clipped_high, outputs.ratios])
    return loss, counts
