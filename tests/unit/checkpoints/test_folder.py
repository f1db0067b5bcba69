"""Errors of checkpoints that headers, config.json and tokenizer alone show."""

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.checkpoints.files import CheckpointError, check_checkpoint, check_tokenizer
from qerl.data.prompts import check_template
from qerl.data.records import DataError
from qerl.models.loading import load_model, load_tokenizer
from tests.faults.conftest import ordinary_user
from tests.tiny import edit_config, tiny_qwen2


@pytest.fixture
def folder(tmp_path):
    return tiny_qwen2(tmp_path / "qwen2")


def cheap_error(folder, match):
    """Both the cheap check and the loading itself must refuse, with one sentence."""
    for refuse in (check_checkpoint, lambda folder: load_model(folder, torch.bfloat16)):
        with pytest.raises(CheckpointError, match=match) as caught:
            refuse(folder)
        assert "\n" not in str(caught.value)


@pytest.fixture
def shards(tmp_path):
    return tiny_qwen2(tmp_path / "shards", dtype=torch.float32, shard_size="40KB", seed=1)


def cut(keep):
    def change(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return change


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def config(**changes):
    return lambda folder: edit_config(folder, **changes)


def first_shards(folder):
    return sorted(folder.glob("*.safetensors"))[:2]


def stray_name(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))


NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}
FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4 |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}
SCHEMES = [
    ({"quant_method": "gptq"}, "quant_method='gptq'"),
    (NVFP4 | {"format": "pack-quantized"}, "pack-quantized"),
    (NVFP4 | {"config_groups": {}}, "0 groups"),
    (NVFP4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    (NVFP4 | {"config_groups": {"group_0": {"weights": {"group_size": 16}}}}, "num_bits=None"),
    (NVFP4 | {"config_groups": {"group_0": FP8_GROUP}, "format": "float-quantized"}, "8 bits throughout"),
    ({"quant_method": "awq", "bits": 4}, "integers of AutoAWQ .*take a published NVFP4 checkpoint, or the dense"),
    ({"quant_method": "fp8"}, "8 bits throughout"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "8 bits throughout"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "ModelOpt's quant_algo='W4A16_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32.*16"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo of no layer"),
    (NVFP4 | {"format": "mxfp4-pack-quantized"}, "group_size=16.*32"),
    (NF4 | {"load_in_4bit": False}, "load_in_4bit"),
    (NF4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4'"),
    (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
]
#: What is changed in a folder of one file, and in one of several, and the sentence.
ONE_FILE = [
    (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors"),
    *((cut(keep), r"model\.safetensors is not a whole safetensors file") for keep in (4, 100, -1)),
    (write("adapter_config.json", "{}"), "holds a model and an adapter"),
    (config(transformers_weights="other.safetensors"), r"transformers_weights='other\.safetensors', which names other"),
    (config(model_type=None), "`model_type` must be a string, not null"),
    # Gemma 3n states them, as transformers writes its configuration.
    (config(intermediate_size=[128, 64]), r"config\.json: `intermediate_size` must be a whole number, not \[128, 64\]"),
    (config(layer_types=["full_attention"] * 3), "3 layer_types for num_hidden_layers=2"),
    (config(layer_types="full"), "`layer_types` must be a list"),
    (config(layer_types=["full_attention", "odd"]), r"`layer_types\[1\]` must be 'full_attention', .*, not 'odd'"),
    # Sizes are refused before anything is built.
    *(
        (config(**{key: size}), key)
        for key, sizes in {
            "hidden_size": (10**18, -64, "64"),
            "num_hidden_layers": (10**6, 2.5),
            "num_attention_heads": (0,),
            "num_key_value_heads": (10**30,),
            "head_dim": (True,),
        }.items()
        for size in sizes
    ),
    *((config(quantization_config=scheme), sentence) for scheme, sentence in SCHEMES),
]
SEVERAL_FILES = [
    (lambda folder: first_shards(folder)[0].unlink(), r"model-00001.*doesn't exist"),
    (lambda folder: shutil.copy(*first_shards(folder)[::-1]), "both hold"),
    (stray_name, r"model\.extra\.weight"),
    (write("model.safetensors.index.json", "{}"), "weight_map"),
    # transformers would load the single file, vLLM the index's.
    (
        lambda folder: shutil.copy(tiny_qwen2(folder.parent / "new", seed=2) / "model.safetensors", folder),
        r"holds two sets of weights, model\.safetensors and those of .*index\.json \(model-00001-of",
    ),
]
CASES = [("folder", *case) for case in ONE_FILE] + [("shards", *case) for case in SEVERAL_FILES]


@pytest.mark.parametrize(("of", "change", "sentence"), CASES)
def test_both_the_cheap_check_and_loading_refuse_with_one_sentence(request, of, change, sentence):
    folder = request.getfixturevalue(of)
    change(folder)
    cheap_error(folder, sentence)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("run.yaml", "is the folder of a run, which is no checkpoint; its base is .*checkpoint"),
        ("adapter_config.json", "holds an adapter, which is no checkpoint; give the folder of the model"),
    ],
)
def test_a_folder_of_another_kind(tmp_path, name, match):
    (tmp_path / name).write_text("{}")
    cheap_error(tmp_path, match)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7]])).logits


