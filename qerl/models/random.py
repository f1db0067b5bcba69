"""Models with random weights for benches, because speed and memory do not depend on the values of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any, cast

import torch
from peft import get_peft_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Tokenizer,
)

from qerl.checkpoints.shapes import EXPERTS_ALONE, config_of
from qerl.formats.codecs import quantize, split_rows
from qerl.formats.layouts import KERNEL_FORMATS
from qerl.host.provenance import share
from qerl.models.experts import Float32Router
from qerl.models.linear import PackedLinear
from qerl.models.policy import Policy, lora_config, on_same_layers, use_own_modules
from qerl.models.structure import empty_model, structure_of
from qerl.settings.models import Base
from qerl.settings.run import LAYERS, AdapterSettings

# Random weights for models that have none.

#: Standard deviation of the weights, with which logits are similar to a trained model's and hidden states neither
#: vanish nor explode.
STD = 0.02


def fill_model(lm: PreTrainedModel, device: torch.device) -> None:
    """Give `lm` frozen random weights, and biases of zero, where it still has none."""
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = random_weight(parameter.shape, device)
                value = value.zero_() if name == "bias" else value
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(lm.config).to(device)
    lm.tie_weights()


def random_weight(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Normal bfloat16 values; a vector, which is a norm's weight, has ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, device=device).mul_(STD).bfloat16()  # in place: a head needs gigabytes in float32


# A tokenizer with the ids, counts and template of Qwen2.5's.
#
# The merges are not: a few are learned from given texts, the rest join letters.

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
    """Write the files of a tokenizer; `texts` teach the first merges.

    A model that has fewer ids than Qwen2.5, `known`, gets fewer merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_LEARNED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    learned: Any = json.loads(tokenizer.to_str())["model"]
    vocabulary, merges = learned["vocab"], [tuple(pair) for pair in learned["merges"]]
    size = min(known - len(ADDED), VOCABULARY)
    letters = [*ascii_lowercase, *ascii_uppercase]
    # Merges build every string of letters from the one that is a letter shorter. The id of a token is 256 and the rank
    # of its merge.
    pairs = (("".join(stem), letter) for n in count(2) for *stem, letter in product(letters, repeat=n))
    for pair in pairs:
        if len(vocabulary) == size:
            break
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    added = {size + n: AddedToken(token, special=token in SPECIAL, normalized=False) for n, token in enumerate(ADDED)}
    options: dict[str, Any] = {"vocab": vocabulary, "merges": merges, "unk_token": None, "eos_token": END}
    options |= {"added_tokens_decoder": added, "extra_special_tokens": [*SPECIAL[1:]]}
    options |= {"chat_template": _TEMPLATE, "model_max_length": 131072}
    Qwen2Tokenizer(**options).save_pretrained(folder)


# Random checkpoints of Qwen2.5's architectures, in the layout of its repositories on the hub.

#: The most bytes of tensors in a file, unless a single tensor is larger.
SHARD_BYTES = 10**9
#: The generation_config.json of the 1.5B Instruct model.
_GENERATION: dict[str, Any] = {
    "bos_token_id": IDS[END_OF_TEXT],
    "pad_token_id": IDS[END_OF_TEXT],
    "do_sample": True,
    "eos_token_id": [IDS[END], IDS[END_OF_TEXT]],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
}


