"""Adapters of a model with shared experts, which have layers of the same names as experts, against stock PEFT."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import ADAPTER, ADAPTER_CONFIG, CheckpointError
from qerl.models.policy import load_policy, with_adapter
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.tiny import tiny_family

CPU = torch.device("cpu")
TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_family(tmp_path_factory.mktemp("shared"), "qwen3_5_moe", dtype=torch.bfloat16)


def stock(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def by_peft(base, folder, targets):
    """An adapter as stock PEFT makes and saves it, on the stock model, with B that isn't 0."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=targets, init_lora_weights=False)
    peft = get_peft_model(stock(base), config)
    peft.save_pretrained(folder)
    return peft.eval()


@pytest.mark.parametrize(
    "targets",
    [["gate_proj", "up_proj", "down_proj", "q_proj"], ["shared_expert.up_proj"], ["up_proj", "shared_expert_gate"]],
)
def test_an_adapter_of_stock_peft_is_that_of_the_shared_expert(base, tmp_path, targets):
    peft = by_peft(base, tmp_path, targets)
    policy = load_policy(base, tmp_path, "float32", CPU)
    adapted = {name for name, _ in policy.peft.named_parameters() if ".lora_" in name}
    assert adapted == {name for name, _ in peft.named_parameters() if ".lora_" in name}
    [group] = EngineSampler(policy, NativeSettings()).generate(
        [[5, 6, 7]], SamplingParams(max_tokens=16, count=2, ignore_eos=True)
    )
    with torch.no_grad():
        expected, plain = peft(TOKENS).logits, stock(base)(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        for completion in group:
            logits = peft(torch.tensor([[5, 6, 7, *completion.token_ids]])).logits[0, 2:-1].log_softmax(-1)
            of_tokens = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), of_tokens, rtol=0, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01


def test_a_target_is_the_layer_of_the_shared_expert(base, tmp_path):
    """And stock PEFT loads it under that name."""
    policy = with_adapter(base, AdapterSettings(rank=3, targets=["up_proj"], train_norms=False), "float32", 0, CPU)
    for _, parameter in policy.trainable():
        parameter.data += 0.05
    policy.save(tmp_path)
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["target_modules"] == ["shared_expert.up_proj"]
    assert {name.partition(".mlp.")[2] for name in load_file(tmp_path / ADAPTER)} == {
        f"shared_expert.up_proj.lora_{side}.weight" for side in "AB"
    }
    peft = PeftModel.from_pretrained(stock(base), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, peft(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_adapters_of_experts_are_refused(base, tmp_path):
    asked = AdapterSettings(targets=["q_proj", "experts.down_proj"])
    with pytest.raises(
        ConfigError, match=r"experts\.down_proj, and .* of qwen3_moe, gpt_oss, not of 'qwen3_5_moe_text'"
    ):
        with_adapter(base, asked, "float32", 0, CPU)
    by_peft(base, tmp_path, ["q_proj"])
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    for changes in ({"target_parameters": ["experts.down_proj"]}, {"target_modules": r".*\.up_proj"}):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=f"has {next(iter(changes))}.*, and experts beside a shared one"):
            load_policy(base, tmp_path, "float32", CPU)
