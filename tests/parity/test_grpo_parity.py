"""Loss, gradient and logged figures of a batch, and of a whole step, against TRL's GRPOTrainer."""

import sys

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.data.records import Problem
from qerl.models.policy import Policy, trained_in_full
from qerl.rl.losses import BatchSize, LossInputs, importance_weights, policy_loss
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch, split
from qerl.rl.parallel import Processes
from qerl.rl.rewards import group_advantages
from qerl.rl.rollouts import Collector, Task
from qerl.rl.update import Updater
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import LossSettings, RunSettings
from tests.conftest import in_nightly
from tests.tiny import tiny_family, tiny_qwen2, write_template

TEMPERATURE = 0.9
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_qwen2(tmp_path_factory.mktemp("dense"), dtype=torch.float32)
    write_template(folder, TEMPLATE)
    return folder


LONGEST = 12
#: How TRL names each loss.
IN_TRL = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "two-sided": {"loss_type": "grpo", "delta": 1.3},
}
#: How this project names those that differ.
OURS = {"cispo": {"name": "cispo", "ratio_cap": 1.1}, "two-sided": {"name": "grpo", "ratio_cap": 1.3}}


@pytest.fixture(scope="module", params=list(IN_TRL))
def loss_name(request):
    return request.param


@pytest.fixture(scope="module", params=[0.0, 0.05])
def kl(request):
    return request.param


def trl_trainer(checkpoint, folder, loss_name, reward, prompts, rollout_func=None, **arguments):
    """TRL's trainer of groups of four on its own copy of the model."""
    from trl import GRPOConfig, GRPOTrainer  # imports vLLM, too

    arguments |= {"num_generations": 4, "per_device_train_batch_size": 8, "report_to": [], "bf16": False}
    arguments = GRPOConfig(output_dir=str(folder), use_cpu=True, **{**arguments, **IN_TRL[loss_name]})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    data, tokenizer = Dataset.from_dict({"prompt": prompts}), AutoTokenizer.from_pretrained(checkpoint)
    trainer = GRPOTrainer(model, reward, arguments, data, None, tokenizer, rollout_func=rollout_func)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory, loss_name, kl):
    """A TRL trainer on its own copy of the model."""
    return trl_trainer(
        checkpoint,
        tmp_path_factory.mktemp("trl"),
        loss_name,
        lambda completions, **_: [0.0] * len(completions),
        ["a"] * 8,
        beta=kl,
        use_bias_correction_kl=False,  # the paper's Eq. 3 has the plain term
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
    )


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
    own = OURS.get(loss_name, {"name": loss_name})
    settings = LossSettings(**own, kl=kl, mask_truncated=mask_truncated, correction=correction, correction_cap=1.2)
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
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, trainer.model)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    logged = logged_by(trainer)
    low, high, ratios = counts.tolist()
    if loss_name in ("cispo", "sapo"):  # of which TRL logs the clipped weights alone, or nothing
        assert (low, high / ratios) == (0, pytest.approx(logged.get("cispo_clip_ratio", 0), abs=1e-6))
        return
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
    batches = [micro_batch(samples, rows, CPU) for rows in split(samples, max_tokens)]
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


# --- a whole step, from completions on ---

MOST, EOS = 8, 1
QUESTIONS = ["1+1", "what is 2+3?"]
#: Lengths differ, two are truncated, and the second group earns the same whatever it says.
COMPLETIONS = [
    [[10, 11, EOS], [10, 11, 12, 13, EOS], [14] * MOST, [11, EOS]],
    [[15, EOS], [16, EOS], [17, 17, 17, EOS], [18] * MOST],
]
#: What an environment replied within completions, by their tokens, for conversations.
REPLIES = {(10, 20, 21, 11, 12, EOS): (range(1, 3),), (14, 14, EOS, 19, 22, 23, 14, 14): (range(3, 6),)}
CONVERSATIONS = [[COMPLETIONS[0][0], *([*ids] for ids in REPLIES), [11, EOS]], COMPLETIONS[1]]


def reward(text: str) -> float:
    """The number of these characters in a completion; the second group has none of them."""
    return float(len(set(text) & set("89abc")))


