"""load_model on dense checkpoints, and the errors of tensors that can't be loaded."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import CheckpointError, check_checkpoint, read_headers, weights_format_of
from qerl.formats.codecs import dequantize
from qerl.models.export import write_dense
from qerl.models.loading import checkpoint_structure, load_model, read_packed
from qerl.models.quantize import quantize_checkpoint
from tests.tiny import edit_config, tiny_family, tiny_gpt_oss, tiny_llama, tiny_qwen2

TOKENS = torch.randint(2, 100, (2, 100), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def folder(tmp_path):
    return tiny_qwen2(tmp_path / "qwen2")


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("build", [tiny_qwen2, tiny_llama])
def test_logits_equal_those_of_transformers(build, dtype, shard_size, tmp_path):
    folder = build(tmp_path / "dense", dtype=torch.float32, shard_size=shard_size)
    assert len({info.shard for info in read_headers(folder).values()}) == 1 or shard_size == "40KB"
    check_checkpoint(folder)
    assert weights_format_of(folder) == "bf16"
    model = load_model(folder, dtype, "cpu")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert not model.training
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_layer_types_of_mistral_are_those_of_transformers(tmp_path):
    """transformers takes such a file for Ministral, since its class of Mistral has one kind of attention."""
    types = ["sliding_attention", "full_attention"]
    folder = tiny_family(tmp_path, "mistral", sliding_window=4)
    edit_config(folder, layer_types=types)
    assert checkpoint_structure(folder).windows == (4, None)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(load_model(folder, torch.float32, "cpu")(TOKENS).logits, expected(TOKENS).logits)


def test_blocks_are_counted_whose_names_have_digits(tmp_path):
    """Those of data2vec_text.encoder.layer, whose head then is the reason."""
    values = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tiny_family(tmp_path, "qwen2", model_type="data2vec-text", max_position_embeddings=128, **values)
    check_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="its logits aren't the product"):
        checkpoint_structure(tmp_path)


def test_heads_of_other_names(tmp_path):
    """GPT-NeoX's files, as published, call it embed_out and hold masks. BioGPT's class calls it output_projection."""
    neox, biogpt = tmp_path / "neox", tmp_path / "biogpt"
    values = {"bos_token_id": 0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "max_position_embeddings": 128}
    tiny_family(neox, "qwen2", model_type="gpt_neox", tie_word_embeddings=False, **values)
    masks = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    rewrite(neox, lambda t: t.update({f"gpt_neox.layers.0.attention.{name}": mask for name, mask in masks.items()}))
    assert "embed_out.weight" in load_file(neox / "model.safetensors")
    tiny_family(biogpt, "qwen2", model_type="biogpt", **values)
    assert "output_projection.weight" not in load_file(biogpt / "model.safetensors")
    untied = tiny_family(tmp_path / "untied", "qwen2", model_type="biogpt", tie_word_embeddings=False, **values)
    for folder in (neox, biogpt, untied):
        expected, found = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            load_model(folder, torch.float32),
        )
        quantize_checkpoint(folder, folder / "packed", "mxfp4")
        packed = AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)
            assert torch.equal(load_model(folder / "packed", torch.bfloat16)(TOKENS).logits, packed(TOKENS).logits)
    rewrite(biogpt, lambda t: t.update({"output_projection.weight": torch.zeros(102, 64)}))
    with pytest.raises(CheckpointError, match="head that differs from the embedding"):
        load_model(biogpt, torch.float32)


def test_weights_of_the_stored_dtype_are_the_pages_of_the_file(folder):
    """Processes that load the same base share these pages."""
    weights = [w for w in load_model(folder, torch.bfloat16).parameters() if w.ndim > 1]
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [[int(end, 16) for end in fields[0].split("-")] for fields in mapped]
    assert weights
    for weight in weights:
        assert any(start <= weight.data_ptr() and weight.data_ptr() + weight.nbytes <= end for start, end in ranges)


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_what_is_computed_or_tied_is_left_out_of_the_file(folder, tmp_path):
    """A head that is the embedding, and rotary frequencies, which older files hold."""
    expected = load_model(folder, torch.bfloat16).state_dict()

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, change)
    model = load_model(folder, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    load_model(tmp_path / "out", torch.bfloat16)


def last(name, number):
    """A change of a tensor's last number."""
    return lambda tensors: tensors[name].flatten()[-1:].fill_(number)


