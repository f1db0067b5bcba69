"""Silent completions: an update without them against one with them, which a KL weight of nearly zero makes."""

import copy
import math

import pytest
import torch

from qerl.models.linear import POLICY_ADAPTER
from qerl.models.policy import Policy
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rl.parallel import Processes, start_processes
from qerl.rl.train import make_policy
from qerl.rl.update import Updater, find_silent
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import RunSettings

CPU = torch.device("cpu")
#: A weight whose term rounds away, but with which every completion has a gradient.
FULL = 1e-30
BASE = {
    "model": "tiny",
    "dataset": "sums",
    "weights": "nvfp4",
    "dtype": "float32",
    "rollout": {"prompts": 5, "group_size": 4, "sampling": {"max_tokens": 9}},
    "adapter": {"rank": 4, "dropout": 0.1},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1e9},
    "micro_batch_tokens": 60,
}
#: Advantages by group: mixed, equal rewards, mixed with a reward at the mean, equal rewards, mixed.
MIXED = [[1.2, -0.4, -0.4, -0.4], [0.0] * 4, [1.0, 0.0, -1.0, 0.0], [0.0] * 4, [-1.3, 0.5, 0.4, 0.4]]


@pytest.fixture(scope="module")
def base(checkpoints):
    return checkpoints / "nvfp4"


def batch(advantages=MIXED) -> list[Sample]:
    """Groups with prompts and completions of different lengths, some of them truncated."""
    numbers = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(2, 100, (count,), generator=numbers).tolist()  # noqa: E731
    samples = []
    for number, group in enumerate(advantages):
        prompt = draw(3 + number)
        for place, advantage in enumerate(group):
            ids = draw(2 + (3 * number + 2 * place) % 7)
            logprobs = (-4.6 + 0.3 * torch.randn(len(ids), generator=numbers)).tolist()
            samples.append(Sample(prompt, Completion(ids, logprobs, place != 2), 0.0, advantage))
    return samples


