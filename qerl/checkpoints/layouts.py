"""The tensors and the weight format of a checkpoint under this package's names, whichever library wrote the files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from qerl.settings.models import FORMATS, FormatError

# Of models of images and text, the text model alone is read: its configuration and its names, without torch.

#: The prefixes of the text model's tensors in the files, and their names in the text model alone. transformers writes
#: the two latter, and the former is how its classes name the modules.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_HEAD_PREFIX = "lm_head."

#: transformers' class of text models.
TEXT_LOADER = "AutoModelForCausalLM"
#: What transformers takes for keys that published text_configs leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
#: Keys that transformers' class of the whole ignores, while a file of the text model alone would be read by them.
_IGNORED = {"mistral": ("layer_types",)}
#: The keys of the whole that hold for its text model, unless that states its own.
_SHARED = ("tie_word_embeddings", "bos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ImageTextModel:
    """A kind of models of images and text. An adapter has the names of the class with which stock PEFT loads it."""

    texts: Mapping[str, str]
    """transformers' class of the text model, by its model_type."""
    loader: str = TEXT_LOADER
    """transformers' class that makes the model for which PEFT loads an adapter."""
    prefix: str = "model."
    """The prefix of the text model's modules there."""
    siblings: tuple[str, ...] = ()
    """The modules beside the text model there, which have layers of the same names."""

    def adapter_name(self, name: str) -> str:
        """The name of a tensor of the text model in an adapter, without PEFT's prefix."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    @property
    def excluded(self) -> str | None:
        """A pattern of the modules that get no adapter, for PEFT; None if the class has the text model alone."""
        return rf".*\b(?:{'|'.join(self.siblings)})\b.*" if self.siblings else None


#: What `ImageTextModel` has of a class with a vision tower, a projector and the text model.
_TOWER = ("AutoModelForImageTextToText", "model.language_model.", ("vision_tower", "multi_modal_projector"))
#: The kinds whose text model is read, by the model_type of the whole.
IMAGE_TEXT_MODELS = {
    "qwen3_5": ImageTextModel({"qwen3_5_text": "Qwen3_5ForCausalLM"}),
    "qwen3_5_moe": ImageTextModel({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}),
    "gemma3": ImageTextModel({"gemma3_text": "Gemma3ForCausalLM"}, *_TOWER),
    "mistral3": ImageTextModel({"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, *_TOWER),
}


def image_text_model(config: Mapping[str, Any]) -> ImageTextModel | None:
    """The kind of a config.json's model; None if it's a model of text alone.

    Raises `FormatError`, whose message completes "FOLDER/config.json has ...", if its text model isn't read.
    """
    if "text_config" not in config:
        return None
    kind, text = config.get("model_type"), config["text_config"]
    model = IMAGE_TEXT_MODELS.get(str(kind))
    if model is None or not isinstance(text, dict):
        raise FormatError(
            f"a text_config, so {str(kind)[:40]!r} isn't a model of text alone, which isn't supported; "
            f"take the family's text model, or one of {', '.join(IMAGE_TEXT_MODELS)}"
        )
    if text.get("model_type") not in model.texts:
        raise FormatError(
            f"model_type={str(text.get('model_type'))[:40]!r} in its text_config, and the text model of {kind!r} that "
            f"is supported is {' or '.join(model.texts)}; take such a checkpoint"
        )
    return model


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, with the quantization and the tokens of the whole.

    Raises `FormatError` as `image_text_model` does.
    """
    model = image_text_model(config)
    if model is None:
        return dict(config)
    kind = config["text_config"]["model_type"]
    text = {key: value for key, value in config["text_config"].items() if key not in _IGNORED.get(kind, ())}
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    stated = _DEFAULTS.get(kind, {}) | shared | text
    # The whole model states the ends of text: the text_config of Gemma 3 lacks the end of a turn.
    outer = {key: config[key] for key in ("quantization_config", "eos_token_id") if config.get(key) is not None}
    return {**stated, "architectures": [model.texts[kind]], **outer}


def own_name(name: str) -> str | None:
    """The name in the text model alone of a tensor of the whole; None if the text model lacks it."""
    for prefix, alone in _PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name if name.startswith(_HEAD_PREFIX) else None


