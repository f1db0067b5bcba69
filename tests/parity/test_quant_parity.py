"""Bit-exactness against llmcompressor, compressed-tensors, bitsandbytes and transformers."""

import json
import math
from itertools import product

import bitsandbytes.functional as bnb
import pytest
import torch
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from qerl.checkpoints.files import CheckpointError, read_headers, weight_files
from qerl.formats.codecs import PACKED_FORMATS, nvfp4_global_scale, quantize
from qerl.models.loading import load_model
from qerl.models.quantize import quantization_report, quantize_checkpoint
from qerl.settings.models import FORMATS, FormatError
from tests.parity.test_codec_parity import LIBRARY, assert_bits_equal
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3

TOKENS = torch.randint(2, 100, (2, 100), generator=torch.Generator().manual_seed(7))
BUILDERS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder of each architecture's checkpoint in each format, with the report of its quantization."""
    root = tmp_path_factory.mktemp("checkpoints")
    reports = {}
    for name, build in BUILDERS.items():
        build(root / name / "bf16")
        for weights_format in PACKED_FORMATS:
            target = root / name / weights_format
            reports[name, weights_format] = quantize_checkpoint(root / name / "bf16", target, weights_format)
    return root, reports


everywhere = pytest.mark.parametrize(
    ("architecture", "weights_format"),
    [(name, weights_format) for name in BUILDERS for weights_format in PACKED_FORMATS],
)


def by_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def test_nf4_without_double_quantization(checkpoints, tmp_path):
    scheme = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    source = checkpoints[0] / "qwen2" / "bf16"
    saved = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=scheme)
    saved.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight_absmax.dtype == torch.float32
    assert torch.equal(model(TOKENS).logits, by_transformers(tmp_path)(TOKENS).logits)


@pytest.mark.parametrize("architecture", BUILDERS)
def test_codec_reproduces_llmcompressors_checkpoint(checkpoints, architecture):
    """Byte for byte, with the global scale that fused layers share."""
    folder = checkpoints[0] / architecture
    source = load_file(folder / "bf16" / "model.safetensors")
    groups = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    for weights_format in ("nvfp4", "mxfp4"):
        stored = load_file(folder / weights_format / "model.safetensors")
        for key in [key for key in stored if key.endswith("weight_packed")]:
            layer = key.removesuffix(".weight_packed")
            prefix, _, kind = layer.rpartition(".")
            fused = next(group for group in groups if kind in group)
            shared = nvfp4_global_scale(*(source[f"{prefix}.{other}.weight"] for other in fused))
            packed = quantize(source[f"{layer}.weight"], weights_format, global_scale=shared)
            assert_bits_equal({name: stored[f"{layer}.{name}"] for name in packed.tensors}, packed.tensors)