def wide(number):
    def change(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].double()
        tensors["model.embed_tokens.weight"][0, 0] = number

    return change


#: One of each kind of a checkpoint's tensors.
NOT_FINITE = {
    "model.norm.weight": float("nan"),
    "model.layers.0.input_layernorm.weight": float("inf"),
    "model.embed_tokens.weight": float("-inf"),
    "model.layers.1.self_attn.q_proj.bias": float("nan"),
    "model.layers.1.mlp.up_proj.weight": float("inf"),
}
#: What is changed in a dense file, and the sentence that names the tensor.
DAMAGE = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks .*layers\.1\.mlp\.up_proj\.weight"),
    "superfluous": (lambda t: t.update({"extra": torch.zeros(3)}), "holds 1 tensors.*such as extra"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), r"norm\.weight as .*\[63\], but config"),
    "head": (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "tie_word_embeddings"),
    "float64 beyond float32": (wide(1e39), r"NaN or infinity in model\.embed_tokens\.weight as bfloat16; download"),
    "float32 beyond bfloat16": (wide(3.4e38), r"NaN or infinity in model\.embed_tokens\.weight as bfloat16; download"),
    **{
        name: (last(name, number), rf"model\.safetensors holds NaN or infinity in {re.escape(name)}; download")
        for name, number in NOT_FINITE.items()
    },
}


@pytest.mark.parametrize(("change", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_sentence(folder, tmp_path, change, sentence):
    """By quantization, which then writes nothing, and by whoever loads the checkpoint."""
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder, torch.bfloat16)
    for weights in ("bf16", "nvfp4", "nf4") if "safetensors" in sentence else ("nvfp4",):
        with pytest.raises(CheckpointError, match=sentence):
            quantize_checkpoint(folder, tmp_path / "out", weights)
    assert not (tmp_path / "out").exists()


def test_a_norm_of_another_type(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight as .*calls for"):
        load_model(folder, torch.bfloat16)


_Q = "model.layers.0.self_attn.q_proj."


def _nf4_offset(tensors, number):
    name = _Q + "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"nested_offset": number}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


#: Formats, and what makes a scale multiply by infinity or NaN though the file's own numbers are finite.
OVERFLOWS = {
    "divided by 0": ("nvfp4", lambda t: t[_Q + "weight_global_scale"].fill_(0.0)),
    "a scale that is NaN": ("nvfp4", lambda t: t[_Q + "weight_scale"].view(torch.uint8)[0].fill_(0x7F)),
    "divided by a subnormal number": ("nvfp4", lambda t: t[_Q + "weight_global_scale"].fill_(1e-40)),
    "6 * 448 / 1e-36 is infinite": ("nvfp4", lambda t: t[_Q + "weight_global_scale"].fill_(1e-36)),
    "divided by a negative number": ("nvfp4", lambda t: t[_Q + "weight_global_scale"].fill_(-1.0)),
    "no number in OCP's specification": ("mxfp4", lambda t: t[_Q + "weight_scale"].view(-1)[-1:].fill_(255)),
    "4 * 2^126 is infinite": ("mxfp4", lambda t: t[_Q + "weight_scale"].view(-1)[-1:].fill_(253)),
    "absmax * absmax": (
        "nf4",
        lambda t: (t[_Q + "weight.nested_absmax"].fill_(3e38), t[_Q + "weight.nested_quant_map"].mul_(1e10)),
    ),
    "an offset that is no number": ("nf4", lambda t: _nf4_offset(t, float("nan"))),
    "an offset beyond float32": ("nf4", lambda t: _nf4_offset(t, 10**400)),
    "an offset that is added to 3e38": (
        "nf4",
        lambda t: (_nf4_offset(t, 3e38), t[_Q + "weight.nested_absmax"].fill_(3e38)),
    ),
}


@pytest.mark.parametrize(("weights", "change"), OVERFLOWS.values(), ids=OVERFLOWS)
def test_scales_that_multiply_by_infinity_or_nan_are_refused(folder, tmp_path, weights, change):
    """By whoever loads the checkpoint, and by whoever unpacks it."""
    quantize_checkpoint(folder, tmp_path / "out", weights)
    rewrite(tmp_path / "out", change)
    for read in (lambda: load_model(tmp_path / "out", torch.float32), lambda: unpacked(tmp_path / "out", weights)):
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*(infinite or NaN|no finite|NaN or inf)"):
            read()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(_Q + "weight_scale"), r"lacks 1 tensors .*q_proj\.weight_scale"),
        (lambda t: t.update({_Q + "weight_scale": t[_Q + "weight_scale"][:, :1].clone()}), r"F8_E4M3 \[64, 1\], but"),
        (lambda t: t.update({_Q + "weight_scale": t[_Q + "weight_scale"].float()}), r"F32 \[64, 4\], but"),
        (lambda t: t.update({_Q + "weight_zero_point": torch.ones(4)}), r"holds 1 tensors .*zero_point"),
    ],
)
def test_damaged_packed_tensors_are_neither_loaded_nor_unpacked(folder, tmp_path, change, sentence):
    quantize_checkpoint(folder, tmp_path / "out", "nvfp4")
    rewrite(tmp_path / "out", change)
    copy = partial(write_dense, target=tmp_path / "dense", dtype=torch.float32)
    for read in (partial(load_model, dtype=torch.float32), copy):
        with pytest.raises(CheckpointError, match=sentence):
            read(tmp_path / "out")