def write_checkpoint(folder: Path, size: str, texts: Sequence[str], shard_bytes: int = SHARD_BYTES) -> None:
    """Write a bfloat16 checkpoint of `size`, a size of Qwen2.5; `texts` teach its tokenizer the first merges.

    Weights are normal with std 0.02, with which logits have one of 0.02 * sqrt(hidden size), 0.8 at 1.5B. They are made
    on a GPU where there is one.
    """
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    lm = random_model(size, "bf16", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    lm.generation_config = GenerationConfig(**_GENERATION)
    lm.save_pretrained(folder, max_shard_size=shard_bytes)
    write_tokenizer(folder, texts)
    share(folder)


def random_config(size: str) -> PreTrainedConfig:
    """The configuration of a size of Qwen2.5 or of a published model."""
    return AutoConfig.for_model(**config_of(size))


# Models of known shapes with random weights: any decoder whose structure the package reads.

_EXPERT = re.compile(r"\.experts\.\d+\.")


def random_model(size: str, weights: str, device: torch.device, packed_nets: bool = False) -> PreTrainedModel:
    """A model of a size, in bfloat16 or with the layers packed that `quantize` packs.

    Layers are made and packed one after the other, as a dense copy of all may not fit. Only a model with buffers of
    its own, such as Gemma's scale of embeddings, is made whole first.
    """
    config = random_config(size)
    lm: Any = empty_model(config, torch.bfloat16)
    structure = structure_of(config)
    packed = [name for name in sorted(structure.packed_layers(packed_nets)) if weights != "bf16"]
    if structure.experts and config.model_type in EXPERTS_ALONE:
        packed = [name for name in packed if ".experts." in name]
    if any("rotary_emb" not in name for name, _ in lm.named_buffers()):
        with torch.device(device):
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    groups: dict[str, list[str]] = {}  # the same layer of all experts of a block together, where a format allows it
    for name in packed:
        groups.setdefault(_EXPERT.sub(".experts.", name) if weights in KERNEL_FORMATS else name, []).append(name)
    for names in groups.values():
        _pack(lm, names, weights, device)
    if any(parameter.is_meta for parameter in lm.parameters()):
        fill_model(lm, device)
    for module in lm.modules():
        if isinstance(module, Float32Router):
            module.float()
    return lm


def _pack(lm: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Replace layers of one shape by packed ones, with their weights where they have some.

    They are quantized as one weight, because thousands of experts take a minute one by one.
    """
    layers = [cast(nn.Linear, lm.get_submodule(name)) for name in names]
    rows, columns = layers[0].weight.shape
    if layers[0].weight.is_meta:
        dense = random_weight((len(layers) * rows, columns), device)
    else:
        dense = torch.cat([layer.weight.data for layer in layers])
    parts = [quantize(dense, weights)] if len(layers) == 1 else split_rows(quantize(dense, weights), rows)
    for name, layer, part in zip(names, layers, parts, strict=True):
        bias = None if layer.bias is None else torch.zeros(rows, dtype=torch.bfloat16, device=device)
        packed = PackedLinear.from_packed(part, bias)
        packed.keepable = ".experts." not in name
        lm.set_submodule(name, packed)


# Policies with random weights, which are never written to disk.


def random_policy(base: Base, rank: int, device: torch.device, seed: int = 0, train_norms: bool = True) -> Policy:
    """A policy on a base whose model is a size, with normal weights, and an adapter of `rank` whose B isn't zero."""
    torch.manual_seed(seed)
    lm = random_model(base.model, base.weights, device, base.packed_nets)
    use_own_modules(lm)
    lm.requires_grad_(False)
    policy = Policy(lm.eval(), Qwen2Tokenizer())
    torch.manual_seed(seed)  # once more: libraries draw numbers where they are first used
    return _adapted(policy, rank, train_norms) if rank else policy


def _adapted(base: Policy, rank: int, train_norms: bool) -> Policy:
    """The base with an adapter of `rank` whose B isn't zero, on all layers outside of experts.

    The base's modules become the policy's.
    """
    adapter = AdapterSettings(rank=rank, alpha=rank, train_norms=train_norms, targets=[*LAYERS])
    peft = get_peft_model(base.lm, lora_config(adapter, structure_of(base.lm.config))[0])
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
    return Policy(base.lm.eval(), base.tokenizer, peft)


@contextmanager
def with_random_adapter(base: Policy, rank: int, train_norms: bool = True) -> Iterator[Policy]:
    """A context in which the base has an adapter of `rank` (0: none); afterwards it is the base again."""
    if not rank:
        yield base
        return
    dtypes = {name: parameter.dtype for name, parameter in base.lm.named_parameters()}
    policy = _adapted(base, rank, train_norms)
    try:
        yield policy
    finally:
        assert policy.peft is not None
        policy.peft.unload()
        for name, parameter in base.lm.named_parameters():  # norms are the adapter's, trained in float32
            parameter.data = parameter.requires_grad_(False).data.to(dtypes[name])


@contextmanager
def with_random_adapters(base: Policy, rank: int, runs: int) -> Iterator[list[Policy]]:
    """A context of runs on the base's layers, the base the first, each with an adapter as `with_random_adapter`."""
    others = [Policy(on_same_layers(base.lm), base.tokenizer) for _ in range(runs - 1)]
    with ExitStack() as adapted:
        yield [adapted.enter_context(with_random_adapter(one, rank)) for one in (base, *others)]
