"""Random checkpoints with the ids and prompts of Qwen2.5's repositories, and random models of published shapes."""

from importlib.resources import files

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.checkpoints.files import check_base, weight_files
from qerl.checkpoints.shapes import PUBLISHED, ModelShape, shape_of
from qerl.memory_model import weight_bytes
from qerl.models import random
from qerl.models.linear import PackedLinear
from qerl.models.policy import load_policy
from qerl.models.random import random_config, random_policy, write_checkpoint
from qerl.models.structure import structure_of
from qerl.settings.models import Base
from tests.families import FAMILIES

CPU = torch.device("cpu")
#: Ids of Qwen2.5's tokenizer; those of code and tools are added, but not special.
IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|object_ref_start|>": 151646,
    "<|box_end|>": 151649,
    "<|vision_start|>": 151652,
    "<|video_pad|>": 151656,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<|fim_prefix|>": 151659,
    "<|fim_pad|>": 151662,
    "<|repo_name|>": 151663,
    "<|file_sep|>": 151664,
}
#: 10^9 parameters of the text models, by their model cards.
BILLIONS = {"mistral-7b": 7.24, "gemma-3-12b": 11.8, "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "qwen3.5-27b": 26.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape") / "tiny"
    write_checkpoint(folder, "tiny", ["Ann has 3 apples and buys 2. How many?"] * 50, shard_bytes=60_000)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_tokens_have_qwens_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids([*IDS]) == [*IDS.values()]
    assert len(tokenizer) == 151665
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert tokenizer.decode([*IDS.values()], skip_special_tokens=True) == "".join([*IDS][7:])
    text = "<|im_start|>user\nAnn has 12 apples; 你好, naïve  world!\n\n\t'tis <tool_call>\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits are tokens of their own, and words of the texts are one token.
    assert tokenizer.tokenize("Ann has 123") == ["Ann", "Ġhas", "Ġ", "1", "2", "3"]


@pytest.mark.parametrize("system", [True, False])
def test_chats_read_as_qwens(tokenizer, system):
    chat = [{"role": "system", "content": "Be brief."}] * system
    chat += [{"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("user", ""))]
    theirs = (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text()
    for prompt in (True, False):
        said, expected = (
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, chat_template=template)
            for template in (None, theirs)
        )
        assert said == expected


def test_the_policy_is_transformers_and_its_logits_are_sane(folder, tokenizer):
    assert len(weight_files(folder)) > 2
    check_base(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("Ann has 3 apples and buys 2.")])
    policy = load_policy(folder, None, "float32", CPU)
    with torch.no_grad():
        logits = policy.lm(ids).logits
        # Our norms add in another order: float32's rounding is left.
        torch.testing.assert_close(logits, stock(ids).logits, rtol=0, atol=1e-6)
    assert 0.01 < logits.std() < 2
    assert policy.stop_token_ids == [151645, 151643]


def test_shapes_have_the_published_sizes():
    assert list(PUBLISHED) == [*BILLIONS]
    for name, billions in BILLIONS.items():
        shape = ModelShape.of(random_config(name).to_dict())
        assert weight_bytes(shape, "bf16") / 2e9 == pytest.approx(billions, rel=0.01), name
        assert shape == shape_of(name), name  # by which plans count, without transformers
    taken = {name: (one := shape_of(name)).products + one.vocabulary * one.hidden for name in BILLIONS}
    assert taken["qwen3-30b-a3b"] / 1e9 == pytest.approx(3.03, rel=0.01)  # "A3B", without the embedding
    assert taken["mistral-7b"] / 1e9 == pytest.approx(7.11, rel=0.01)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "phi3", "qwen3_moe", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("weights", ["bf16", "packed", "nets packed"])
def test_a_policy_of_a_published_shape(monkeypatch, family, weights):
    """Layers are packed as in the family's files, and the adapter counts."""
    config = FAMILIES[family].config()
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    if family != "gemma3":  # a dense copy of the whole may be larger than the GPU
        monkeypatch.setattr(random, "AutoModelForCausalLM", None)
    asked = "bf16" if weights == "bf16" else "mxfp4" if family == "gpt_oss" else "nvfp4"
    nets = weights == "nets packed"
    policy = random_policy(Base("published", asked, packed_nets=nets), 4, CPU)
    packed = {name for name, layer in policy.lm.named_modules() if isinstance(layer, PackedLinear)}
    expected = set() if weights == "bf16" else structure_of(config).packed_layers(nets)
    if family == "gpt_oss":
        expected = {name for name in expected if ".experts." in name}
    assert {name.replace(".base_layer", "") for name in packed} == expected
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in policy.trainable())
    with torch.no_grad():
        assert policy.lm(torch.arange(3, 20)[None]).logits.isfinite().all()


def test_experts_in_nf4_have_weights_of_their_own(monkeypatch):
    """NF4 isn't stored by rows, so its experts aren't quantized together."""
    monkeypatch.setitem(PUBLISHED, "published", FAMILIES["qwen3_moe"].config().to_dict())
    policy = random_policy(Base("published", "nf4"), 0, CPU)
    experts = [layer for name, layer in policy.lm.named_modules() if name.endswith("gate_proj") and ".experts." in name]
    first, second = (layer.dense_weight(torch.float32) for layer in experts[:2])
    assert first.shape == (experts[0].out_features, experts[0].in_features)
    assert not torch.equal(first, second)
    assert first.std() == pytest.approx(0.02, rel=0.1)
