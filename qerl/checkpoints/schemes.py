"""The quantization that a checkpoint's config.json states, as one of this package's weight formats, without torch.

Every message completes the sentence "FOLDER/config.json has ...".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl.formats.errors import FormatError
from qerl.formats.group_size import GROUP_SIZE

QUANTIZE_AGAIN = "quantize the dense checkpoint with `qerl quantize` instead"
_OTHER_INTEGERS = "a published NVFP4 checkpoint, or the dense one, of which `qerl quantize` makes NVFP4"

#: compressed-tensors' formats of 4-bit floats, and of FP8.
_FP4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_FP8 = ("float-quantized", "naive-quantized")
_MIXED = "mixed-precision"
#: Libraries of integer weights by their quant_method.
_INTEGERS = {"awq": "AutoAWQ", "gptq": "GPTQ", "auto-round": "AutoRound"}
#: ModelOpt's algorithms with NVFP4 weights; those with another name than W4A16 round activations too.
_MODELOPT_FP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8")
_MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_MODELOPT_MIXED = "MIXED_PRECISION"


def weights_format(quantization: object) -> str:
    """The format of the packed layers: "nvfp4", "mxfp4" or "nf4". Raises `FormatError` for another scheme."""
    if not isinstance(quantization, Mapping):
        raise FormatError(f"a quantization_config that is no mapping; {QUANTIZE_AGAIN}")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(quantization)
    if method == "mxfp4":
        return "mxfp4"
    if method == "bitsandbytes":
        return _bitsandbytes(quantization)
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
    algorithms = [str(section.get("quant_algo", "W4A16"))]
    algorithms += [str(layer.get("quant_algo")) for layer in _layers(section)]
    groups = quantization.get("config_groups")
    rounded = any("W4A16" not in name and name != _MODELOPT_MIXED for name in algorithms) or any(
        isinstance(group, Mapping) and group.get("input_activations")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    )
    cache = quantization.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    return ["the rounding of activations"] * rounded + ["the rounding of keys and values"] * bool(cache)


def _compressed(quantization: Mapping[str, Any]) -> str:
    """The format of a compressed-tensors checkpoint: NVFP4 or MXFP4, with further layers in FP8."""
    declared, config_groups = str(quantization.get("format")), quantization.get("config_groups")
    groups = list(config_groups.values()) if isinstance(config_groups, Mapping) else []
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        raise FormatError(f"compressed-tensors format {declared!r} in {len(groups)} groups; {QUANTIZE_AGAIN}")
    for key, value in _unsupported(quantization, groups).items():
        if value:
            raise FormatError(f"{key}, which isn't supported; {QUANTIZE_AGAIN}")
    formats = {_group_format(declared, group) for group in groups} - {"fp8"}
    if not formats:
        raise _only_fp8(f"compressed-tensors format {declared!r}")
    if len(formats) > 1:
        raise FormatError(f"layers in {' and '.join(sorted(formats))}, of which one is supported; {QUANTIZE_AGAIN}")
    return formats.pop()


def _unsupported(quantization: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "output_activations": any(group.get("output_activations") for group in groups),
        "transform_config": quantization.get("transform_config"),
        "sparsity_config": quantization.get("sparsity_config"),
    }


def _group_format(declared: str, group: Mapping[str, Any]) -> str:
    """The format of a group's weights: "nvfp4", "mxfp4" or "fp8"."""
    name, weights = str(group.get("format") or declared), group.get("weights")
    stated: Mapping[str, Any] = weights if isinstance(weights, Mapping) else {}
    if name == _MIXED:  # then the weights alone say what it is
        fp8 = (stated.get("num_bits"), stated.get("type")) == (8, "float")
        sizes = {GROUP_SIZE[packed]: form for form, packed in _FP4.items()}
        name = _FP8[0] if fp8 else sizes.get(stated.get("group_size", 0), name)
    if name in _FP8:
        _require(stated, {"num_bits": 8, "type": "float"})
        return "fp8"
    if name not in _FP4:
        raise FormatError(
            f"compressed-tensors format {name!r}, only {' or '.join(_FP4)} is supported; take {_OTHER_INTEGERS}"
        )
    _require({"symmetric": True, **stated}, {"num_bits": 4, "type": "float", "symmetric": True})
    _require(stated, {"group_size": GROUP_SIZE[_FP4[name]]})
    return _FP4[name]


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
            _require({"group_size": GROUP_SIZE["nvfp4"], **layer}, {"group_size": GROUP_SIZE["nvfp4"]})
    return "nvfp4"


def _layers(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """ModelOpt's algorithm of each layer, of a file with several."""
    layers = section.get("quantized_layers")
    return [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []


def _bitsandbytes(quantization: Mapping[str, Any]) -> str:
    _require(
        quantization, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}
    )  # fmt: skip
    return "nf4"


def _only_fp8(what: str) -> FormatError:
    return FormatError(f"weights of 8 bits throughout ({what}); take {_OTHER_INTEGERS}")


def _require(section: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for key, value in required.items():
        if section.get(key) != value:
            raise FormatError(
                f"{key}={section.get(key)!r} in its quantization_config, only {value!r} is supported; {QUANTIZE_AGAIN}"
            )
