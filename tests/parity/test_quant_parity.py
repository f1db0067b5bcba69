"""Bit-exactness against llmcompressor, compressed-tensors, bitsandbytes and transformers."""

import json
import math
from itertools import product
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from qerl.checkpoints.folder import CheckpointError, check_checkpoint, read_headers, weight_files, weights_format_of
from qerl.formats.codecs import PACKED_FORMATS, dequantize, from_checkpoint, nvfp4_global_scale, quantize, to_checkpoint
from qerl.formats.errors import FormatError
from qerl.formats.nf4 import STATE_NAME
from qerl.layers.packed_linear import PackedLinear, dense_weights
from qerl.policy.loading import load_model
from qerl.quantization.checkpoint import quantization_report, quantize_checkpoint
from qerl.quantization.writer import SCHEMES
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3

LIBRARY = {
    "nvfp4": (NVFP4PackedCompressor, preset_name_to_scheme("NVFP4A16", ["Linear"])),
    "mxfp4": (MXFP4PackedCompressor, preset_name_to_scheme("MXFP4A16", ["Linear"])),
}
DTYPES = [torch.float32, torch.bfloat16]


def bits(tensor):
    """The tensor as bytes, so that signed zeros, infinities and NaNs compare exactly."""
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_bits_equal(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


def weights(dtype):
    """Random and adversarial matrices by name; all magnitudes keep their scales within the float32 range."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(4, 8)
    outlier = 1e-3 * normal(8, 128)
    outlier[3, 7] = 1e3
    cases = {
        "square": normal(128, 128),
        "wide": normal(24, 320),
        "tall": normal(300, 64),
        "one row": normal(1, 64),
        "zeros": torch.zeros(4, 128),
        "negative zeros": torch.full((4, 128), -0.0),
        "zero groups": normal(16, 128) * (torch.arange(128) // 64),
        "one outlier": outlier,
        "constant": torch.ones(4, 128),
        "ties": torch.cat([ties, -ties], dim=1),
        "scaled ties": torch.cat([ties, -ties], dim=1) * torch.logspace(-3, 3, 4, base=2).unsqueeze(1),
        "powers of two": torch.logspace(-20, 20, 64, base=2).repeat(4, 2),
        "edges": torch.tensor([2688.0, -2688.0, 448.0, 6.0, -6.0, 0.5, 5.0, -5.0]).repeat(2, 16),
        "just past the edges": torch.tensor([2688.0, -2690.0, 449.0, 6.01, -6.01]).repeat(2, 128)[:, :128],
        "smallest normal": torch.full((2, 128), torch.finfo(dtype).tiny),
        "mixed magnitudes": normal(16, 192) * torch.logspace(-40, 30, 192),
        "heavy tails": normal(32, 128) ** 5,
    }
    cases |= {f"times {scale:g}": scale * normal(8, 128) for scale in (1e-45, 1e-40, 1e-38, 1e-36, 1e-20, 1e20, 1e30)}
    return {name: weight.to(dtype) for name, weight in cases.items()}


CASES = [(dtype, name) for dtype in DTYPES for name in weights(dtype)]
cases = pytest.mark.parametrize(("dtype", "name"), CASES, ids=[f"{str(d)[6:]}-{n}" for d, n in CASES])


def library_fp4(weight, weights_format):
    """The packed tensors and the bfloat16 weight of compressed-tensors."""
    compressor, scheme = LIBRARY[weights_format]
    groups = weight.view(weight.shape[0], -1, scheme.weights.group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight.clone()}
    if weights_format == "nvfp4":
        state["weight_global_scale"] = generate_gparam(low.min().reshape(1), high.max().reshape(1))
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=state.get("weight_global_scale"))
    packed = compressor.compress({**state, "weight_scale": scale.to(weight.dtype)}, scheme)
    return packed, compressor.decompress(dict(packed), scheme)["weight"]


@cases
@pytest.mark.parametrize("weights_format", LIBRARY)
def test_fp4_equals_compressed_tensors(weights_format, dtype, name):
    weight = weights(dtype)[name]
    expected, dense = library_fp4(weight, weights_format)
    packed = quantize(weight, weights_format)
    assert packed.tensors.keys() == expected.keys()
    for key, tensor in packed.tensors.items():
        assert_bits_equal(tensor, expected[key])
    assert_bits_equal(dequantize(packed, torch.bfloat16), dense)
    # The float32 weight is the one that the library rounds to bfloat16.
    assert_bits_equal(dequantize(packed, torch.float32).bfloat16(), dense)


@pytest.mark.parametrize("weights_format", LIBRARY)
def test_largest_bfloat16_but_one_power(weights_format):
    """MXFP4 stays finite up to the largest numbers; the library's exponent of an infinity is undefined beyond."""
    weight = torch.full((2, 64), 2.0**126, dtype=torch.bfloat16)
    expected, dense = library_fp4(weight, weights_format)
    packed = quantize(weight, weights_format)
    assert_bits_equal(packed.tensors["weight_packed"], expected["weight_packed"])
    assert_bits_equal(dequantize(packed, torch.bfloat16), dense)


@cases
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_equals_bitsandbytes(nested, dtype, name):
    weight = weights(dtype)[name]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
    expected = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    packed = quantize(weight, "nf4", double_quant=nested)
    found = to_checkpoint(packed, dtype)
    assert found.keys() == {"weight", *expected}
    assert_bits_equal(found["weight"], codes)
    for key in found.keys() - {"weight", STATE_NAME}:
        assert_bits_equal(found[key], expected[key])
    metadata = [json.loads(bytes(tensors[STATE_NAME].tolist())) for tensors in (found, expected)]
    assert metadata[0] == metadata[1]
    for out_dtype in DTYPES:
        state.dtype = out_dtype
        dense = bnb.dequantize_4bit(codes, state)
        ours = dequantize(from_checkpoint("nf4", {"weight": codes, **expected}), out_dtype)
        # bitsandbytes' CPU code flushes to zero what is subnormal before it is rounded to bfloat16.
        normal = (ours.abs() > torch.finfo(out_dtype).tiny) | (out_dtype == torch.float32)
        assert_bits_equal(ours[normal], dense[normal])
        assert ((dense[~normal] == 0) | (dense[~normal] == ours[~normal])).all()


def test_absmax_codes_of_many_blocks_equal_bitsandbytes():
    weight = torch.randn(512, 2048, generator=torch.Generator().manual_seed(3)) ** 3
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed = quantize(weight, "nf4")
    assert_bits_equal(packed.tensors["weight_absmax"], state.absmax)
    assert_bits_equal(packed.tensors["weight_packed"], codes)


# --- checkpoints -----------------------------------------------------------------------------------------------------

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


@everywhere
def test_loaded_logits_equal_those_of_transformers(checkpoints, architecture, weights_format):
    folder = checkpoints[0] / architecture / weights_format
    check_checkpoint(folder)
    assert weights_format_of(folder) == weights_format
    model = load_model(folder, torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 14
    # With gradients bitsandbytes unpacks to bfloat16 and multiplies; without, a fused product may round otherwise.
    expected = by_transformers(folder)(TOKENS).logits
    assert torch.equal(model(TOKENS).logits, expected)
    with torch.no_grad(), dense_weights(model, torch.bfloat16):
        assert torch.equal(model(TOKENS).logits, expected)


@everywhere
def test_float32_logits_equal_a_dense_model_of_the_librarys_weights(checkpoints, architecture, weights_format):
    folder = checkpoints[0] / architecture / weights_format
    model = load_model(folder, torch.float32)
    dense = load_model(folder.parent / "bf16", torch.float32)
    stored = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            dense.get_submodule(name).weight.data = float32_by_library(stored, name, weights_format)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-5, atol=1e-6)


def float32_by_library(stored, layer, weights_format):
    tensors = {
        key.removeprefix(f"{layer}."): tensor for key, tensor in stored.items() if key.startswith(f"{layer}.weight")
    }
    if weights_format == "nf4":
        codes = tensors.pop("weight")
        state = bnb.QuantState.from_dict(tensors, device="cpu")
        state.dtype = torch.float32
        return bnb.dequantize_4bit(codes, state)
    # The definition on the library's own unpacked values: its decompress knows bfloat16 only.
    compressor, scheme = LIBRARY[weights_format]
    scale = tensors["weight_scale"]
    unit = {**tensors, "weight_global_scale": torch.ones(1)} if weights_format == "nvfp4" else dict(tensors)
    dense = compressor.decompress(unit, scheme)["weight"].float()
    if weights_format == "nvfp4":
        values = dense.view(*scale.shape, 16) / scale.float().unsqueeze(-1)
        factor = scale.float() / tensors["weight_global_scale"]
        return (values * factor.unsqueeze(-1)).view_as(dense)
    return dense


@pytest.mark.parametrize("weights_format", PACKED_FORMATS)
def test_sharded_checkpoint(checkpoints, tmp_path, weights_format):
    folder = checkpoints[0] / "llama" / weights_format
    sharded = reshard(folder, tmp_path / "sharded")
    check_checkpoint(sharded)
    model, whole = load_model(sharded, torch.bfloat16), load_model(folder, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
    assert len({info.shard for info in read_headers(sharded).values()}) == 3


def reshard(folder: Path, target: Path) -> Path:
    """Spread the tensors over three files in turn, so that each layer is split."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    weight_map = {key: names[index % 3] for index, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key in weight_map if weight_map[key] == name}, target / name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


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
            for name, tensor in packed.tensors.items():
                assert_bits_equal(stored[f"{layer}.{name}"], tensor)


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
        recipe = QuantizationModifier(targets="Linear", scheme=SCHEMES[weights_format], ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
    model.save_pretrained(target)
    return tensors_of(target)


def tensors_of(folder):
    return {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}


#: Files and dtypes don't depend on the architecture, except that NVFP4 layers share a scale, by name.
PARTS = [
    pytest.param(architecture, weights_format, *parts, id=f"{architecture}-{weights_format}-{name}")
    for architecture, weights_format in product(BUILDERS, PACKED_FORMATS)
    for name, parts in {
        "whole": ("1GB", torch.bfloat16),
        "files": ("30KB", torch.bfloat16),
        "float32": ("1GB", torch.float32),
    }.items()
    if name == "whole" or architecture == "qwen2" or (name == "files" and weights_format == "nvfp4")
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
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_bits_equal(tensor, expected[name])
    files = {path.name for path in (tmp_path / "ours").glob("*.safetensors")}
    assert files == {info.shard.name for info in read_headers(tmp_path / "ours").values()}
    headers = read_headers(source)
    split = {headers[f"model.layers.{n}.mlp.{p}_proj.weight"].shard for n in (0, 1) for p in ("gate", "up")}
    assert (len(split) > 2) == (shards == "30KB") == (len(files) > 1)
    assert AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


@pytest.mark.parametrize("weights_format", LIBRARY)
def test_config_is_that_of_the_librarys_quantization_without_a_model(checkpoints, tmp_path, weights_format):
    source = checkpoints[0] / "qwen2" / "bf16"
    model_free_ptq(source, tmp_path / "free", scheme=SCHEMES[weights_format], ignore=["lm_head", "re:.*embed_tokens"])
    found, expected = (
        json.loads((folder / "config.json").read_text())
        for folder in (checkpoints[0] / "qwen2" / weights_format, tmp_path / "free")
    )
    [group] = expected["quantization_config"].pop("config_groups").values()
    assert found["quantization_config"].pop("config_groups") == {"group_0": group}
    # Embeddings are no linear layers, which readers go by; the library without a model goes by names.
    assert expected["quantization_config"].pop("ignore") == ["lm_head", "re:.*embed_tokens"]
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
