"""Random checkpoints of Qwen2.5's architectures, in the layout of its repositories on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.checkpoints.architectures import ARCHITECTURES, FUSED, linear_shapes
from qerl.checkpoints.folder import CONFIG, INDEX
from qerl.checkpoints.tensors import write_tensors
from qerl.formats.codecs import nvfp4_global_scale, quantize, to_checkpoint
from qerl.formats.group_size import GROUP_SIZE
from qerl.random_models.tokenizer import END, END_OF_TEXT, IDS, generation_config, write_pretty, write_tokenizer

_STD = 0.02
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
        "initializer_range": _STD,
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
                "group_size": GROUP_SIZE["nvfp4"],
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
    return (torch.randn(shape, generator=generator, device=generator.device) * _STD).bfloat16()
