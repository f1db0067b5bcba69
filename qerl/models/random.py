"""Models with random weights for benches, because speed and memory do not depend on the values of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Tokenizer

from qerl.checkpoints.files import CONFIG, INDEX
from qerl.checkpoints.shapes import ARCHITECTURES, EXPERTS_ALONE, FUSED, PUBLISHED, linear_shapes
from qerl.checkpoints.tensors import write_tensors
from qerl.formats.codecs import nvfp4_global_scale, quantize, split_rows, to_checkpoint
from qerl.formats.layouts import KERNEL_FORMATS
from qerl.models.experts import Float32Router
from qerl.models.linear import PackedLinear
from qerl.models.policy import Policy, add_adapter, use_own_modules
from qerl.models.structure import empty_model, structure_of
from qerl.settings.formats import FORMATS
from qerl.settings.models import Base
from qerl.settings.run import LAYERS, AdapterSettings

# Random weights for models that have none.

#: Standard deviation of the weights, with which logits are similar to a trained model's and hidden states neither
#: vanish nor explode.
STD = 0.02


def fill_model(lm: PreTrainedModel, device: torch.device) -> None:
    """Give `lm` frozen random weights where it still has none."""
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(random_weight(parameter.shape, device), requires_grad=False))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(lm.config).to(device)
    lm.tie_weights()


def random_weight(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Normal bfloat16 values; a vector, which is a norm's weight, has ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, device=device).mul_(STD).bfloat16()  # in place: a head needs gigabytes in float32


# The files besides the weights of a Qwen2.5 checkpoint, as in its repositories on the hub.
#
# Keys, ids and counts are Qwen2.5's. The merges are not: a few are learned from given texts, the rest join letters.

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


# Random checkpoints of Qwen2.5's architectures, in the layout of its repositories on the hub.

#: The most bytes of tensors in a file, unless a single tensor is larger.
SHARD_BYTES = 10**9


def write_checkpoint(
    folder: Path, size: str, weights_format: str, texts: Sequence[str], seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint of `size`, a key of ARCHITECTURES, as bfloat16 or NVFP4.

    Weights are normal with std 0.02; the layout is that of Qwen2.5's repositories. The tokenizer learns its first
    merges from `texts`.

    With that std logits have one of 0.02 * sqrt(hidden size), 0.8 at 1.5B. Layers are made and packed one by one, on a
    GPU where there is one. NVFP4's layout is llmcompressor's: layers that run fused (q, k, v; gate, up) share their
    global scale.
    """
    if weights_format not in ("bf16", "nvfp4"):
        raise ValueError(f"weights of random checkpoints are bf16 or nvfp4, not {weights_format}")
    folder.mkdir(parents=True)
    write_tokenizer(folder, texts)
    write_pretty(folder / CONFIG, model_config(size, weights_format))
    write_pretty(folder / "generation_config.json", generation_config())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    _write_shards(folder, _tensors(size, weights_format, generator), shard_bytes)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Files in the order of the tensors, and their index; a file's name says how many there are."""
    shards: list[dict[str, int]] = []
    for shard in _grouped(tensors, shard_bytes):
        write_tensors(shard, folder / f"{len(shards)}.partial")
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
    where: dict[str, str] = {}
    for number, sizes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        where |= dict.fromkeys(sizes, file)
    total = sum(sum(sizes.values()) for sizes in shards)
    write_pretty(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def _grouped(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors, on the CPU, up to `shard_bytes` together."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and tensor.nbytes + sum(t.nbytes for t in shard.values()) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous().cpu()
    yield shard


def model_config(size: str, weights_format: str) -> dict[str, Any]:
    """The content of config.json."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = ARCHITECTURES[size]
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": IDS[END_OF_TEXT],
        "eos_token_id": IDS[END],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": STD,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }
    if weights_format == "nvfp4":
        config["quantization_config"] = QUANTIZATION
    return config


#: `quantization_config` of a checkpoint in NVFP4, as llmcompressor writes it.
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": FORMATS["nvfp4"].group_size,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}


def _tensors(size: str, weights_format: str, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, in the order of the network."""
    hidden, layers, _, _, _, vocabulary, tied = ARCHITECTURES[size]
    yield "model.embed_tokens.weight", _normal((vocabulary, hidden), generator)
    for layer in range(layers):
        block = _block(size, weights_format, generator)
        yield from ((f"model.layers.{layer}.{name}", tensor) for name, tensor in block.items())
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    if not tied:
        yield "lm_head.weight", _normal((vocabulary, hidden), generator)


def _block(size: str, weights_format: str, generator: torch.Generator) -> dict[str, Tensor]:
    shapes, tensors = linear_shapes(size), {}
    for group in FUSED:
        weights = {name: _normal(shapes[name], generator) for name in group}
        scale = nvfp4_global_scale(*weights.values())
        for name, weight in weights.items():
            if weights_format == "bf16":
                tensors[f"{name}.weight"] = weight
            else:
                packed = to_checkpoint(quantize(weight, weights_format, global_scale=scale))
                tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    for name in FUSED[0]:
        tensors[f"{name}.bias"] = _normal(shapes[name][:1], generator)
    hidden = ARCHITECTURES[size][0]
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * STD).bfloat16()


# Models of published shapes with random weights: any decoder whose structure the package reads.

_EXPERT = re.compile(r"\.experts\.\d+\.")


def published_config(size: str) -> PreTrainedConfig:
    """The configuration of a published shape."""
    return AutoConfig.for_model(**PUBLISHED[size])


def published_model(
    config: PreTrainedConfig, weights: str, device: torch.device, packed_nets: bool = False
) -> PreTrainedModel:
    """A model of the configuration, in bfloat16 or with the layers packed that `quantize` packs.

    Layers are made and packed one after the other, as a dense copy of all may not fit. Only a model with buffers of
    its own, such as Gemma's scale of embeddings, is made whole first.
    """
    lm: Any = empty_model(config, torch.bfloat16)
    structure = structure_of(config)
    packed = [name for name in structure.packed_layers(packed_nets) if weights != "bf16"]
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
    size, weights = base.model, base.weights
    if size in PUBLISHED:
        lm = published_model(published_config(size), weights, device, base.packed_nets)
    else:
        lm = _qwen(size, weights, device)
    use_own_modules(lm)
    lm.requires_grad_(False)
    policy = Policy(lm.eval(), Qwen2Tokenizer())
    return _adapted(policy, rank, train_norms) if rank else policy


def _adapted(base: Policy, rank: int, train_norms: bool) -> Policy:
    """The base with an adapter of `rank` whose B isn't zero, on all layers outside of experts.

    The base's modules become the policy's.
    """
    adapter = AdapterSettings(rank=rank, alpha=rank, train_norms=train_norms, targets=[*LAYERS])
    peft = add_adapter(base.lm, adapter)
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
        for name, parameter in base.lm.named_parameters():  # norms are those of the adapter, trained in float32
            parameter.data = parameter.requires_grad_(False).data.to(dtypes[name])


def _qwen(size: str, weights: str, device: torch.device) -> PreTrainedModel:
    lm = empty_qwen2(size)
    for layer in lm.model.layers:
        for names in FUSED:
            _fill_fused(layer, names, weights, device)
    fill_model(lm, device)
    return lm


def empty_qwen2(size: str) -> PreTrainedModel:
    """The bfloat16 model of a size of Qwen2.5 on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**model_config(size, "bf16")), dtype=torch.bfloat16
        )


def _fill_fused(block: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Give the layers `names`, which run fused, weights; packed ones share a global scale."""
    dense = [block.get_submodule(name) for name in names]
    tensors = [random_weight(layer.weight.shape, device) for layer in dense]  # type: ignore[union-attr, arg-type]
    scale = nvfp4_global_scale(*tensors) if weights == "nvfp4" else None
    for name, layer, tensor in zip(names, dense, tensors, strict=True):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else random_weight(layer.bias.shape, device) * STD
        if weights == "bf16":
            layer.weight = nn.Parameter(tensor)
            layer.bias = None if bias is None else nn.Parameter(bias)
        else:
            packed = quantize(tensor, weights, global_scale=scale)
            block.set_submodule(name, PackedLinear.from_packed(packed, bias))
