"""Random checkpoints of Qwen2.5's shapes: speed and memory don't depend on the weights' values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Tokenizer

from qerl.config import GROUP_SIZE
from qerl.models.checkpoint import CONFIG, INDEX
from qerl.quant.formats import nvfp4_global_scale, quantize, to_checkpoint

#: hidden size, layers, heads, KV heads, intermediate size, vocabulary, tied embeddings.
SHAPES = {
    "tiny": (64, 2, 2, 1, 128, 1024, True),
    "small": (512, 4, 4, 2, 1024, 1024, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}
_STD = 0.02
_END = "<|im_end|>"
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"


def write_shape(folder: Path, size: str, weights_format: str, texts: Sequence[str], seed: int = 0) -> None:
    """Write a checkpoint of `size` (a key of SHAPES) with normal weights, std 0.02, as bfloat16 or NVFP4, and a
    tokenizer trained on `texts`.

    Layers are made, packed and written one by one, on a GPU where there is one. NVFP4's layout is llmcompressor's:
    layers that run fused (q, k, v; gate, up) share their global scale.
    """
    if weights_format not in ("bf16", "nvfp4"):
        raise ValueError(f"weights of random shapes are bf16 or nvfp4, not {weights_format}")
    folder.mkdir(parents=True)
    tokenizer = Qwen2Tokenizer(eos_token=_END).train_new_from_iterator(texts, 512, show_progress=False)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / CONFIG).write_text(json.dumps(_config(size, weights_format, tokenizer.eos_token_id), indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    index: dict[str, str] = {}
    for number, tensors in enumerate(_shards(size, weights_format, generator)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _config(size: str, weights_format: str, end: int) -> dict[str, Any]:
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[size]
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "eos_token_id": end,
    }
    if weights_format == "nvfp4":
        config["quantization_config"] = _QUANTIZATION
    return config


_QUANTIZATION = {
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


def _shards(size: str, weights_format: str, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Tensors of the file, a block at a time."""
    hidden, layers, _, _, _, vocabulary, tied = SHAPES[size]
    outer = {"model.embed_tokens.weight": _normal((vocabulary, hidden), generator)}
    outer["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if not tied:
        outer["lm_head.weight"] = _normal((vocabulary, hidden), generator)
    yield outer
    for layer in range(layers):
        block = _block(size, weights_format, generator)
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}


def _block(size: str, weights_format: str, generator: torch.Generator) -> dict[str, Tensor]:
    hidden, _, heads, kv_heads, intermediate, _, _ = SHAPES[size]
    narrow = hidden // heads * kv_heads
    wide = (narrow, hidden)
    fused = (
        {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": wide, "self_attn.v_proj": wide},
        {"self_attn.o_proj": (hidden, hidden)},
        {"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden)},
        {"mlp.down_proj": (hidden, intermediate)},
    )
    tensors = {}
    for group in fused:
        weights = {name: _normal(shape, generator) for name, shape in group.items()}
        scale = nvfp4_global_scale(*weights.values())
        for name, weight in weights.items():
            if weights_format == "bf16":
                tensors[f"{name}.weight"] = weight
            else:
                packed = to_checkpoint(quantize(weight, weights_format, global_scale=scale))
                tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    for name, shape in fused[0].items():
        tensors[f"{name}.bias"] = _normal(shape[:1], generator)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * _STD).bfloat16()