def test_an_index_that_save_pretrained_left_is_stale(shards):
    stock = AutoModelForCausalLM.from_pretrained(shards, dtype=torch.float32)
    with torch.no_grad():
        stock.model.norm.weight.mul_(2)
    stock.save_pretrained(shards)
    assert (shards / "model.safetensors.index.json").exists()
    assert torch.equal(logits(load_model(shards, torch.float32)), logits(stock))


def test_an_index_of_one_file_is_no_second_set(folder):
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_checkpoint(folder)


READ = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", READ)
def test_an_unreadable_file_is_named_as_such(name):
    with TemporaryDirectory() as scratch:
        folder = tiny_qwen2(Path(scratch) / "model")
        for path in (folder.parent, folder, *folder.iterdir()):
            path.chmod(0o755)
        (folder / name).chmod(0o000 if os.geteuid() else 0o600)
        with ordinary_user(), pytest.raises(CheckpointError, match=rf"permission denied: .*{re.escape(name)}; set"):
            check_checkpoint(folder)


def test_unsupported_architecture(folder):
    edit_config(folder, model_type="qwen3_next", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(CheckpointError, match=r"qwen3_next. isn.t supported, .* neither nn.Linear"):
        load_model(folder, torch.bfloat16)
    for code in ({}, {"auto_map": {"AutoConfig": "configuration.Nobody"}}):
        edit_config(folder, model_type="nobody", **code)
        with pytest.raises(CheckpointError, match=r"has model_type='nobody'.*isn't run; install a version") as caught:
            load_model(folder, torch.bfloat16)
        assert "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 1}, "rms_norm_eps"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"hidden_act": "sigh"}, "sigh"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": "two"}}, "str"),
        ({"rope_parameters": {"rope_type": ["default"], "rope_theta": 10000.0}}, r"rope_type=.*default"),
        ({"hidden_size": 3}, "ZeroDivisionError"),
        ({"pad_token_id": 2000}, "Padding_idx"),
    ],
)
def test_values_of_which_transformers_makes_no_model_are_one_sentence(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(Exception):  # noqa: B017, PT011  # of some of ten classes
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(CheckpointError, match=rf"model_type='qwen2'.*{named}|{named}.*correct config\.json") as caught:
        load_model(folder, torch.bfloat16)
    assert "\n" not in str(caught.value)


@pytest.fixture
def chat(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    check_tokenizer(folder)
    return folder


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_a_file_without_tokenizer(chat, text):
    (chat / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json holds no token") as error:
        check_tokenizer(chat)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_more_ids_than_embeddings(chat):
    edit_config(chat, vocab_size=60)
    with pytest.raises(CheckpointError, match=r"has the token '.*' with the id 101, but .*vocab_size=60.* go up to 59"):
        check_tokenizer(chat)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("user: answer!", "drops the question of a user's message"),
        ("{{ messages[0]['content'].split('\\n')[0] }}", "drops the instruction of a user's message"),
        ("<|im_start|>{{ messages[0]['content'] }}", r"the token '<\|im_start\|>', whose id {} .*vocab_size={};"),
    ],
)
def test_a_template_that_drops_what_is_asked_or_has_tokens_that_the_model_does_not_know(chat, template, sentence):
    tokenizer = load_tokenizer(chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    added = tokenizer.convert_tokens_to_ids("<|im_start|>")
    check_template(tokenizer, added)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=sentence.format(added, added)):
        check_template(tokenizer, added)