class Fixed:
    """A sampler with given completions and log-probabilities for them."""

    def __init__(self, groups=COMPLETIONS):
        self.groups = groups

    def sync(self):
        pass

    def generate(self, prompts, params):
        return [
            [Completion(ids, [-1.0] * len(ids), ids[-1] == EOS, REPLIES.get(tuple(ids), ())) for ids in group]
            for group in self.groups
        ]


def trl_of_questions(checkpoint, folder, loss_name, reward, completions=COMPLETIONS, **arguments):
    """TRL's trainer, its inputs of a step that answers `QUESTIONS` with the completions, and what it has logged."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def rollout(prompts, trainer):
        ids = [ids for group in completions for ids in group]
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        given = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-1.0] * len(row) for row in ids]}
        masks = [[all(i not in r for r in REPLIES.get(tuple(row), ())) for i in range(len(row))] for row in ids]
        return given | ({"env_mask": [[*map(int, mask)] for mask in masks]} if completions is CONVERSATIONS else {})

    arguments |= {"rollout_func": rollout, "max_completion_length": MOST}
    trainer = trl_trainer(checkpoint, folder, loss_name, reward, QUESTIONS, **arguments)
    inputs = trainer._generate_and_score_completions([{"prompt": QUESTIONS[i // 4]} for i in range(8)])
    return trainer, inputs


def logged_by(trainer):
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_step(checkpoint, folder, loss_name, mask_truncated, completions=COMPLETIONS):
    """TRL's loss, gradients and logged figures."""
    trainer, inputs = trl_of_questions(
        checkpoint,
        folder,
        loss_name,
        lambda completions, **_: [reward(text) for text in completions],
        completions,
        scale_rewards=loss_name != "dr_grpo",  # whose default it is here
        beta=0.0,
        mask_truncated_completions=mask_truncated,
    )
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}, logged_by(trainer)


