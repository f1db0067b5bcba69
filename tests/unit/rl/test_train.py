"""Runs of tiny policies: what a step trains and what it leaves, and rewards that rise."""

from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import CheckpointError
from qerl.models.lora import SharedCasts
from qerl.models.policy import load_policy
from qerl.rl.train import make_policy
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from tests.jobs import untimed
from tests.tiny import edit_config, tiny_qwen2
from tests.unit.rl.tiny_trainer import BASE, CPU, EXPERTS, PPO, SHARP, packed_family, trainer, weights

pytestmark = pytest.mark.usefixtures("rewarded_characters")


def test_casts_of_adapters_that_all_passes_of_an_update_share_change_no_bit(checkpoints, tmp_path, monkeypatch):
    changes = PPO | {"dtype": "bfloat16", "steps": 2, "micro_batch_tokens": 40}
    made, used = [], []
    operands = SharedCasts.operands

    def noted(casts, *args):
        found = operands(casts, *args)
        if not casts.every:  # else a sampler reads them
            used.append(found)
        return found

    monkeypatch.setattr(SharedCasts, "operands", noted)
    for most in (SharedCasts.MOST, 0):
        monkeypatch.setattr(SharedCasts, "MOST", most)
        run = trainer(checkpoints, tmp_path / str(most), **changes)
        rows, shared = untimed(run.run()), [one is not None for one in used]
        assert all(shared) if most else not any(shared)
        made.append((rows, weights(run)))
        used.clear()
    torch.testing.assert_close(*made, rtol=0, atol=0)


def test_the_samplers_entropy_is_that_of_its_completions(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path)
    drawn = made.collector.collect(1, 0)
    logprobs = [value for group in drawn.groups for c in group.completions for value in c.logprobs]
    assert drawn.metrics["entropy/sampler"] == pytest.approx(-fmean(logprobs))


def test_only_adapters_and_norms_change_and_the_packed_base_does_not(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path, weights="nvfp4")
    before, trainable = {k: v.clone() for k, v in made.policy.lm.state_dict().items()}, weights(made)
    made.run()
    # ...q_proj.lora_A.default.weight
    adapted = {tuple(name.split(".")[-4:-2]) for name in trainable if "lora" in name}
    assert adapted == {(target, matrix) for target in made.settings.adapter.targets for matrix in ("lora_A", "lora_B")}
    assert all("lora_" in name or "norm" in name for name in trainable)
    changed = {name for name, tensor in weights(made).items() if not torch.equal(tensor, trainable[name])}
    assert any("lora_A" in name for name in changed)
    assert any("layernorm" in name for name in changed)
    after = made.policy.lm.state_dict()
    frozen = [name for name in before if "lora_" not in name and "modules_to_save" not in name]
    assert any("weight_packed" in name for name in frozen)
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in frozen)


@pytest.mark.parametrize(("family", "packed"), [("qwen3_5", "nvfp4"), ("qwen3_5_moe", "nvfp4"), ("gpt_oss", "mxfp4")])
def test_delta_nets_and_published_experts_train_on_packed_weights(tmp_path, family, packed):
    """Blocks that are recomputed make the same states and gradients."""
    packed_family(tmp_path, family, packed)
    noise = {"schedule": "constant", "mode": "consistent"}
    same = {"weights": packed, "adapter": {"rank": 4}, "noise": noise, "steps": 2}
    kept, again = (
        trainer(tmp_path, tmp_path / str(flag), gradient_checkpointing=flag, **same) for flag in (False, True)
    )
    rows = kept.run()
    assert all(row["mismatch/kl"] < 1e-6 < row["grad_norm"] for row in rows)
    assert again.run()[1]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-3)


def test_dropout_acts_in_the_update_and_never_in_the_rollout(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path, adapter={"rank": 4, "dropout": 0.5}, optimizer={"learning_rate": 0.1})
    made.step(1, 0)
    assert made.step(2, 2)["mismatch/kl"] > 1e-6
    params = SamplingParams(max_tokens=6, count=4)
    assert made.collector.sampler.generate([[5, 6]], params) == made.collector.sampler.generate([[5, 6]], params)