def by_library(source, target, weights_format):
    """The whole model in memory, quantized and saved by the library's main entry point."""
    if weights_format == "nf4":
        scheme = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=scheme)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        recipe = QuantizationModifier(targets="Linear", scheme=FORMATS[weights_format].scheme, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
    model.save_pretrained(target)
    return tensors_of(target)


def tensors_of(folder):
    return {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}


WAYS = {"whole": ("1GB", torch.bfloat16), "files": ("30KB", torch.bfloat16), "float32": ("1GB", torch.float32)}
#: All pairs of an architecture, a format and a way of storage; NVFP4 layers share a scale by name, across files, too.
PARTS = [
    pytest.param(architecture, weights_format, *WAYS[way], id=f"{architecture}-{weights_format}-{way}")
    for (a, architecture), (f, weights_format), (w, way) in product(*map(enumerate, (BUILDERS, PACKED_FORMATS, WAYS)))
    if (a + f + w) % 3 == 0 or (weights_format == "nvfp4" and way == "files")
]


@pytest.mark.parametrize(("architecture", "weights_format", "shards", "dtype"), PARTS)
def test_packing_by_parts_equals_the_librarys_packing_of_the_whole(
    tmp_path, architecture, weights_format, shards, dtype
):
    """Also where layers that share a scale lie in different files."""
    source = BUILDERS[architecture](tmp_path / "dense", shard_size=shards, dtype=dtype)
    expected = by_library(source, tmp_path / "library", weights_format)
    quantize_checkpoint(source, tmp_path / "ours", weights_format)
    found = tensors_of(tmp_path / "ours")
    assert_bits_equal(found, expected)
    files = {path.name for path in (tmp_path / "ours").glob("*.safetensors")}
    assert files == {info.shard.name for info in read_headers(tmp_path / "ours").values()}
    headers = read_headers(source)
    split = {headers[f"model.layers.{n}.mlp.{p}_proj.weight"].shard for n in (0, 1) for p in ("gate", "up")}
    assert (len(split) > 2) == (shards == "30KB") == (len(files) > 1)
    assert AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


@pytest.mark.parametrize("weights_format", LIBRARY)
def test_config_is_that_of_the_librarys_quantization_without_a_model(checkpoints, tmp_path, weights_format):
    source = checkpoints[0] / "qwen2" / "bf16"
    scheme, ignored = FORMATS[weights_format].scheme, ["lm_head", "re:.*embed_tokens"]
    model_free_ptq(source, tmp_path / "free", scheme=scheme, ignore=ignored)
    found, expected = (
        json.loads((folder / "config.json").read_text())
        for folder in (checkpoints[0] / "qwen2" / weights_format, tmp_path / "free")
    )
    [group] = expected["quantization_config"].pop("config_groups").values()
    assert found["quantization_config"].pop("config_groups") == {"group_0": group}
    # Embeddings are no linear layers, which readers go by; the library without a model goes by names.
    assert expected["quantization_config"].pop("ignore") == ignored
    assert found["quantization_config"].pop("ignore") == ["lm_head"]
    assert found == expected


@everywhere
def test_report(checkpoints, architecture, weights_format):
    root, reports = checkpoints
    source, target = root / architecture / "bf16", root / architecture / weights_format
    report = reports[architecture, weights_format]
    assert report == quantization_report(source, target, weights_format)
    assert report["size_bytes"] == (target / "model.safetensors").stat().st_size
    dense, packed = load_model(source, torch.float32), by_transformers(target)
    assert report["method"] == {"nf4": "nf4-double-quant"}.get(weights_format, "rtn")
    assert {"torch", "transformers"} < report["versions"].keys()
    packed(TOKENS)  # compressed-tensors unpacks in the first forward pass
    error, norm = 0.0, 0.0
    for layer in range(2):
        weight = dense.model.layers[layer].mlp.up_proj.weight.double()
        module = packed.model.layers[layer].mlp.up_proj
        if weights_format == "nf4":
            unpacked = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            unpacked = module.weight
        error += (weight - unpacked.double()).square().sum().item()
        norm += weight.square().sum().item()
    assert report["relative_error"]["up_proj"] == pytest.approx(math.sqrt(error / norm), rel=2e-3)
    assert len(report["relative_error"]) == 7
    tensors = load_file(target / "model.safetensors")
    layers = {key: value for key, value in tensors.items() if "_proj.weight" in key}
    count = sum(p.numel() for name, p in dense.named_parameters() if "_proj.weight" in name)
    assert report["bits_per_weight"] == pytest.approx(8 * sum(t.nbytes for t in layers.values()) / count)
    total = sum(p.numel() for p in dense.parameters())
    assert report["bits_per_weight_model"] == pytest.approx(8 * sum(t.nbytes for t in tensors.values()) / total)


def test_weights_of_zero_are_packed_without_an_error(tmp_path):
    source = tiny_qwen2(tmp_path / "dense", num_hidden_layers=1)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    errors = quantize_checkpoint(source, tmp_path / "packed", "nf4")["relative_error"]
    assert errors["o_proj"] == 0 < errors["q_proj"]


def test_bf16_is_a_report_only(checkpoints, tmp_path):
    source = checkpoints[0] / "qwen2" / "bf16"
    report = quantize_checkpoint(source, tmp_path / "out", "bf16")
    assert list(tmp_path.iterdir()) == []
    assert (report["bits_per_weight"], report["method"], report["relative_error"]) == (16.0, "none", {})


def test_quantizing_leaves_no_litter_and_keeps_the_tokenizer(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = checkpoints[0] / "qwen2" / "bf16"
    for weights_format in PACKED_FORMATS:
        quantize_checkpoint(source, tmp_path / "out" / weights_format, weights_format)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(PACKED_FORMATS)
    text = "12 + 7 = 19"
    expected = AutoTokenizer.from_pretrained(source).encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "nvfp4").encode(text) == expected


def test_quantizing_errors_write_nothing(checkpoints, tmp_path):
    source = checkpoints[0] / "qwen2" / "bf16"
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(source.parent / "nvfp4", tmp_path / "again", "nvfp4")
    odd = tiny_qwen2(tmp_path / "odd", intermediate_size=80)
    with pytest.raises(FormatError, match=r"layers\.\d\.mlp\.down_proj: nf4.*80"):
        quantize_checkpoint(odd, tmp_path / "target", "nf4")
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(source, odd, "nvfp4")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_damaged_packed_checkpoints_are_errors(checkpoints, tmp_path, weights_format):
    source = checkpoints[0] / "qwen2" / weights_format
    layer = "model.layers.0.mlp.up_proj"
    scale = f"{layer}.weight.absmax" if weights_format == "nf4" else f"{layer}.weight_scale"
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())

    def refused(changed, match):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=match):
            load_model(tmp_path, torch.bfloat16)

    refused({key: tensor for key, tensor in tensors.items() if key != scale}, f"lacks 1 tensors.*{scale}")
    refused({**tensors, scale: tensors[scale].to(torch.float32)}, f"{scale} as F32.*calls for")
    refused({**tensors, f"{layer}.odd_scale": torch.ones(1)}, "odd_scale")
    refused({**tensors, scale: tensors[scale][:-1].clone()}, f"{scale} as .*calls for")
