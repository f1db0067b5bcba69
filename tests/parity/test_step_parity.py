"""A whole step, from completions to gradient and logged figures, against TRL's GRPOTrainer on the same completions."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.data.records import Problem
from qerl.models.policy import trained_in_full
from qerl.rl.parallel import Processes
from qerl.rl.rollouts import Collector, Task
from qerl.rl.update import Updater
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.conftest import in_nightly
from tests.parity.test_grpo_parity import IN_TRL
from tests.tiny import tiny_family, tiny_qwen2, write_template

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LONGEST, EOS = 8, 1
QUESTIONS = ["1+1", "what is 2+3?"]
#: Lengths differ, two are truncated, and the second group earns the same whatever it says.
COMPLETIONS = [
    [[10, 11, EOS], [10, 11, 12, 13, EOS], [14] * LONGEST, [11, EOS]],
    [[15, EOS], [16, EOS], [17, 17, 17, EOS], [18] * LONGEST],
]


def reward(text: str) -> float:
    """The number of these characters in a completion; the second group has none of them."""
    return float(len(set(text) & set("89abc")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_qwen2(tmp_path_factory.mktemp("dense"), dtype=torch.float32)
    write_template(folder, TEMPLATE)
    return folder


class Fixed:
    """A sampler with given completions and the policy's log-probabilities for them."""

    def sync(self):
        pass

    def generate(self, prompts, params):
        return [[Completion(ids, [-1.0] * len(ids), ids[-1] == EOS) for ids in group] for group in COMPLETIONS]


def trl_step(checkpoint, folder, loss_name, mask_truncated):
    """TRL's loss, gradients and logged figures."""
    from trl import GRPOConfig, GRPOTrainer  # imports vLLM, too

    arguments = GRPOConfig(
        output_dir=str(folder),
        **IN_TRL[loss_name],
        scale_rewards=loss_name != "dr_grpo",  # whose default it is here
        beta=0.0,
        mask_truncated_completions=mask_truncated,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=LONGEST,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def rollout(prompts, trainer):
        ids = [ids for group in COMPLETIONS for ids in group]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(row) for row in ids],
        }

    trainer = GRPOTrainer(
        model,
        lambda completions, **_: [reward(text) for text in completions],
        arguments,
        Dataset.from_dict({"prompt": QUESTIONS}),
        None,
        tokenizer,
        rollout_func=rollout,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": QUESTIONS[i // 4]} for i in range(8)])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}, logged


@pytest.mark.parametrize(
    ("loss_name", "mask_truncated"),
    [*((name, number % 2 == 0) for number, name in enumerate(IN_TRL)), ("grpo", False)],
)
def test_loss_gradient_and_logged_figures_of_a_step_equal_trl(
    checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated
):
    compare(checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated)


@pytest.mark.parametrize("family", ["gemma3", *in_nightly("mistral-sliding", "phi3")])
def test_a_step_of_another_family_equals_trl(tmp_path, monkeypatch, family):
    """With a window of four tokens, which is shorter than prompts with their completions."""
    folder = tiny_family(tmp_path / "dense", family, sliding_window=4)
    write_template(folder, TEMPLATE)
    compare(folder, tmp_path, monkeypatch, "grpo", False)


def compare(checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated):
    """Compare a step's loss, gradients and logged figures with TRL's."""
    values = {
        "model": "m",
        "dataset": "d",
        "weights": "bf16",
        "method": "full",
        "rollout": {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": LONGEST}},
        # The second group is silent: its gradient must be missed nowhere. TRL's entropy has all completions.
        "loss": {"name": loss_name, "clip_high": 0.2, "mask_truncated": mask_truncated, "silent_sample": 1.0},
        "optimizer": {"name": "adamw", "max_grad_norm": 1e9},
    }
    settings = parse(RunSettings, values, "test")
    parts = lambda answer, *_: {"correct": reward(answer.text), "format": 0.0, "overlong": 0.0}  # noqa: E731
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)
    monkeypatch.setattr("qerl.rl.rollouts.problem_index", lambda count, seed, position: position)
    policy = trained_in_full(checkpoint, "float32", CPU)
    problems = [Problem(str(i), question, None, "0") for i, question in enumerate(QUESTIONS)]
    rollout = Collector(settings, policy, Fixed(), Task(problems, "gsm8k", "")).collect(1, 0)
    updated = Updater(settings, policy, Processes()).update(1, rollout.samples)
    loss, gradients, logged = trl_step(checkpoint, tmp_path, loss_name, mask_truncated)
    assert updated["loss"] == pytest.approx(loss, abs=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    for name, parameter in policy.lm.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=name)
    ours = {**rollout.metrics, **updated}
    for mine, theirs in {
        "reward": "reward",
        "reward/std": "reward_std",
        "reward/equal_groups": "frac_reward_zero_std",
        "completion_length": "completions/mean_length",
        "truncated": "completions/clipped_ratio",
        "clip_ratio/low": "clip_ratio/low_mean",
        "clip_ratio/high": "clip_ratio/high_mean",
    }.items():
        assert ours[mine] == pytest.approx(logged[theirs], abs=1e-6), mine
    assert rollout.metrics["reward/equal_groups"] == 0.5
    assert rollout.metrics["truncated"] == 0.25
    if not mask_truncated:  # with the mask TRL's entropy leaves the truncated completions out, ours has all
        assert updated["entropy"] == pytest.approx(logged["entropy"], abs=1e-6)
