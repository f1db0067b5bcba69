"""Random checkpoints have the files, ids and prompts of Qwen2.5's repositories on the hub."""

import json
from importlib.resources import files

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qerl.checkpoints.files import check_base
from qerl.models.policy import load_policy
from qerl.models.random import write_checkpoint

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
FILES = {"config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape") / "tiny"
    write_checkpoint(folder, "tiny", "bf16", ["Ann has 3 apples and buys 2. How many?"] * 50, shard_bytes=60_000)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_special_tokens_have_qwens_ids(folder, tokenizer):
    assert tokenizer.convert_tokens_to_ids([*IDS]) == [*IDS.values()]
    assert len(tokenizer) == 151665
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert tokenizer.decode([*IDS.values()], skip_special_tokens=True) == "".join([*IDS][7:])
    vocabulary = json.loads((folder / "vocab.json").read_text())
    assert sorted(vocabulary.values()) == [*range(151643)]
    assert len((folder / "merges.txt").read_text().splitlines()) == 1 + 151643 - 256


def test_vocabulary_and_merges_make_the_same_tokenizer(folder, tokenizer, tmp_path):
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    slow = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nAnn has 12 apples; 你好, naïve  world!\n\n\t'tis <tool_call>\n<|im_end|>"
    assert tokenizer.encode(text) == slow.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits are tokens of their own, and words of the texts are one token.
    assert tokenizer.tokenize("Ann has 123") == ["Ann", "Ġhas", "Ġ", "1", "2", "3"]


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_read_as_qwens(tokenizer, system, prompt):
    chat = [{"role": "system", "content": "Be brief."}] * system
    chat += [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": ""},
    ]
    theirs = (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text()
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert said == tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=prompt, chat_template=theirs
    )


def test_shards_and_index_are_the_hubs(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards == [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    assert {path.name for path in folder.iterdir()} == FILES | {*shards, "model.safetensors.index.json"}
    total = 0
    for shard in shards:
        with safe_open(folder / shard, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert {name for name, where in index["weight_map"].items() if where == shard} == tensors.keys()
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 60_000 or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total
    check_base(folder)


def test_the_policy_is_transformers_and_its_logits_are_sane(folder, tokenizer):
    stock, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.tensor([tokenizer.encode("Ann has 3 apples and buys 2.")])
    policy = load_policy(folder, None, "float32", torch.device("cpu"))
    with torch.no_grad():
        logits = policy.lm(ids).logits
        # Our norms add in another order: float32's rounding is left.
        torch.testing.assert_close(logits, stock(ids).logits, rtol=0, atol=1e-6)
    assert 0.01 < logits.std() < 2
    assert policy.stop_token_ids == [151645, 151643]
    assert GenerationConfig.from_pretrained(folder).do_sample
