"""Trained norms are float32 wherever a policy is read, with a base in bfloat16, where 1.001 would be rounded to 1."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax

import qerl
from qerl.evals import evaluate
from qerl.jobs import EvaluateJob, StoredPolicy
from qerl.models.blocks import NoisyRMSNorm
from qerl.models.export import export
from qerl.models.policy import Policy, load_policy, trained_in_full, with_adapter
from qerl.rl.value import add_value
from qerl.rollout.vllm import norm_weights
from qerl.settings.run import AdapterSettings, PPOSettings
from qerl.settings.workflow import EvaluationSettings
from tests.tiny import tiny_bases, tiny_qwen2

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 40, 41]])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_bases(tmp_path_factory.mktemp("bases"))


def train(policy):
    """Change a policy as training does: by a step that is small beside a norm and large beside an adapter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "layernorm" in name:
                parameter.fill_(1.001)
            elif parameter.ndim > 1 and "lora" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def acting(policy):
    """The tensors that an engine outside of the process, such as vLLM, receives."""
    return norm_weights(policy)


@torch.no_grad()
def logprobs(policy):
    with policy.autocast():
        return log_softmax(policy.lm(input_ids=IDS).logits.float(), -1)


def are_kept(found):
    assert {weight.dtype for weight in acting(found).values()} == {torch.float32}
    assert all(torch.equal(weight, torch.full_like(weight, 1.001)) for weight in acting(found).values())


@pytest.mark.parametrize("value", [False, True], ids=["alone", "with a value function"])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_a_saved_policy_is_read_to_the_bit(checkpoints, tmp_path, weights, value):
    trained = train(with_adapter(checkpoints / weights, AdapterSettings(rank=4), "bfloat16", 0, CPU))
    if value:
        add_value(trained, PPOSettings(rank=4))
    trained.save(tmp_path)
    found = load_policy(checkpoints / weights, tmp_path, "bfloat16", CPU)
    are_kept(found)
    assert torch.equal(logprobs(found), logprobs(trained))


def test_the_evaluation_rule_scores_the_trained_norms(checkpoints, tmp_path, monkeypatch):
    train(with_adapter(checkpoints / "nvfp4", AdapterSettings(rank=4), "bfloat16", 0, CPU)).save(tmp_path)
    scored = []
    monkeypatch.setattr(evaluate, "score_policy", lambda policy, *_: scored.append(policy))
    evaluate.evaluate_policy(
        EvaluateJob(
            policy=StoredPolicy(stored="p"),
            settings=EvaluationSettings(tasks=[]),
            checkpoint=checkpoints / "nvfp4",
            trained=tmp_path,
            data={},
            out=tmp_path / "out",
        )
    )
    are_kept(scored[0])


def test_a_policy_trained_in_full_keeps_its_norms(checkpoints, tmp_path):
    train(trained_in_full(checkpoints / "bf16", "float32", CPU)).save(tmp_path)
    are_kept(load_policy(checkpoints / "bf16", tmp_path, "bfloat16", CPU))
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.rpartition(".")[2] for name, tensor in stored.items() if tensor.dtype == torch.float32} == {
        "weight",
        "bias",
    }
    assert {tensor.ndim for tensor in stored.values() if tensor.dtype == torch.float32} == {1}
    assert {tensor.dtype for tensor in stored.values() if tensor.ndim > 1} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_an_exported_base_holds_the_norms_as_they_were_trained(checkpoints, tmp_path, weights):
    trained = train(with_adapter(checkpoints / weights, AdapterSettings(rank=4), "bfloat16", 0, CPU))
    trained.save(tmp_path / "policy")
    export(checkpoints / weights, tmp_path / "policy", tmp_path / "out")
    found = load_policy(tmp_path / "out/base", tmp_path / "out/adapter", "bfloat16", CPU)
    are_kept(found)
    assert torch.equal(logprobs(found), logprobs(trained))


def test_a_finished_run_is_the_policy_that_was_trained(checkpoints, tmp_path, monkeypatch):
    """Through the library: every trained norm to the bit, the same log-probabilities."""
    monkeypatch.setenv("QERL_COMMIT", "test")
    rows = [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved, save = [], Policy.save
    monkeypatch.setattr(Policy, "save", lambda policy, *to: (saved.append(policy), save(policy, *to)))
    monkeypatch.setattr("qerl.rl.rollouts.total", lambda *_: float(next(rewards)))
    rewards = iter(range(1000))
    run = qerl.train(
        {
            "model": str(checkpoints / "nvfp4"),
            "dataset": str(tmp_path / "sums.jsonl"),
            "out": str(tmp_path / "run"),
            "steps": 2,
            "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 4}},
            "adapter": {"rank": 4},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    expected = acting(saved[0])
    # What was trained is lost in 16 bits, so that the test would notice.
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in expected.values())
    assert all(torch.equal(weight, expected[name]) for name, weight in acting(run.policy).items())
    assert torch.equal(logprobs(run.policy), logprobs(saved[0]))


def test_a_base_keeps_norms_that_its_files_hold_in_float32(tmp_path):
    """And rounds all else to the dtype that is asked for."""
    base = tiny_qwen2(tmp_path / "m", dtype=torch.float32)
    stored = load_file(base / "model.safetensors")
    found = load_policy(base, None, "bfloat16", CPU)
    for name, weight in acting(found).items():
        assert torch.equal(weight, stored[name])
    own = {id(norm.weight) for norm in found.lm.modules() if isinstance(norm, NoisyRMSNorm)}
    assert {p.dtype for p in found.lm.parameters() if id(p) not in own} == {torch.bfloat16}
