"""The GRPO loop on a tiny policy: resume, noise modes, what is trained and what is not."""

import json
from itertools import pairwise

import pytest
import torch

from qerl.config import OptimizerSettings, RunSettings, parse
from qerl.data.records import Problem
from qerl.models.policy import trained_in_full, with_adapter
from qerl.quant.quantize import quantize_checkpoint
from qerl.rl.checkpoint import CheckpointError, Checkpoints
from qerl.rl.trainer import Task, Trainer, learning_rate, problem_indices
from qerl.rollout.native import NativeSampler
from qerl.rollout.sampler import SamplingParams
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
PROBLEMS = [Problem(str(i), f"{i} and {i}?", f"#### {2 * i}", str(2 * i), None) for i in range(6)]
BASE = {
    "model": "tiny",
    "dataset": "sums",
    "dtype": "float32",
    "steps": 5,
    "rollout": {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": 6}},
    "adapter": {"rank": 4, "dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    dense = tiny_qwen2(folder / "bf16")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    (dense / "chat_template.jinja").write_text(template)
    quantize_checkpoint(dense, folder / "nvfp4", "nvfp4")
    return folder


def trainer(checkpoints, work, **changes) -> Trainer:
    settings = parse(RunSettings, {**BASE, **changes}, "test")
    base = checkpoints / settings.weights
    full = settings.method == "full"
    policy = trained_in_full(base, CPU) if full else with_adapter(base, settings.adapter, "float32", settings.seed, CPU)
    # Equal rewards teach nothing: here the reward is a property that random completions differ in.
    made = Trainer(
        settings,
        policy,
        NativeSampler(policy),
        Task(PROBLEMS, "gsm8k", ""),
        Checkpoints(work, "test"),
        work / "m.jsonl",
    )
    made._score = lambda group, problem: (  # type: ignore[method-assign]
        [float(len(set(c.token_ids))) for c in group],
        [{"correct": 0.0, "format": 0.0} for _ in group],
    )
    return made


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.policy.trainable()}


TIMING = ("seconds/", "tokens_per_second/", "memory_bytes")


def untimed(rows):
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in rows]


@pytest.mark.parametrize(
    "changes", [{"weights": "nvfp4", "noise": {"schedule": "linear"}}, {"weights": "bf16", "method": "full"}]
)
def test_a_killed_run_continues_bit_for_bit(checkpoints, tmp_path, monkeypatch, changes):
    whole = trainer(checkpoints, tmp_path / "whole", **changes)
    expected = whole.run()
    killed = trainer(checkpoints, tmp_path / "killed", **changes)
    step = killed.step
    monkeypatch.setattr(killed, "step", lambda n: step(n) if n < 4 else (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    continued = trainer(checkpoints, tmp_path / "killed", **changes)
    torch.manual_seed(99)
    rows = continued.run()
    assert untimed(rows) == untimed(expected)
    assert [json.loads(line)["step"] for line in (tmp_path / "killed/m.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(continued)[name]), name


def test_only_adapters_and_norms_change_and_the_packed_base_does_not(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path, weights="nvfp4")
    before, trainable = {k: v.clone() for k, v in made.policy.lm.state_dict().items()}, weights(made)
    made.run()
    assert {name.split(".")[-3] for name in trainable if "lora" in name} <= {
        *made.settings.adapter.targets,
        "lora_A",
        "lora_B",
    }
    changed = {name for name, tensor in weights(made).items() if not torch.equal(tensor, trainable[name])}
    assert any("lora_A" in name for name in changed)
    assert any("layernorm" in name for name in changed)
    after = made.policy.lm.state_dict()
    frozen = [name for name in before if "lora_" not in name and "modules_to_save" not in name]
    assert any("weight_packed" in name for name in frozen)
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in frozen)


def test_sampler_and_trainer_agree_without_noise(checkpoints, tmp_path):
    rows = trainer(checkpoints, tmp_path, weights="nvfp4", adapter={"rank": 4}).run()
    assert all(row["mismatch/kl"] < 1e-8 for row in rows)
    assert all(row["mismatch/max_ratio"] < 1.001 for row in rows)


def test_dropout_acts_in_the_update_and_never_in_the_rollout(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path, adapter={"rank": 4, "dropout": 0.5}, optimizer={"learning_rate": 0.1})
    made.step(1)
    assert made.step(2)["mismatch/kl"] > 1e-6
    params = SamplingParams(max_tokens=6, count=4)
    assert made.sampler.generate([[5, 6]], params) == made.sampler.generate([[5, 6]], params)


def test_noise_mode_decides_whether_the_trainer_sees_the_noise(checkpoints, tmp_path):
    noise, plain = {"schedule": "constant", "sigma_start": 0.1}, {"rank": 4}
    sampler = trainer(
        checkpoints, tmp_path / "a", weights="nvfp4", adapter=plain, noise={**noise, "mode": "sampler"}
    ).step(1)
    consistent = trainer(
        checkpoints, tmp_path / "b", weights="nvfp4", adapter=plain, noise={**noise, "mode": "consistent"}
    ).step(1)
    assert sampler["noise/sigma"] == consistent["noise/sigma"] == 0.1
    assert sampler["mismatch/kl"] > 1e-5
    assert consistent["mismatch/kl"] < 1e-8


def test_gradient_accumulation_equals_the_large_batch(checkpoints, tmp_path):
    whole = trainer(checkpoints, tmp_path / "a", adapter={"rank": 4}).step(1)
    parts = trainer(checkpoints, tmp_path / "b", adapter={"rank": 4}, micro_batch_tokens=20).step(1)
    for key in ("loss", "grad_norm", "entropy"):
        assert parts[key] == pytest.approx(whole[key], abs=1e-6, rel=1e-5)


def test_a_second_update_of_a_rollout_moves_on(checkpoints, tmp_path):
    once, twice = (trainer(checkpoints, tmp_path / str(n), loss={"updates_per_rollout": n}) for n in (1, 2))
    once.step(1), twice.step(1)
    moved = [not torch.equal(a, b) for a, b in zip(weights(once).values(), weights(twice).values(), strict=True)]
    assert any(moved)


def test_a_truncated_checkpoint_is_named(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path)
    made.run()
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=newest.name):
        trainer(checkpoints, tmp_path).run()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    Checkpoints(tmp_path, "these").save(1, {"rows": []})
    with pytest.raises(CheckpointError, match="other settings"):
        Checkpoints(tmp_path, "those").load(CPU)


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    store = Checkpoints(tmp_path, "x")
    for step in (1, 2, 3):
        store.save(step, {})
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step-000002.pt", "step-000003.pt"]


def test_every_problem_is_seen_once_an_epoch():
    seen = [index for step in range(1, 6) for index in problem_indices(10, 0, step, 4)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen[:10] != [index for step in range(1, 4) for index in problem_indices(10, 1, step, 4)][:10]


def test_learning_rate_warms_up_and_decays_to_zero():
    settings = OptimizerSettings(learning_rate=1.0, warmup_ratio=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 1e-3


def test_no_training_problems_is_an_error(checkpoints, tmp_path):
    settings = parse(RunSettings, BASE, "test")
    policy = with_adapter(checkpoints / "bf16", settings.adapter, "float32", 0, CPU)
    with pytest.raises(ValueError, match="no training problems"):
        Trainer(
            settings, policy, NativeSampler(policy), Task([], "gsm8k", ""), Checkpoints(tmp_path, ""), tmp_path / "m"
        )
