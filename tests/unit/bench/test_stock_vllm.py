"""The checkpoint and the adapter with which stock vLLM is timed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qerl.bench import peers
from qerl.checkpoints.shapes import PUBLISHED
from qerl.models.experts import Float32Router
from qerl.models.structure import empty_model, structure_of
from qerl.settings.models import Base
from tests.families import FAMILIES


def test_vllm_loads_nf4_from_a_checkpoint_and_nothing_else(tmp_path):
    loading = {}
    for weights in ("bf16", "nvfp4", "nf4"):
        loading[weights] = peers.write_model(tmp_path / weights, Base("tiny", weights))
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
    targets = peers._write_adapter(tmp_path, "small", 4)
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), str(tmp_path))
    structure = structure_of(config)
    adapted = [value for name, value in policy.named_parameters() if "lora_B" in name]
    assert len(adapted) == len(structure.windows) * len(structure.linears)
    assert all(value.abs().sum() > 0 for value in adapted)  # an adapter that PEFT misses stays 0
    assert sorted(targets) == sorted({name.split(".")[-1] for name in structure.linears})


@pytest.mark.parametrize(
    ("family", "name", "weights", "method"),
    [
        ("qwen3_moe", "Qwen3Moe", "bf16", None),
        ("qwen3_moe", "Qwen3Moe", "nvfp4", "compressed-tensors"),
        ("gpt_oss", "GptOss", "mxfp4", "mxfp4"),  # packed experts, as published
    ],
)
def test_vllms_config_of_a_published_shape_is_the_models(tmp_path, monkeypatch, family, name, weights, method):
    monkeypatch.setitem(PUBLISHED, "gpt-oss-20b", FAMILIES[family].config().to_dict())
    assert peers.write_model(tmp_path / "model", Base("gpt-oss-20b", weights)) == {"load_format": "dummy"}
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["architectures"] == [f"{name}ForCausalLM"]
    quantization = stored.get("quantization_config", {})
    assert quantization.get("quant_method") == method
    assert ("re:.*mlp.gate$" in quantization.get("ignore", [])) == (weights == "nvfp4")


def test_vllm_is_told_which_layers_have_an_adapter(tmp_path, monkeypatch):
    """Not experts, router and head."""
    given: list[dict] = []
    engine, request = (lambda **options: given.append(options)), (lambda *adapter: adapter)
    for name, content in {"vllm": {"LLM": engine}, "vllm.lora.request": {"LoRARequest": request}}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.setitem(PUBLISHED, "small", FAMILIES["qwen3_moe"].config().to_dict())
    _, adapter = peers.start_engine(tmp_path, Base("small", "bf16"), 4, max_num_seqs=2)
    assert given[0]["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (given[0]["max_lora_rank"], given[0]["max_num_seqs"]) == (8, 2)
    assert json.loads((Path(adapter[2]) / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("packed", [False, True])
def test_vllm_is_told_which_layers_of_a_hybrid_stay_dense(tmp_path, monkeypatch, family, packed):
    """All but those that this project's files pack, by the names of the model; vLLM runs b and a as one."""
    config = FAMILIES[family].config()
    monkeypatch.setitem(PUBLISHED, "small", config.to_dict())
    peers.write_model(tmp_path / "model", Base("small", "nvfp4", packed_nets=packed))
    ignored = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]["ignore"]

    def is_dense(name):
        return any(re.match(pattern.removeprefix("re:"), name) for pattern in ignored)

    modules = empty_model(config, torch.bfloat16).named_modules()
    linears = {name for name, layer in modules if isinstance(layer, (torch.nn.Linear, Float32Router))}
    assert {name for name in linears if not is_dense(name)} == structure_of(config).packed_layers(packed)
    assert is_dense("model.layers.0.linear_attn.in_proj_ba")
    assert is_dense("model.layers.0.linear_attn.in_proj_qkvz") != packed


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")])
def test_vllm_loads_a_hybrid_as_its_text_part_of_the_published_model(tmp_path, monkeypatch, family, kind):
    config = FAMILIES[family].config()
    monkeypatch.setitem(PUBLISHED, "small", config.to_dict())
    options = peers.write_model(tmp_path / "model", Base("small", "nvfp4"))
    assert options["language_model_only"]
    whole = AutoConfig.from_pretrained(tmp_path / "model")
    assert whole.architectures == [f"{kind}ForConditionalGeneration"]
    assert whole.text_config.layer_types == config.layer_types
    assert whole.text_config.linear_num_value_heads == config.linear_num_value_heads
    # The names of the published model's layers, which have the text part under a name of its own.
    with torch.device("meta"):
        layers = dict(AutoModelForImageTextToText.from_config(whole).named_modules())
    shapes = peers._adapted_shapes("small")
    assert {name: (layers[name].out_features, layers[name].in_features) for name in shapes} == shapes