def test_noise_mode_decides_whether_the_trainer_sees_the_noise(checkpoints, tmp_path):
    """Without noise in the sampler alone, both have the same probabilities."""
    rows = {}
    for mode in ("sampler", "consistent"):
        noise = {"schedule": "constant", "sigma_start": 0.1, "mode": mode}
        run = trainer(checkpoints, tmp_path / mode, weights="nvfp4", adapter={"rank": 4}, noise=noise)
        rows[mode] = run.step(1, 0)
    assert rows["sampler"]["noise/sigma"] == rows["consistent"]["noise/sigma"] == 0.1
    assert rows["sampler"]["mismatch/kl"] > 1e-5
    assert rows["consistent"]["mismatch/kl"] < 1e-8
    assert rows["consistent"]["mismatch/max_ratio"] < 1.001


def test_ppo_estimates_values_and_saves_them_apart(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path, **PPO)
    rows = made.run()
    assert rows[0]["value/mean"] == 0  # a head of zeros
    assert abs(rows[-1]["value/mean"]) > 1e-3
    assert rows[0]["value/explained_variance"] == 0  # nothing of the returns is explained by a constant
    assert rows[1]["value/explained_variance"] != 0
    assert all(row["value/loss"] > 0 for row in rows)
    made.policy.save(tmp_path / "policy")
    assert (tmp_path / "policy/value/adapter_model.safetensors").is_file()
    # What samples afterwards is the policy without its values.
    saved = load_policy(checkpoints / "nvfp4", tmp_path / "policy", "float32", CPU)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(saved.lm(ids).logits, made.policy.lm(ids).logits)


def test_an_entropy_bonus_trains_every_completion_and_keeps_the_policy_open(checkpoints, tmp_path):
    sharp, all_read = {"prompts": 2, "group_size": 4, "sampling": SHARP}, {"silent_sample": 1.0}
    rows = {
        weight: trainer(checkpoints, tmp_path / str(weight), rollout=sharp, loss={"entropy": weight, **all_read}).run()
        for weight in (0.0, 1.0)
    }
    assert rows[1.0][0]["entropy"] == pytest.approx(rows[0.0][0]["entropy"], abs=1e-6)
    assert rows[1.0][-1]["entropy"] > rows[0.0][-1]["entropy"]
    assert all(row["silent/completions"] == 0 for row in rows[1.0])


