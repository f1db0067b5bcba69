"""Checkpoints as llmcompressor publishes them, against compressed-tensors' own unpacking, bit for bit."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import check_checkpoint, weights_format_of
from qerl.models.linear import PackedLinear
from qerl.models.loading import load_model
from qerl.models.quantize import quantize_checkpoint
from tests.tiny import tiny_family, tiny_qwen3

TOKENS = torch.randint(2, 100, (2, 60), generator=torch.Generator().manual_seed(7))
EVERYWHERE = {"targets": "Linear", "ignore": ["lm_head"]}
GROUPS = {
    "attention": preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*"]),
    "mlp": preset_name_to_scheme("NVFP4A16", ["re:.*mlp.*"]),
}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
#: The library's recipes with rounded activations, with the format and number of packed layers.
RECIPES = {
    "NVFP4": ({**EVERYWHERE, "scheme": "NVFP4"}, "nvfp4", 14),
    "MXFP4": ({**EVERYWHERE, "scheme": "MXFP4"}, "mxfp4", 14),
    "mixed": ({"config_groups": GROUPS, "ignore": ["lm_head"], "kv_cache_scheme": CACHE}, "nvfp4", 6),
}


def by_library(stored, config):
    """The weight of each quantized layer, unpacked by the library from the file's tensors."""
    schemes = [QuantizationScheme.model_validate(group) for group in config["config_groups"].values()]
    for scale in (name for name in stored if name.endswith("_proj.weight_scale")):
        layer = scale.removesuffix(".weight_scale")
        state = {name.removeprefix(f"{layer}."): stored[name] for name in stored if name.startswith(f"{layer}.weight")}
        packed = "weight_packed" in state
        scheme = next(scheme for scheme in schemes if (scheme.weights.num_bits == 4) == packed)
        yield layer, BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_equal_those_that_the_library_unpacks(tmp_path, recipe):
    settings, weights_format, packed = RECIPES[recipe]
    dense = AutoModelForCausalLM.from_pretrained(tiny_qwen3(tmp_path / "dense"), dtype=torch.bfloat16)
    texts = DataLoader([{"input_ids": TOKENS[:1]}], batch_size=None)
    oneshot(model=dense, recipe=QuantizationModifier(**settings), dataset=texts)
    dense.save_pretrained(folder := tmp_path / "published")

    check_checkpoint(folder)
    assert weights_format_of(folder) == weights_format
    model = load_model(folder, torch.bfloat16)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == packed
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    weights = dict(by_library(load_file(folder / "model.safetensors"), config))
    assert len(weights) == 14
    for layer, weight in weights.items():
        expected.get_submodule(layer).weight.data = weight.to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def test_scales_of_8_bit_exponents_by_their_own_dtype(tmp_path):
    """MXFP4's scales are E8M0, which some writers state as such and others as bytes."""
    folder = tmp_path / "mxfp4"
    quantize_checkpoint(tiny_qwen3(tmp_path / "dense"), folder, "mxfp4")
    path = folder / "model.safetensors"
    as_bytes = load_model(folder, torch.bfloat16)(TOKENS).logits
    save_file(
        {
            name: tensor.view(torch.float8_e8m0fnu) if name.endswith("weight_scale") else tensor
            for name, tensor in load_file(path).items()
        },
        path,
    )
    assert torch.equal(load_model(folder, torch.bfloat16)(TOKENS).logits, as_bytes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_are_packed_as_the_library_packs_them(tmp_path, family):
    """Codes, scales and names of a mixture equal those of llmcompressor with a model, and so does what is ignored."""
    dense = tiny_family(tmp_path / "dense", family, dtype=torch.bfloat16)
    quantize_checkpoint(dense, tmp_path / "packed", "nvfp4")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    gates = {name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith("gate.weight")}
    ignored = ["lm_head", "re:.*mlp.gate$", "re:.*linear_attn.*", "re:.*shared_expert_gate$"]
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignored))
    model.save_pretrained(tmp_path / "library")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "library"))
    assert found.keys() == expected.keys()
    assert any(".experts.3.up_proj.weight_packed" in name for name in expected)
    for name, tensor in expected.items():
        if "norm" not in name:  # the library rounds those of the form 1 + w on its way
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert {name for name in stated["ignore"] if "linear_attn" not in name} == {"lm_head", *gates}