def collected(checkpoint, monkeypatch, completions=COMPLETIONS, **values):
    """The settings of a run that is trained in full, its policy, and its rollout of the completions."""
    rollout = {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": MOST}}
    fixed = {"model": "m", "dataset": "d", "weights": "bf16", "method": "full", "rollout": rollout}
    settings = parse(RunSettings, {**fixed, **values}, "test")
    monkeypatch.setattr("qerl.rl.rollouts.problem_index", lambda count, seed, position: position)
    policy = trained_in_full(checkpoint, "float32", CPU)
    task = Task([Problem(str(i), question, None, "0") for i, question in enumerate(QUESTIONS)], "gsm8k", "")
    return settings, policy, Collector(settings, policy, Fixed(completions), task).collect(1, 0)


@pytest.mark.parametrize(
    ("loss_name", "mask_truncated"),
    [*((name, number % 2 == 0) for number, name in enumerate(IN_TRL) if name not in OURS), ("grpo", False)],
)
def test_loss_gradient_and_logged_figures_of_a_step_equal_trl(
    checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated
):
    compare(checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated)


@pytest.mark.parametrize("loss_name", ["grpo", "gspo", "dapo"])
def test_a_step_of_conversations_equals_trl(checkpoint, tmp_path, monkeypatch, loss_name):
    """By TRL's `env_mask` of tokens that no policy drew."""
    compare(checkpoint, tmp_path, monkeypatch, loss_name, False, CONVERSATIONS)


@pytest.mark.parametrize("family", ["gemma3", *in_nightly("mistral-sliding", "phi3")])
def test_a_step_of_another_family_equals_trl(tmp_path, monkeypatch, family):
    """With a window of four tokens, which is shorter than prompts with their completions."""
    folder = tiny_family(tmp_path / "dense", family, sliding_window=4)
    write_template(folder, TEMPLATE)
    compare(folder, tmp_path, monkeypatch, "grpo", False)


def compare(checkpoint, tmp_path, monkeypatch, loss_name, mask_truncated, completions=COMPLETIONS):
    """Compare a step's loss, gradients and logged figures with TRL's."""
    values = {
        # The second group is silent: its gradient must be missed nowhere. TRL's entropy has all completions.
        "loss": {"name": loss_name, "clip_high": 0.2, "mask_truncated": mask_truncated, "silent_sample": 1.0},
        "optimizer": {"name": "adamw", "max_grad_norm": 1e9},
    }
    parts = lambda answer, *_: {"correct": reward(answer.text), "format": 0.0, "overlong": 0.0}  # noqa: E731
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)
    settings, policy, rollout = collected(checkpoint, monkeypatch, completions, **values)
    updated = Updater(settings, policy, Processes()).update(1, rollout.samples)
    loss, gradients, logged = trl_step(checkpoint, tmp_path, loss_name, mask_truncated, completions)
    assert updated["loss"] == pytest.approx(loss, abs=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    found = {name: parameter.grad for name, parameter in policy.lm.named_parameters()}
    torch.testing.assert_close(found, gradients, atol=1e-6, rtol=1e-4)
    ours = {**rollout.metrics, **updated}
    names = {
        "reward": "reward",
        "reward/std": "reward_std",
        "reward/equal_groups": "frac_reward_zero_std",
        "completion_length": "completions/mean_length",
        "truncated": "completions/clipped_ratio",
    }
    if loss_name != "sapo":  # which clips nothing
        names |= {"clip_ratio/low": "clip_ratio/low_mean", "clip_ratio/high": "clip_ratio/high_mean"}
    for mine, theirs in names.items():
        assert ours[mine] == pytest.approx(logged[theirs], abs=1e-6), mine
    assert rollout.metrics["reward/equal_groups"] == 0.5
    assert rollout.metrics["truncated"] == 0.25
    if not mask_truncated:  # with the mask TRL's entropy leaves the truncated completions out, ours has all
        assert updated["entropy"] == pytest.approx(logged["entropy"], abs=1e-6)


# --- several rewards

#: By reward, for two groups of four: one left out, one equal in a group, one sample left out of all.
REWARDS = [[1.0, 0.0, None, None, 2.0, 2.0, 2.0, 2.0], [0.3, 0.1, 0.5, None, 0.0, 1.0, None, 0.2]]
WEIGHTS = [1.0, -0.4]


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [("sum_then_normalize", True), ("sum_then_normalize", False), ("normalize_then_sum", True)],
)
@pytest.mark.parametrize("rewards", [REWARDS, [[None] * 4 + values[4:] for values in REWARDS]])
def test_advantages_of_several_rewards_equal_trl(checkpoint, tmp_path, monkeypatch, aggregation, scale, rewards):
    (tmp_path / "two_rewards.py").write_text(
        f"REWARDS = {rewards}\nfirst, second = (lambda completions, r=r, **_: r for r in REWARDS)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "two_rewards", raising=False)
    trainer, inputs = trl_of_questions(
        checkpoint,
        tmp_path / "trl",
        "grpo",
        [lambda completions, values=values, **_: values for values in rewards],
        reward_weights=WEIGHTS,
        multi_objective_aggregation=aggregation,
        scale_rewards="group" if scale else "none",
    )
    theirs, logged = inputs["advantages"], logged_by(trainer)
    own = [
        {"function": f"two_rewards:{name}", "weight": w} for name, w in zip(("first", "second"), WEIGHTS, strict=True)
    ]
    reward = {"correct": 0, "format": 0, "aggregation": aggregation, "functions": dict(zip("ab", own, strict=True))}
    _, _, ours = collected(checkpoint, monkeypatch, loss={"scale_advantages": scale}, reward=reward)
    torch.testing.assert_close(torch.tensor([s.advantage for s in ours.samples]), theirs, atol=1e-6, rtol=1e-5)
    assert theirs.abs().max() > 0.1
    assert ours.metrics["reward"] == pytest.approx(logged["reward"], abs=1e-6)
    assert ours.metrics["reward/std"] == pytest.approx(logged["reward_std"], abs=1e-6)
    for name, given in zip("ab", rewards, strict=True):
        known = [value for value in given if value is not None]
        assert ours.metrics[f"reward/{name}"] == pytest.approx(sum(known) / len(known))
