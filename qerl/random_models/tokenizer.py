"""The files besides the weights of a Qwen2.5 checkpoint, as in its repositories on the hub.

Keys, ids and counts are Qwen2.5's. The merges are not: a few are learned from given texts, the rest join letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import Qwen2Tokenizer

#: Tokens of Qwen2.5's byte-level vocabulary: 256 bytes and a merge each for the rest.
VOCABULARY = 151643
_LEARNED = 2048

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_VISION = (
    *(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *(f"<|{name}_pad|>" for name in ("vision", "image", "video")),
)
_CODE = (
    "<tool_call>",
    "</tool_call>",
    *(f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad")),
    "<|repo_name|>",
    "<|file_sep|>",
)
#: In the order of their ids, from VOCABULARY on. Those of code and tools are added, but decoding doesn't skip them.
SPECIAL = (END_OF_TEXT, START, END, *_VISION)
ADDED = (*SPECIAL, *_CODE)
IDS = {token: VOCABULARY + number for number, token in enumerate(ADDED)}

_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\n" + _SYSTEM + "<|im_end|>\\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

#: The texts from which the tokenizer of a random checkpoint learns merges.
TEXTS = ["0 1 2 3 4 5 6 7 8 9"] * 50


def write_tokenizer(folder: Path, texts: Sequence[str], known: int = VOCABULARY + len(ADDED)) -> None:
    """Write tokenizer.json, tokenizer_config.json, vocab.json and merges.txt; `texts` teach the first merges.

    A model that has fewer ids than Qwen2.5, `known`, gets fewer merges.
    """
    pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    count = min(known - len(ADDED), VOCABULARY)
    vocabulary, merges = _filled(*_learned(texts, pre_tokenizer), count)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_added(token) for token in SPECIAL])
    tokenizer.add_tokens([_added(token) for token in _CODE])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    write_pretty(folder / "tokenizer_config.json", _tokenizer_config(count))


def _added(token: str) -> AddedToken:
    return AddedToken(token, special=token in SPECIAL, normalized=False)


def _learned(
    texts: Sequence[str], pre_tokenizer: pre_tokenizers.PreTokenizer
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of the texts; the bytes come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_LEARNED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _filled(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], count: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Both for `count` tokens: the id of a token is 256 and the rank of its merge."""
    for left, right in _letter_merges():
        if len(vocabulary) == count:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    return vocabulary, merges


def _letter_merges() -> Iterator[tuple[str, str]]:
    """Merges that build every string of two or more letters from the one that is a letter shorter, short ones first."""
    letters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    stems = letters
    while True:
        for stem in stems:
            yield from ((stem, letter) for letter in letters)
        stems = [stem + letter for stem in stems for letter in letters]


def _tokenizer_config(first: int) -> dict[str, Any]:
    """The content of tokenizer_config.json, with added tokens from the id `first` on."""
    described = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for number, token in enumerate(ADDED, first)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": described,
        "additional_special_tokens": [*SPECIAL[1:]],
        "bos_token": None,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config() -> dict[str, Any]:
    """The content of generation_config.json of the 1.5B Instruct model."""
    return {
        "bos_token_id": IDS[END_OF_TEXT],
        "pad_token_id": IDS[END_OF_TEXT],
        "do_sample": True,
        "eos_token_id": [IDS[END], IDS[END_OF_TEXT]],
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "transformers_version": "4.37.0",
    }


def write_pretty(path: Path, value: Any) -> None:
    """JSON as the hub's files have it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
