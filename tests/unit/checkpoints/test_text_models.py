"""Configurations and names of models of images and text, against transformers' own reading of them."""

import json

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from qerl.checkpoints.files import CheckpointError, check_base, context_length, read_config, read_headers
from qerl.checkpoints.shapes import ModelShape
from qerl.doctor import candidate, diagnose
from qerl.memory_model import weight_bytes
from qerl.models.loading import checkpoint_structure, config_of
from qerl.models.policy import load_policy
from qerl.models.structure import empty_model
from tests.families import FAMILIES
from tests.tiny import edit_config, tiny_of_images, write_template

_ROPE = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "model_type": "gemma3_text"}
_HEADS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
#: The text_configs of published Gemma 3, whose missing keys have transformers' defaults.
GEMMAS = {
    "4B": dict(zip(_HEADS, (2560, 10240, 34), strict=False)),
    "12B": dict(zip(_HEADS, (3840, 15360, 48, 16, 8), strict=True)),
    "27B": dict(zip(_HEADS, (5376, 21504, 62, 32, 16), strict=True)) | {"head_dim": 128, "query_pre_attn_scalar": 168},
}
#: Published parameters of the text models in billions, with embeddings and without the vision tower.
BILLIONS = {"4B": 3.88, "12B": 11.77, "27B": 27.0}
_MISTRAL_SMALL = dict(zip(_HEADS, (5120, 32768, 40, 32, 8), strict=True)) | {
    **{"model_type": "mistral", "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072},
    **{"rope_theta": 1000000000.0, "sliding_window": None, "hidden_act": "silu", "attention_dropout": 0.0},
}


def written(folder, kind, text, **whole):
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text, **whole}))
    return folder


@pytest.mark.parametrize("size", GEMMAS)
def test_published_gemma_3_is_read_as_transformers_reads_it(tmp_path, size):
    folder = written(tmp_path, "gemma3", GEMMAS[size] | _ROPE, eos_token_id=[1, 106], vision_config={})
    stock = AutoConfig.from_pretrained(folder).text_config
    found, ignored = config_of(folder).to_dict(), {"_name_or_path", "architectures", "eos_token_id", "dtype"}
    expected = stock.to_dict()
    assert {k: v for k, v in found.items() if k not in ignored} == {k: expected[k] for k in found if k not in ignored}
    assert found["rope_parameters"]["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert found["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert found["layer_types"][:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert weight_bytes(ModelShape.of(found), "bf16") / 2e9 == pytest.approx(BILLIONS[size], abs=0.02)
    assert context_length(read_config(folder)) == context_length(expected) == 131072


def test_layer_types_of_mistral_count_no_more_than_in_the_whole(tmp_path):
    """Alone, transformers would take them for those of Ministral."""
    types = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 4}
    written(tmp_path, "mistral3", _MISTRAL_SMALL | types, vision_config={"model_type": "pixtral"})
    assert checkpoint_structure(tmp_path).windows == (4, 4)
    assert "layer_types" not in read_config(tmp_path)  # of which `qerl quantize` writes the text model's


def test_a_head_is_tied_where_the_text_model_says_so_or_else_the_whole(tmp_path):
    """Where neither says it, transformers' class of the whole would tie it, and finds another one in the files."""
    for text, whole, tied in ((True, False, True), (None, True, True), (False, True, False), (None, None, False)):
        stated, outer = ({} if one is None else {"tie_word_embeddings": one} for one in (text, whole))
        written(tmp_path, "mistral3", _MISTRAL_SMALL | stated, vision_config={"model_type": "pixtral"}, **outer)
        assert config_of(tmp_path).tie_word_embeddings is tied


def test_completions_end_where_the_whole_says(tmp_path):
    """In config.json without a generation_config.json, which has them otherwise."""
    source = tiny_of_images(tmp_path, "gemma3", "gemma3")
    edit_config(source, eos_token_id=[1, 7])
    (source / "generation_config.json").unlink(missing_ok=True)
    assert load_policy(source, None, "float32", torch.device("cpu")).stop_token_ids == [1, 7]
    GenerationConfig(eos_token_id=[1, 9]).save_pretrained(source)
    assert load_policy(source, None, "float32", torch.device("cpu")).stop_token_ids == [1, 9]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5_moe"), ("gemma3", "gemma3"), ("mistral3", "mistral")),
        ("mistral3", "ministral3"),
    ],
)
def test_the_tensors_are_those_of_the_text_model_alone(tmp_path, kind, family):
    source = tiny_of_images(tmp_path, kind, family)
    alone = empty_model(FAMILIES[family].config(), torch.float32)
    expected = {name: tuple(tensor.shape) for name, tensor in alone.state_dict().items()}
    if alone.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {name: info.shape for name, info in read_headers(source).items()} == expected


def test_the_doctor_counts_the_text_model_and_says_that_the_rest_is_left(tmp_path):
    source = tiny_of_images(tmp_path, "gemma3", "gemma3")
    write_template(source)
    check_base(source)
    model = candidate(str(source), "bf16")
    assert model.shape == ModelShape.of(FAMILIES["gemma3"].config().to_dict())
    notes = diagnose(model, None).notes
    assert (
        f"{source} is a model of images and text: its text model alone is read and counted, the rest is left" in notes
    )
    assert any("sampling by vLLM is tested with models of text alone" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("llava", {"model_type": "llama"}, "has a text_config, so 'llava' isn't a model of text alone.*; take"),
        ("gemma3", [], "has a text_config, so 'gemma3' isn't a model of text alone"),
        ("mistral3", {"model_type": "qwen2"}, "has model_type='qwen2' in its text_config.* mistral or ministral3;"),
        ("gemma3", {}, "has model_type='None' in its text_config"),
    ],
)
def test_other_models_of_images_and_text_are_refused_by_one_sentence(tmp_path, kind, text, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read_config(written(tmp_path, kind, text))
    assert "\n" not in str(caught.value)