def test_the_storage_of_nf4_that_older_files_leave_out(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "out", "nf4")
    stated = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert stated.pop("bnb_4bit_quant_storage") == "uint8"
    edit_config(tmp_path / "out", quantization_config=stated)
    load_model(tmp_path / "out", torch.float32)


def unpacked(folder, weights):
    return {layer: dequantize(packed, torch.float32) for layer, packed in read_packed(read_headers(folder), weights)}


@pytest.mark.parametrize("exponent", [0, 252])
def test_scales_at_the_ends_of_what_is_finite_load(folder, tmp_path, exponent):
    quantize_checkpoint(folder, tmp_path / "out", "mxfp4")
    rewrite(tmp_path / "out", lambda tensors: tensors[_Q + "weight_scale"].fill_(exponent))
    load_model(tmp_path / "out", torch.bfloat16)
    assert all(weight.isfinite().all() for weight in unpacked(tmp_path / "out", "mxfp4").values())


def test_scales_of_stacked_experts_are_checked(tmp_path):
    folder = tiny_gpt_oss(tmp_path / "oss")
    rewrite(folder, lambda t: next(t[n] for n in sorted(t) if n.endswith("down_proj_scales"))[-1, -1, -1:].fill_(253))
    with pytest.raises(CheckpointError, match=r"experts\.\d+\.down_proj: weight_scale makes weights infinite or NaN"):
        load_model(folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", r"generation_config\.json can't be read \(.*\); download it again"),
        ("[]", r"generation_config\.json can't be read \(.*\); download it again"),
        ('{"eos_token_id": "x"}', r"generation_config\.json has eos_token_id='x', which is no number of a token"),
        ('{"eos_token_id": [1, null, 2.5]}', "has eos_token_id=2.5"),
    ],
)
def test_a_broken_generation_config_is_named(tmp_path, content, sentence):
    folder = tiny_qwen2(tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder, torch.float32)