# The quantization that a checkpoint's config.json states, as one of this package's weight formats, without torch.
#
# Every message completes the sentence "FOLDER/config.json has ...".

QUANTIZE_AGAIN = "quantize the dense checkpoint with `qerl quantize` instead"
_OTHER_INTEGERS = "a published NVFP4 checkpoint, or the dense one, of which `qerl quantize` makes NVFP4"

#: compressed-tensors' layouts of 4-bit weights and of FP8, and this package's names of the former.
_LAYOUTS = {form.layout: name for name, form in FORMATS.items() if form.layout}
_FP8 = ("float-quantized", "naive-quantized")
_MIXED = "mixed-precision"
#: Libraries of integer weights by their quant_method.
_INTEGERS = {"awq": "AutoAWQ", "gptq": "GPTQ", "auto-round": "AutoRound"}
#: ModelOpt's algorithms with NVFP4 weights; those with another name than W4A16 round activations too.
_MODELOPT_FP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8")
_MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_MODELOPT_MIXED = "MIXED_PRECISION"


def weights_format(quantization: object) -> str:
    """The name of the packed layers' format, a key of `FORMATS`. Raises `FormatError` for another scheme."""
    if not isinstance(quantization, Mapping):
        raise FormatError(f"a quantization_config that is no mapping; {QUANTIZE_AGAIN}")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(quantization)
    if method == "mxfp4":
        return "mxfp4"
    if method == "bitsandbytes":
        stated = {"bnb_4bit_quant_storage": "uint8", **quantization}  # which older files leave out
        _require(stated, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"})
        return "nf4"
    if isinstance(method, str) and method.startswith("modelopt"):
        return _modelopt(quantization)
    if method in _INTEGERS:
        raise FormatError(
            f"integers of {_INTEGERS[method]} (quant_method={method!r}), which no 4-bit float holds; "
            f"take {_OTHER_INTEGERS}"
        )
    if method == "fp8":
        raise _only_fp8(f"quant_method={method!r}")
    raise FormatError(f"quant_method={method!r}, which isn't supported; {QUANTIZE_AGAIN}")


def ignored(quantization: Mapping[str, Any]) -> list[str]:
    """The parts of a supported scheme that this package doesn't apply, in words."""
    section = quantization.get("quantization", quantization)  # ModelOpt's older files
    algorithms = {str(layer.get("quant_algo", "W4A16")) for layer in (section, *_layers(section))}
    rounded = any("W4A16" not in name and name != _MODELOPT_MIXED for name in algorithms)
    rounded |= any(group.get("input_activations") for group in _groups(quantization))
    cache = quantization.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    return ["the rounding of activations"] * rounded + ["the rounding of keys and values"] * bool(cache)


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of layers of a compressed-tensors checkpoint; none if one of them is no mapping."""
    groups = quantization.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    return found if all(isinstance(group, Mapping) for group in found) else []


def _compressed(quantization: Mapping[str, Any]) -> str:
    """The format of a compressed-tensors checkpoint in 4 bits, with further layers in FP8."""
    declared, groups = str(quantization.get("format")), _groups(quantization)
    if not groups:
        raise FormatError(f"compressed-tensors format {declared!r} in 0 groups; {QUANTIZE_AGAIN}")
    others = [key for key in ("transform_config", "sparsity_config") if quantization.get(key)]
    others += ["output_activations"] * any(group.get("output_activations") for group in groups)
    if others:
        raise FormatError(f"{others[0]}, which isn't supported; {QUANTIZE_AGAIN}")
    formats = {_group_format(declared, group) for group in groups} - {"fp8"}
    if not formats:
        raise _only_fp8(f"compressed-tensors format {declared!r}")
    if len(formats) > 1:
        raise FormatError(f"layers in {' and '.join(sorted(formats))}, of which one is supported; {QUANTIZE_AGAIN}")
    return formats.pop()


def _group_format(declared: str, group: Mapping[str, Any]) -> str:
    """The format of a group's weights, a key of `FORMATS` or "fp8"."""
    name, weights = str(group.get("format") or declared), group.get("weights")
    stated: Mapping[str, Any] = weights if isinstance(weights, Mapping) else {}
    if name == _MIXED:  # then the weights alone say what it is
        fp8 = (stated.get("num_bits"), stated.get("type")) == (8, "float")
        sizes = {FORMATS[packed].group_size: layout for layout, packed in _LAYOUTS.items()}
        name = _FP8[0] if fp8 else sizes.get(stated.get("group_size", 0), name)
    if name in _FP8:
        _require(stated, {"num_bits": 8, "type": "float"})
        return "fp8"
    if name not in _LAYOUTS:
        raise FormatError(
            f"compressed-tensors format {name!r}, only {' or '.join(_LAYOUTS)} is supported; take {_OTHER_INTEGERS}"
        )
    packed = FORMATS[_LAYOUTS[name]]
    _require({"symmetric": True, **stated}, {"num_bits": 4, "type": packed.numbers, "symmetric": True})
    _require(stated, {"group_size": packed.group_size})
    return _LAYOUTS[name]


def _modelopt(quantization: Mapping[str, Any]) -> str:
    """The format of a ModelOpt checkpoint: NVFP4, with further layers in FP8."""
    section = quantization.get("quantization", quantization)
    section = section if isinstance(section, Mapping) else {}
    layers = [section] if str(section.get("quant_algo")).upper() != _MODELOPT_MIXED else _layers(section)
    algorithms = {str(layer.get("quant_algo")).upper() for layer in layers}
    if unknown := sorted(algorithms - {*_MODELOPT_FP4, *_MODELOPT_FP8}):
        raise FormatError(f"ModelOpt's quant_algo={unknown[0]!r}, which isn't supported; take {_OTHER_INTEGERS}")
    if not algorithms & set(_MODELOPT_FP4):
        raise _only_fp8(f"ModelOpt's {', '.join(sorted(algorithms)) or 'quant_algo of no layer'}")
    for layer in layers:
        if str(layer.get("quant_algo")).upper() in _MODELOPT_FP4:
            _require({"group_size": 16, **layer}, {"group_size": 16})
    return "nvfp4"


def _layers(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """ModelOpt's algorithm of each layer, of a file with several."""
    layers = section.get("quantized_layers")
    return [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []


def _only_fp8(what: str) -> FormatError:
    return FormatError(f"weights of 8 bits throughout ({what}); take {_OTHER_INTEGERS}")


def _require(section: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for key, value in required.items():
        if section.get(key) != value:
            raise FormatError(
                f"{key}={section.get(key)!r} in its quantization_config, only {value!r} is supported; {QUANTIZE_AGAIN}"
            )


# The tensors of a checkpoint under this package's names, whichever library wrote the files, without torch.
#
# compressed-tensors gives the names: a packed layer has `weight_packed`, `weight_scale` and, with NVFP4,
# `weight_global_scale`. ModelOpt names the same codes and scales `weight`, `weight_scale` and `weight_scale_2`. Its
# last is the reciprocal of the global scale. `qerl.models.loading` reads tensors as their `TensorInfo` says.

#: What a tensor is made of: the file's values, their reciprocals, the bytes of 8-bit exponents, FP8 values times their
#: scale, or packed codes that are unpacked because no packed layer may be there.
Reading = Literal["stored", "reciprocal", "bytes", "scaled", "unpacked"]

#: Rotary frequencies, which older files of Llama hold and config.json states, and masks in files of GPT-NeoX.
_COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
#: Suffixes of scales by which other engines round activations, keys and values. Nothing here reads them.
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale", ".output_scale")
#: ModelOpt's tensors of layers that also scale their input, or add a product of low rank.
_OTHER_FUNCTIONS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
#: The output head is dense in this package.
_HEAD = "lm_head"
#: The head's weight in files of GPT-NeoX, which transformers names as in other models.
_HEAD_OF_NEOX = "embed_out.weight"
#: A stack of experts' tensors, and the names of its parts here.
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(blocks|scales|bias))?")
_STACKED = {"blocks": "weight_packed", "scales": "weight_scale", "bias": "bias"}
#: The layers of an expert that a dense stack has one after the other.
_DENSE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Parts of names in files of Mixtral, Ernie 4.5 and EXAONE, and what they are here. The first one tells the family.
_FAMILIES = (
    (("block_sparse_moe.gate.", "mlp.gate."),),
    (
        ("block_sparse_moe.experts.", "mlp.experts."),
        *((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
    ),
    ((".mlp.moe_statics.e_score_correction_bias", ".mlp.gate.moe_statics.e_score_correction_bias"),),
    ((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
)
#: Rows and columns of a block of FP8 weights that shares a scale.
FP8_BLOCK = 128


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, its safetensors dtype ("BF16", "U8", ...), shape, and size in bytes there.

    `stored` is its name in the file. `parts` are the further tensors that its `reading` needs. With `place` it is that
    one of the tensors that are stacked there, and with `rows` its rows from the first number to before the second.
    """

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored: str
    reading: Reading = "stored"
    parts: tuple[TensorInfo, ...] = ()
    place: int | None = None
    rows: tuple[int, int] | None = None


def own_layout(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by this package's names, in the files' order, without scales of activations and rotary frequencies.

    A model of images and text has its text model's, and experts that are stacked have their own each.
    FP8 weights become dense weights, and so does a packed output head. Raises `FormatError` for FP8 scales of an
    unknown shape, for an incomplete head, and for layers that compute more than a product with their weight.
    """
    has_images = any(name.startswith(tuple(_PREFIXES)) for name in stored)
    texts = ((own_name(name) if has_images else name, info) for name, info in stored.items())
    named = {_family_name(name): info for name, info in texts if name is not None}
    apart = dict(part for name, info in named.items() for part in _apart(name, info, named))
    tensors = dict(own for name, info in apart.items() if (own := _own(name, info, apart)))
    packed = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{_HEAD}.weight_")}
    return {**tensors, f"{_HEAD}.weight": _unpacked(packed)} if packed else tensors


def _family_name(name: str) -> str:
    """The name of a tensor here, of its name in the files of a text model."""
    for parts in _FAMILIES:
        for theirs, ours in parts if parts[0][0] in name else ():
            name = name.replace(theirs, ours)
    return name


def names_in_files(headers: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """How tensors are named in files with such `headers`: as here, but for parts of some mixtures."""

    def named(name: str) -> str:
        for parts in families:
            for theirs, ours in parts if parts[0][1] in name else ():
                name = name.replace(ours, theirs)
        return name

    families = [parts for parts in _FAMILIES if any(parts[0][0] in info.stored for info in headers.values())]
    return named


def _apart(name: str, info: TensorInfo, stored: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensor, or each expert's tensor in place of a stack."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        yield name, info
        return
    experts, layer, part = stack.groups()
    if part is None and f"{name}_bias" not in stored:
        yield from _dense_stack_parts(experts, layer, info)
    elif part is not None and len(info.shape) > 1:
        # gpt-oss has codes [experts, out, groups, 16], scales [experts, out, groups] and a bias [experts, out].
        count, rows, *columns = info.shape
        one = replace(
            info, shape=(rows, math.prod(columns)) if columns else (rows,), size_bytes=info.size_bytes // count
        )
        for place in range(count):
            yield f"{experts}.{place}.{layer}.{_STACKED[part]}", replace(one, place=place)
    else:
        raise FormatError(
            f"{info.shard} holds {name} {list(info.shape)}, a stack of experts in another format than MXFP4, which "
            "isn't supported; take the checkpoint in MXFP4 as it is published"
        )


def _dense_stack_parts(experts: str, layer: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The weights of each expert, of a stack [experts, out, in] as Qwen3.5 has it, with gate's rows before up's."""
    layers = _DENSE[layer]
    if len(info.shape) != 3 or info.shape[1] % len(layers):
        raise FormatError(
            f"{info.shard} holds {info.stored} {list(info.shape)}, which is no stack [experts, out, in] of weights of "
            "experts; download the checkpoint again"
        )
    count, rows, columns = info.shape[0], info.shape[1] // len(layers), info.shape[2]
    size = info.size_bytes // (count * len(layers))
    for place in range(count):
        for number, name in enumerate(layers):
            part = replace(info, shape=(rows, columns), size_bytes=size, place=place)
            yield f"{experts}.{place}.{name}.weight", replace(part, rows=(number * rows, (number + 1) * rows))


def unpacked_layers(headers: Mapping[str, TensorInfo]) -> list[str]:
    """The layers that are stored in FP8 or packed, and are dense in this package."""
    return [name.removesuffix(".weight") for name, info in headers.items() if info.reading in ("scaled", "unpacked")]


def _own(name: str, info: TensorInfo, stored: Mapping[str, TensorInfo]) -> tuple[str, TensorInfo] | None:
    """A tensor's name and reading in this package; None if another tensor includes it or nothing reads it."""
    layer, _, part = name.rpartition(".")
    if name.endswith((*_OF_ACTIVATIONS, *_COMPUTED)):
        return None
    if part in _OTHER_FUNCTIONS:
        raise FormatError(
            f"{info.shard} holds {name}, with which {layer} computes more than a product with its weight; take a "
            "checkpoint without, or the dense one"
        )
    weight, scales = stored.get(f"{layer}.weight"), ("weight_scale", "weight_scale_inv")
    if weight is not None and weight.dtype == "F8_E4M3":
        scale = next((stored[key] for each in scales if (key := f"{layer}.{each}") in stored), None)
        if part in scales:
            return None
        if part != "weight":
            return name, info
        if scale is None:
            if any(other.endswith(tuple(f".{key}" for key in scales)) for other in stored):
                raise FormatError(f"{info.shard} holds {name} in FP8 without its scale; download the checkpoint again")
            return name, info
        if scale.dtype not in ("F32", "BF16", "F16") or scale_grid(scale.shape, info.shape) is None:
            raise FormatError(
                f"{info.shard} holds {name} in FP8 {list(info.shape)} with a scale {scale.dtype} {list(scale.shape)}; "
                f"only a scale a tensor, a row, or a block of {FP8_BLOCK} x {FP8_BLOCK} is supported"
            )
        return name, replace(info, reading="scaled", parts=(scale,))
    if part == "weight" and info.dtype == "U8" and f"{layer}.weight_scale_2" in stored:
        return f"{layer}.weight_packed", info
    if part == "weight_scale_2":
        shape = (1,) if math.prod(info.shape) == 1 else info.shape
        return f"{layer}.weight_global_scale", replace(info, dtype="F32", shape=shape, reading="reciprocal")
    if part == "weight_scale" and info.dtype == "F8_E8M0":
        return name, replace(info, dtype="U8", reading="bytes")
    return (f"{_HEAD}.weight" if name == _HEAD_OF_NEOX else name), info


def scale_grid(scale: Sequence[int], weight: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of a grid of FP8 scales for a weight [out, in]: one of all, of each row, or of each block.

    None for scales of another shape. Dimensions of blocks may be 1.
    """
    if len(weight) != 2:
        return None
    blocks = (-(-weight[0] // FP8_BLOCK), -(-weight[1] // FP8_BLOCK))
    if math.prod(scale) == 1:
        return 1, 1
    if tuple(scale) in ((weight[0],), (weight[0], 1)):
        return weight[0], 1
    narrow, of_blocks = ([size for size in shape if size != 1] for shape in (scale, blocks))
    return blocks if narrow == of_blocks else None


def _unpacked(packed: dict[str, TensorInfo]) -> TensorInfo:
    """The output head as a dense weight, of its packed tensors."""
    codes, scale, global_scale = (packed.get(f"{_HEAD}.weight_{part}") for part in ("packed", "scale", "global_scale"))
    if codes is None or scale is None or len(codes.shape) != 2 or len(packed) != 2 + (global_scale is not None):
        raise FormatError(f"the packed {_HEAD} has only {', '.join(packed)}; download the checkpoint again")
    rows, half = codes.shape
    parts = (codes, scale) if global_scale is None else (codes, scale, global_scale)
    return TensorInfo(
        codes.shard, codes.dtype, (rows, 2 * half), sum(part.size_bytes for part in parts), codes.stored,
        "unpacked", parts,
    )  # fmt: skip
