"""Checkpoints as ModelOpt publishes them, written here byte by byte, and their weights by formulas in float64."""

import json
import logging
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.api import base_folder
from qerl.checkpoints.files import CheckpointError, check_checkpoint, read_headers, weights_format_of
from qerl.doctor import candidate, diagnose
from qerl.models.export import write_dense
from qerl.models.linear import PackedLinear
from qerl.models.loading import load_model
from qerl.models.quantize import quantize_checkpoint
from tests.tiny import edit_config, stack_experts, tiny_family, tiny_llama, write_template

TOKENS = torch.randint(2, 100, (2, 60), generator=torch.Generator().manual_seed(7))
RNG = np.random.default_rng


def minifloat(codes, exponent_bits, mantissa_bits, bias):
    """Values of codes with a sign, an exponent and a mantissa, by IEEE 754's definition."""
    sign = np.where(codes >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    exponent = (codes >> mantissa_bits & (1 << exponent_bits) - 1).astype(np.int64)
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    return sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)


def tensor(array, dtype=None):
    return torch.from_numpy(array) if dtype is None else torch.from_numpy(array).view(dtype)


def as_nvfp4(name, shape, seed):
    """A layer as ModelOpt stores NVFP4: its tensors, and its weight in float64."""
    rng, (rows, columns) = RNG(seed), shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.integers(1, 0x70, (rows, columns // 16), dtype=np.uint8)
    second = np.float32(rng.uniform(1e-4, 3e-4))
    weight = minifloat(codes, 2, 1, 1) * np.repeat(minifloat(scales, 4, 3, 7), 16, axis=1) * np.float64(second)
    tensors = {
        f"{name}.weight": tensor(codes[:, ::2] | codes[:, 1::2] << 4),
        f"{name}.weight_scale": tensor(scales, torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.tensor(second),
        f"{name}.input_scale": torch.tensor(0.01),
    }
    return tensors, weight


def as_fp8(name, shape, seed, scaled):
    """A layer as ModelOpt stores FP8, with a scale a tensor, a row or a block: its tensors, and its weight."""
    rng, (rows, columns) = RNG(seed), shape
    codes = rng.integers(0, 0x60, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    blocks = -(-rows // 128), -(-columns // 128)
    stored = {"tensor": (), "row": (rows, 1), "block": (blocks[0], 1, blocks[1], 1)}[scaled]
    scale = rng.uniform(0.005, 0.01, stored).astype(np.float32)
    spread = {"tensor": (1, 1), "row": (rows, 1), "block": blocks}[scaled]
    each = np.asarray(scale, dtype=np.float64).reshape(spread)
    if scaled == "block":
        each = np.repeat(np.repeat(each, 128, axis=0), 128, axis=1)[:rows, :columns]
    tensors = {
        f"{name}.weight": tensor(codes, torch.float8_e4m3fn),
        f"{name}.weight_scale": tensor(np.asarray(scale)),
        f"{name}.input_scale": torch.tensor(0.01),
    }
    return tensors, minifloat(codes, 4, 3, 7) * each


#: By layers of the model, what each checkpoint has: the later pattern counts.
LAYOUTS = {
    "nvfp4": {"*_proj": "nvfp4", "model.layers.1.self_attn*": "dense"},
    "mixed": {
        **{"*mlp*_proj": "nvfp4", "*1*o_proj": "nvfp4", "lm_head": "nvfp4"},
        **{"*q_proj": "tensor", "*k_proj": "row", "*v_proj": "block"},
    },
}
STATED = {
    "nvfp4": {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
    },
    "mixed": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"x": {"quant_algo": "FP8"}, "y": {"quant_algo": "NVFP4", "group_size": 16}},
        "ignore": [],
    },
}


def published(folder, layout):
    """A Llama as ModelOpt stores it, in the layout. Returns the packed weights in float64, and the others'."""
    tiny_llama(folder, dtype=torch.float32, hidden_size=256, intermediate_size=160)
    write_template(folder)
    path, weights = folder / "model.safetensors", ({}, {})
    dense = load_file(path)
    tensors = dict(dense)
    for seed, name in enumerate(sorted(name for name in dense if name.endswith(".weight") and dense[name].dim() == 2)):
        layer = name.removesuffix(".weight")
        kind = next((kind for part, kind in reversed(LAYOUTS[layout].items()) if fnmatch(layer, part)), "dense")
        if kind == "dense":
            continue
        shape = tuple(tensors.pop(name).shape)
        stored, weight = as_nvfp4(layer, shape, seed) if kind == "nvfp4" else as_fp8(layer, shape, seed, kind)
        tensors |= stored
        weights[kind != "nvfp4" or layer == "lm_head"][layer] = weight
    save_file({**tensors, "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}, path)
    if "quantization" in STATED[layout]:
        (folder / "hf_quant_config.json").write_text(json.dumps(STATED[layout]))
    else:
        edit_config(folder, quantization_config=STATED[layout])
    return weights


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / request.param
    return folder, *published(folder, request.param)


def oracle(folder, weights, scratch):
    """Stock transformers' model with the weights rounded once to float32."""
    tiny_llama(scratch, dtype=torch.float32, hidden_size=256, intermediate_size=160)
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    for layer, weight in weights.items():
        model.get_submodule(layer).weight.data = torch.from_numpy(weight).float()
    return model


def test_weights_are_those_of_the_formula(checkpoint, tmp_path):
    folder, packed, unpacked = checkpoint
    check_checkpoint(folder)
    assert weights_format_of(folder) == "nvfp4"
    model = load_model(folder, torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert layers.keys() == packed.keys()
    for name, weight in packed.items():
        np.testing.assert_allclose(layers[name].dense_weight(torch.float32).double().numpy(), weight, rtol=2**-22)
    for name, weight in unpacked.items():
        np.testing.assert_allclose(model.get_submodule(name).weight.detach().double().numpy(), weight, rtol=2**-23)
    expected = oracle(folder, packed | unpacked, tmp_path / "dense")
    with torch.no_grad():
        found, wanted = (lm(TOKENS).logits.log_softmax(-1) for lm in (model, expected))
    assert (found - wanted).abs().max() < 1e-4
    write_dense(folder, tmp_path / "copy", torch.float32)  # which vLLM gets on a CPU
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, copy(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_the_log_says_what_is_not_applied(checkpoint, caplog):
    folder, _, unpacked = checkpoint
    with caplog.at_level(logging.INFO, logger="qerl"):
        load_model(folder, torch.bfloat16)
    assert "the rounding of activations" in caplog.text
    assert ("keys and values, which its config.json states, isn't applied" in caplog.text) == (not unpacked)
    assert (f"{len(unpacked)} layers such as" in caplog.text) == bool(unpacked)


def test_a_run_takes_it_as_it_is(checkpoint):
    folder = checkpoint[0]
    assert base_folder(str(folder), "nvfp4") == folder
    asked = candidate(str(folder), None)
    assert asked.weights == "nvfp4"
    assert any("rounding of activations" in note for note in diagnose(asked, None).notes)
    with pytest.raises(CheckpointError, match=r"already \(nvfp4\), .*weights=mxfp4; set weights=nvfp4, which"):
        base_folder(str(folder), "mxfp4")
    with pytest.raises(CheckpointError, match=r"is quantized already \(nvfp4\); give the dense checkpoint"):
        base_folder(str(folder))


_SCALE, _SECOND = "model.layers.0.self_attn.q_proj.weight_scale", "model.layers.0.mlp.up_proj.weight_scale_2"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (_SCALE, torch.ones(3), r"q_proj\.weight in FP8 .*F32 \[3\]; only"),
        (_SCALE, torch.tensor(3e38), r"infinity in .*q_proj\.weight as it is used"),
        (_SECOND, torch.tensor(0.0), r"holds 0 as .*weight_scale_2"),
        (_SECOND, torch.tensor(np.inf), r"NaN or infinity in .*weight_scale_2"),
        (_SECOND, torch.tensor(1e-40), r"infinity in .*weight_scale_2 as it is used"),
        (_SECOND, torch.tensor(3e38), r"up_proj: weight_global_scale makes weights"),
        (_SECOND, torch.ones(2), r"weight_global_scale as F32 \[2\]"),
        ("lm_head.weight_scale_2", torch.tensor(3e38), r"lm_head: weight_global_scale makes weights infinite or NaN"),
        ("model.layers.0.mlp.up_proj.pre_quant_scale", torch.ones(256), r"holds .*\.pre_quant_scale, with which"),
        ("lm_head.weight_scale", None, "packed lm_head has only"),
        (_SCALE, None, r"holds .*q_proj\.weight in FP8 without its scale; download"),
    ],
)
def test_damage_is_one_sentence(tmp_path, name, value, match):
    folder = tmp_path / "damaged"
    published(folder, "mixed")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file({**tensors, **({} if value is None else {name: value})}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        load_model(folder, torch.bfloat16)


@pytest.fixture
def stacked(tmp_path):
    """A Qwen3.5 with a tensor for each expert's layer, and with stacks of them."""
    for name in ("apart", "stacked"):
        tiny_family(tmp_path / name, "qwen3_5_moe", dtype=torch.bfloat16)
    stack_experts(tmp_path / "stacked")
    return tmp_path


def test_dense_stacks_of_experts_are_read_and_packed_as_experts_apart(stacked):
    apart, whole = (read_headers(stacked / name) for name in ("apart", "stacked"))
    assert {name: (info.shape, info.size_bytes) for name, info in whole.items()} == {
        name: (info.shape, info.size_bytes) for name, info in apart.items()
    }
    model, stock = (
        load_model(stacked / "stacked", torch.float32),
        AutoModelForCausalLM.from_pretrained(stacked / "stacked", dtype=torch.float32),
    )
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, stock(TOKENS).logits, rtol=1e-4, atol=1e-4)
    packed = []
    for name in ("apart", "stacked"):
        quantize_checkpoint(stacked / name, stacked / f"{name}-packed", "nvfp4")
        packed.append(load_file(stacked / f"{name}-packed/model.safetensors"))
    assert packed[0].keys() == packed[1].keys()
    assert all(torch.equal(packed[0][name], packed[1][name]) for name in packed[0])
    dense = {name for name in packed[0] if name.endswith("weight") and packed[0][name].ndim == 2}
    gates = {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    assert {name.partition("layers.0.")[2] for name in dense if "layers.0.mlp" in name} == gates


@pytest.mark.parametrize("shape", [(4, 127, 64), (4, 128)])
def test_what_is_no_stack_of_experts_is_one_sentence(stacked, shape):
    path, name = stacked / "stacked/model.safetensors", "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**load_file(path), name: torch.zeros(shape)}, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj \[4, .*is no stack \[experts,"):
        load_model(stacked / "stacked", torch.bfloat16)