def test_a_repetition_changes_completions_and_neither_problems_nor_the_adapter(checkpoints, tmp_path):
    rollouts = [{**BASE["rollout"], "repetition": number} for number in (0, 0, 1)]
    runs = [trainer(checkpoints, tmp_path / str(number), rollout=one) for number, one in enumerate(rollouts)]
    first = [weights(run) for run in runs]
    torch.testing.assert_close(first[0], first[2], rtol=0, atol=0)
    same, again, other = ([group for group in run.collector.collect(1, 0).groups] for run in runs)
    assert [g.problem.id for g in same] == [g.problem.id for g in other]
    drawn = [[list(c.token_ids) for g in groups for c in g.completions] for groups in (same, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_full_fine_tuning_in_bfloat16_follows_that_in_float32(checkpoints, tmp_path):
    """On the same completions. An update is far below half a step of bfloat16 at most weights, and none is lost."""
    full = {"weights": "bf16", "method": "full", "optimizer": {"name": "adamw", "learning_rate": 1e-5}}
    exact = trainer(checkpoints, tmp_path / "exact", **full)
    rounded = trainer(checkpoints, tmp_path / "rounded", **full, dtype="bfloat16")
    samples, before = exact.collector.collect(1, 0).samples, weights(exact)
    assert all(torch.equal(value, before[name]) for name, value in weights(rounded).items())
    assert rounded.collector.sampler.served == "native, PyTorch on bfloat16"
    for step in (1, 2, 3):
        expected, found = (made.updater.update(step, samples) for made in (exact, rounded))
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        assert found["grad_norm"] != expected["grad_norm"]
        assert found["entropy"] == pytest.approx(expected["entropy"], rel=0.01)
    passes = dict(rounded.policy.lm.named_parameters())
    for name, value in weights(rounded).items():
        assert value.dtype == torch.float32
        assert torch.equal(passes[name], value.to(passes[name].dtype)), name
    for name in before:
        if before[name].ndim > 1:
            a, b = (weights(made)[name].sub(before[name]).flatten() for made in (exact, rounded))
            assert torch.cosine_similarity(a, b, dim=0) > 0.9, name
    assert any((passes[name] == before[name]).any() and passes[name].ndim > 1 for name in before)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_computes_blocks_twice_and_changes_nothing(checkpoints, tmp_path, method):
    calls, trained = {}, {}
    for again in (False, True, "auto"):  # which on a CPU is False
        run = trainer(checkpoints, tmp_path / str(again), weights="bf16", method=method, gradient_checkpointing=again)
        block, calls[again] = run.policy.lm.model.layers[0], 0

        def counted(*_, again=again):
            if torch.is_grad_enabled():
                calls[again] += 1

        block.self_attn.register_forward_hook(counted)
        run.step(1, 0)
        trained[again] = weights(run)
    assert calls[True] == 2 * calls[False] > 0
    assert calls["auto"] == calls[False]
    torch.testing.assert_close(trained[True], trained[False], rtol=0, atol=0)


@pytest.mark.parametrize("method", [{}, {"weights": "bf16", "method": "full"}])
def test_dropout_in_attention_is_refused_before_a_weight_is_read(tmp_path, method):
    """It changes transformers' numbers in training alone, so the model is sampled from and evaluated."""
    folder = tiny_qwen2(tmp_path, attention_dropout=0.5)
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.arange(2, 12)[None]
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    load_policy(folder, None, "float32", torch.device("cpu"))
    (folder / "model.safetensors").unlink()
    settings = parse(RunSettings, {**BASE, **method}, "test")
    with pytest.raises(
        ConfigError, match=r"config\.json states dropout of 0\.5 in attention.*set attention_dropout to 0"
    ):
        make_policy(settings, folder)
    edit_config(folder, attention_dropout=0.0)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        make_policy(settings, folder)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("checkpoints", {"adapter": {"rank": 4, "dropout": 0.0}}),
        ("checkpoints", {"adapter": {"rank": 4, "dropout": 0.5}}),
        ("mixture", {"weights": "nvfp4", "adapter": EXPERTS}),
        ("mixture", {"weights": "mxfp4", "adapter": EXPERTS}),
        ("checkpoints", {**PPO, "adapter": {"rank": 4}}),
    ],
    ids=["plain", "dropout", "experts", "gpt-oss", "ppo"],
)
def test_gradient_accumulation_equals_the_large_batch(request, tmp_path, base, changes, again):
    """Groups are cut, and parts have the prompt again; a mask of dropout belongs to the sequence."""
    same = {"loss": {"updates_per_rollout": 2}, **changes}
    folder = request.getfixturevalue(base)
    whole = trainer(folder, tmp_path / "a", **same)
    parts = trainer(folder, tmp_path / "b", micro_batch_tokens=20, gradient_checkpointing=again, **same)
    expected, found = whole.step(1, 0), parts.step(1, 0)
    assert expected["grad_norm"] > 0
    for key in ("loss", "grad_norm", "entropy", "mismatch/kl", *(key for key in expected if key.startswith("value/"))):
        assert found[key] == pytest.approx(expected[key], abs=1e-6, rel=1e-5), key


@pytest.mark.parametrize(("base", "adapter"), [("checkpoints", {"rank": 4}), ("mixture", EXPERTS)])
def test_the_reference_is_the_untrained_base(request, tmp_path, base, adapter):
    faster = {"loss": {"kl": 0.1}, "optimizer": {"learning_rate": 0.05}}
    made = trainer(request.getfixturevalue(base), tmp_path, weights="nvfp4", adapter=adapter, **faster)
    ids = torch.tensor([[5, 6, 7]])
    before = made.policy.lm(ids).logits
    first, second = made.step(1, 0), made.step(2, 2)
    assert abs(first["reference/kl"]) < 1e-7
    assert second["reference/kl"] > 1e-5
    with made.policy.reference():
        assert torch.equal(made.policy.lm(ids).logits, before)
    assert not torch.equal(made.policy.lm(ids).logits, before)
