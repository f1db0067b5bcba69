"""Adapters on layers that a run names as the model does, against stock PEFT."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import ADAPTER_CONFIG
from qerl.models.policy import load_policy, with_adapter
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.run import LAYERS, AdapterSettings, NativeSettings
from tests.families import LEFT_OUT
from tests.tiny import tiny_family

CPU = torch.device("cpu")
TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))
#: Changes of Qwen2's small configuration that make a model of another family.
OTHERS = {
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": LEFT_OUT, "initializer_range": 0.1},
    "starcoder2": {"model_type": "starcoder2", "bos_token_id": 0},
}


def base(folder, name, **changes):
    if name in OTHERS:
        return tiny_family(folder / "base", "qwen2", **OTHERS[name], **changes)
    return tiny_family(folder / "base", name, **changes)


def made(folder, *targets):
    return with_adapter(folder, AdapterSettings(rank=3, targets=targets, train_norms=False), "float32", 0, CPU)


def adapted(policy):
    return {name.partition(".lora_")[0].partition(".layers.")[2].partition(".")[2] for name, _ in policy.trainable()}


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("gpt_neox", ["query_key_value", "dense"], {"attention.query_key_value", "attention.dense"}),
        ("starcoder2", ["c_proj", "q_proj"], {"mlp.c_proj", "self_attn.q_proj"}),
        ("phi3", ["qkv_proj", "down_proj"], {"self_attn.qkv_proj", "mlp.down_proj"}),
        ("qwen2", ["self_attn.v_proj", "up_proj"], {"self_attn.v_proj", "mlp.up_proj"}),
        ("qwen3_5", ["in_proj_qkv", "in_proj_b"], {"linear_attn.in_proj_qkv", "linear_attn.in_proj_b"}),
        ("qwen3_5_moe", ["up_proj", "shared_expert.down_proj", "out_proj"],
         {"mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", "linear_attn.out_proj"}),
    ],
)  # fmt: skip
def test_named_layers_have_adapters_that_stock_peft_loads(tmp_path, name, targets, layers):
    folder = base(tmp_path, name)
    policy, generator = made(folder, *targets), torch.Generator().manual_seed(1)
    assert adapted(policy) == layers
    for _, parameter in policy.trainable():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save(tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = stock(TOKENS).logits
        peft = PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
        expected = peft(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01
    if refused_by_engine(policy.lm.config) is None:
        params = SamplingParams(max_tokens=16, count=2, ignore_eos=True)
        [group] = EngineSampler(policy, NativeSettings()).generate([[5, 6, 7]], params)
        for completion in group:
            with torch.no_grad():
                logits = peft(torch.tensor([[5, 6, 7, *completion.token_ids]])).logits[0, 2:-1].log_softmax(-1)
            of_tokens = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), of_tokens, rtol=0, atol=1e-4)


def test_the_default_is_every_layer_by_the_names_of_the_model(tmp_path):
    policy = with_adapter(base(tmp_path, "gpt_neox"), AdapterSettings(rank=2, train_norms=False), "float32", 0, CPU)
    every = {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert adapted(policy) == every
    policy.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]


def test_a_stored_adapters_names_have_one_order(tmp_path):
    """A set of seven names has nearly never this order, in another process or when it was loaded."""
    folder = base(tmp_path, "qwen2")
    made(folder, *LAYERS).save(tmp_path / "adapter")
    stored = (tmp_path / "adapter" / ADAPTER_CONFIG).read_bytes()
    assert json.loads(stored)["target_modules"] == sorted(LAYERS)
    load_policy(folder, tmp_path / "adapter", "float32", CPU).save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / ADAPTER_CONFIG).read_bytes())
    assert again == {**json.loads(stored), "inference_mode": True}


@pytest.mark.parametrize(
    ("name", "target", "sentence"),
    [
        ("starcoder2", "c_pro", "has c_pro, and .* have q_proj, .*, c_fc, c_proj; .*; did you mean `c_proj`"),
        ("gpt_neox", "q_proj", "has q_proj, and .* have query_key_value, dense, dense_h_to_4h, dense_4h_to_h; leave"),
        ("qwen2", "proj", "has proj, and the blocks of the model have q_proj"),  # PEFT, too, takes whole names alone
        ("qwen2", "lm_head", "has lm_head, and"),
        ("qwen3_5_moe", "shared_expert_gate", "has shared_expert_gate, and"),
        ("qwen3_moe", "experts.up", "has experts.up, and the experts .* have experts.gate_proj, experts.up_proj, "
         "experts.down_proj; did you mean `experts.up_proj`"),
        ("qwen3_moe", "experts.gate_up_proj", "has experts.gate_up_proj, and the experts of the model have"),
    ],
)  # fmt: skip
def test_a_name_that_the_model_lacks_is_one_sentence(tmp_path, name, target, sentence):
    with pytest.raises(ConfigError, match=rf"^adapter\.targets {sentence}"):
        made(base(tmp_path, name), target)


@pytest.mark.parametrize("target", ["q proj", "a..b", ".*", "proj", "experts."])
def test_what_is_no_end_of_a_name_is_no_target(tmp_path, target):
    with pytest.raises(ConfigError, match=r"^adapter\.targets has "):
        made(base(tmp_path, "qwen2"), target)