def updater(base, processes=None, **loss) -> Updater:
    settings = parse(RunSettings, {**BASE, "loss": loss}, "test")
    policy = make_policy(settings, base)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():  # an adapter of B = 0 has no gradient of A
        for _, parameter in policy.trainable():
            parameter += 0.05 * torch.randn(parameter.shape, generator=numbers)
    return Updater(settings, policy, processes or Processes())


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
def test_gradient_loss_and_clipping_are_those_of_all_completions(base, loss):
    """Several micro-batches, dropout, updates on one rollout and corrections take part."""
    full, short = updater(base, **loss, kl=FULL), updater(base, **loss, silent_sample=1.0)
    expected, found = full.update(1, batch()), short.update(1, batch())
    assert (expected["silent/completions"], expected["silent/sampled"]) == (0, 0)
    assert found["silent/completions"] == (13 if loss.get("mask_truncated") else 10)
    assert loss.get("updates_per_rollout", 1) == 1 or found["clip_ratio/low"] + found["clip_ratio/high"] > 0
    # Ratios of the first update are 1 to the bit; a correction's weights are as exact as log-probabilities.
    assert found["loss"] == (pytest.approx(expected["loss"], rel=1e-5) if "correction" in loss else expected["loss"])
    for key in ("grad_norm", "entropy", "mismatch/kl", "mismatch/max_ratio", "ess/tokens", "ess/sequences"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    assert (found["clip_ratio/low"], found["clip_ratio/high"]) == (
        expected["clip_ratio/low"],
        expected["clip_ratio/high"],
    )
    before = gradients(full)
    for name, gradient in gradients(short).items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, before[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("correction", ["off", "token-truncate"])
def test_the_first_loss_where_rows_without_silent_completions_are_of_single_tokens(base, correction):
    """Other routines multiply so short rows, so that log-probabilities round otherwise."""
    samples = [
        Sample(
            [7 + group],
            Completion([9 + group, 1][: 1 + place // 2], [-4.6, -4.5][: 1 + place // 2], True),
            0.0,
            advantage,
        )
        for group, of_group in enumerate(MIXED)
        for place, advantage in enumerate(of_group)
    ]
    loss = {"correction": correction}
    expected = updater(base, **loss, kl=FULL).update(1, samples)["loss"]
    found = updater(base, **loss, silent_sample=1.0).update(1, samples)["loss"]
    assert found == (expected if correction == "off" else pytest.approx(expected, rel=1e-5))


def tokens_read(made: Updater, samples: list[Sample]) -> dict[bool, int]:
    """The tokens of the forward passes of an update, with and without a gradient."""
    read = {True: 0, False: 0}

    def count(module, inputs):
        read[torch.is_grad_enabled()] += inputs[0].numel()

    hook = made.policy.lm.get_input_embeddings().register_forward_pre_hook(count)
    made.update(1, samples)
    hook.remove()
    return read


def test_only_a_sample_of_silent_completions_is_read_and_that_without_gradient(base):
    """The row of a group's teaching completions has a gradient; that of its sampled ones has none."""
    samples = batch()
    made = updater(base, silent_sample=0.3)
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
    alone = [micro_batch(samples, [i], CPU) for i in range(len(samples))]
    with torch.no_grad():
        return [logprobs_and_entropy(policy, one, 1.0)[1].sum().item() for one in alone]


def test_the_sample_stands_for_all_silent_completions_in_the_entropy(base):
    samples, made = batch(), updater(base, silent_sample=0.5)
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


def test_a_step_without_any_gradient_decays_weights_and_follows_momentum_as_before(base):
    """The step of torch's AdamW on gradients of zero, after a step with momentum."""
    made = updater(base)
    made.update(1, batch())
    names = [name for name, _ in made.policy.trainable()]
    expected = {name: p.detach().clone().requires_grad_() for name, p in made.policy.trainable()}
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
    )
    row = made.update(2, batch([[0.0] * 4] * 5))
    state = copy.deepcopy(made.optimizer.state_dict())
    assert (row["loss"], row["grad_norm"], row["silent/completions"], row["silent/sampled"]) == (0, 0, 20, 3)
    again = updater(base)
    again.update(1, batch())
    oracle.load_state_dict(again.optimizer.state_dict())
    for group, now in zip(oracle.param_groups, state["param_groups"], strict=True):
        group["lr"] = now["lr"]
    for parameter in expected.values():
        parameter.grad = torch.zeros_like(parameter)
    oracle.step()
    moved = dict(made.policy.trainable())
    assert any(POLICY_ADAPTER in name for name in names)
    for name in names:
        assert torch.equal(moved[name], expected[name]), name


def test_what_is_silent_and_which_are_sampled():
    samples = batch()
    find = lambda step=1, seed=0, **loss: find_silent(  # noqa: E731
        samples, parse(RunSettings, {**BASE, "seed": seed, "loss": loss}, "test"), step
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


def record_updates(base, folder) -> None:
    """Write metrics and gradients of an update in which a process has no gradient, and of one in which none has."""
    made = updater(base, updates_per_rollout=2)
    rows = [made.update(1, batch(LONELY))]
    lonely = gradients(made)
    rows.append(made.update(2, batch([[0.0] * 4] * 3)))
    weights = {name: p.detach() for name, p in made.policy.trainable()}
    torch.save((rows, lonely, weights), folder / f"{made.processes.count}-{made.processes.rank}.pt")


def test_a_process_without_work_takes_part(base, tmp_path, forking):
    for count in (1, 2):
        start_processes(count, record_updates, base, tmp_path) or record_updates(base, tmp_path)
    (rows, lonely, weights), *others = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert rows[0]["grad_norm"] > 0 == rows[1]["grad_norm"]
    for other_rows, other_lonely, other_weights in others:
        for row, other in zip(rows, other_rows, strict=True):
            assert other == pytest.approx(row, rel=1e-5, abs=1e-9)
        for name in lonely:
            torch.testing.assert_close(other_lonely[name], lonely[name], rtol=1e-4, atol=1e-7, msg=name)
            torch.testing.assert_close(other_weights[name], weights[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", [{"name": "grpo", "kl": 0.1}, {"name": "gspo"}, {"name": "ppo"}], ids=str)
@pytest.mark.parametrize("lengths", [(0, 3), (0, 0)])
def test_completions_without_a_token_have_no_part_in_an_update(base, loss, lengths):
    made = updater(base, **loss)
    samples = [
        Sample([3, 4], Completion([7] * length, [-3.0] * length, True), 1.0, 1.0 - 2 * place)
        for place, length in enumerate(lengths)
    ]
    metrics = made.update(1, samples)
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["grad_norm"] > 0) == (max(lengths) > 0)
    assert metrics["entropy"] > 0 or not max(lengths)
    assert all(parameter.isfinite().all() for _, parameter in made.policy.trainable())
