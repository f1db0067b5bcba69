"""The checkpoint and the adapter with which stock vLLM is timed."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.bench import stock_vllm
from qerl.checkpoints.published import PUBLISHED
from qerl.layers.structure import structure_of
from tests.families import FAMILIES


def test_vllm_loads_nf4_from_a_checkpoint_and_nothing_else(tmp_path):
    loading = {}
    for weights in ("bf16", "nvfp4", "nf4"):
        loading[weights] = stock_vllm.write_model(tmp_path / weights, "tiny", weights)
    assert loading["bf16"] == loading["nvfp4"] == {"load_format": "dummy"}
    assert loading["nf4"] == {"load_format": "bitsandbytes", "quantization": "bitsandbytes"}
    config = AutoConfig.from_pretrained(tmp_path / "nf4")
    assert not hasattr(config, "quantization_config")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
    assert dense.dtype == torch.bfloat16
    assert dense.model.layers[1].mlp.down_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "phi3"])
def test_vllms_adapter_of_a_published_shape_is_one_of_pefts(tmp_path, monkeypatch, family):
    config = FAMILIES[family].config()
    monkeypatch.setitem(PUBLISHED, "small", config.to_dict())
    stock_vllm._write_adapter(tmp_path, "small", 4)
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), str(tmp_path))
    structure = structure_of(config)
    adapted = [value for name, value in policy.named_parameters() if "lora_B" in name]
    assert len(adapted) == len(structure.windows) * len(structure.linears)
    assert all(value.abs().sum() > 0 for value in adapted)  # an adapter that PEFT misses stays 0


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_vllms_config_of_a_published_shape_is_the_models(tmp_path, monkeypatch, weights):
    monkeypatch.setitem(PUBLISHED, "small", FAMILIES["qwen3_moe"].config().to_dict())
    assert stock_vllm.write_model(tmp_path / "model", "small", weights) == {"load_format": "dummy"}
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["architectures"] == ["Qwen3MoeForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path / "model").num_experts == 4
    assert ("re:.*mlp.gate$" in stored["quantization_config"]["ignore"]) if weights == "nvfp4" else True
    assert ("quantization_config" in stored) == (weights == "nvfp4")
