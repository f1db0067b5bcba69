"""Stock vLLM on random weights of known shapes, with an adapter on all layers outside of experts, as a baseline.

vLLM fills bf16, nvfp4 and mxfp4 weights itself (`load_format=dummy`). For nf4 that would leave the layers without
scales, so vLLM quantizes a random bfloat16 checkpoint with bitsandbytes while loading, as for a QLoRA user. That
checkpoint is written to TMPDIR, with two bytes per weight. vLLM up to 0.27 has bitsandbytes built in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qerl.checkpoints.architectures import ARCHITECTURES, linear_shapes
from qerl.checkpoints.published import PUBLISHED
from qerl.checkpoints.tensors import write_tensors
from qerl.layers.empty_model import empty_model
from qerl.layers.structure import structure_of
from qerl.policy.policy import choose_device
from qerl.random_models.checkpoint import QUANTIZATION, model_config, write_checkpoint
from qerl.random_models.published import published_config
from qerl.random_models.tokenizer import TEXTS

#: Layers of published shapes that stay in bfloat16 in this project's files, too: routers and gates of one number.
_DENSE = ("re:.*lm_head$", "re:.*mlp.gate$", "re:.*shared_expert_gate$")
#: Delta nets, which do unless they are packed, and then their layers of b and a, which vLLM runs as one.
_DENSE_NETS, _NARROW_OF_NETS = "re:.*linear_attn.*", "re:.*linear_attn.in_proj_(b|a|ba)$"
#: Published as the text part of a model with images, whose other part isn't loaded: vLLM 0.24 knows no other form.
_WITH_IMAGES = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
#: vLLM's options for these. On Hopper it would take FlashInfer for their prompts, which it then has to compile.
_TEXT_ALONE = {"language_model_only": True, "gdn_prefill_backend": "triton"}
#: Texts of vLLM's ValueErrors if its weights leave no memory for the cache, or other processes too little for vLLM.
_NO_ROOM = (
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
)


def start_engine(
    folder: Path, size: str, weights: str, rank: int, pack_delta_nets: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Start vLLM with its `options`; returns the engine and the adapter's LoRARequest or None. Files go to `folder`.

    vLLM is told which layers have an adapter, because it would also run experts and embeddings as layers with one.
    """
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, adapter = folder / "model", folder / "adapter"
    loading = write_model(model, size, weights, pack_delta_nets)
    if rank:
        adapter.mkdir()
        targets = _write_adapter(adapter, size, rank)
        loading |= {"enable_lora": True, "max_lora_rank": max(8, rank), "max_loras": 1, "lora_target_modules": targets}
    with no_room_is_out_of_memory():
        engine = LLM(model=str(model), skip_tokenizer_init=True, dtype="bfloat16", **loading, **options)
    return engine, LoRARequest("adapter", 1, str(adapter)) if rank else None


def description(weights: str) -> str:
    """The engine's name and version, for results."""
    import vllm

    return f"vLLM {vllm.__version__}" + (", bitsandbytes" if weights == "nf4" else "")


def write_model(folder: Path, size: str, weights: str, pack_delta_nets: bool = False) -> dict[str, Any]:
    """Write the checkpoint that vLLM loads to `folder`. Returns vLLM's options for it."""
    if weights == "nf4":
        write_checkpoint(folder, size, "bf16", TEXTS)
        return {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    folder.mkdir()
    content = _published(size, weights, pack_delta_nets) if size in PUBLISHED else model_config(size, weights)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return {"load_format": "dummy"} | (_TEXT_ALONE if "text_config" in content else {})


def _published(size: str, weights: str, pack_delta_nets: bool) -> dict[str, Any]:
    """The content of config.json of a published shape."""
    config = published_config(size)
    content = config.to_dict() | {"torch_dtype": "bfloat16"}
    if config.model_type in _WITH_IMAGES:
        kind, architecture = _WITH_IMAGES[config.model_type]
        content = {"model_type": kind, "text_config": content, "torch_dtype": "bfloat16"}
    else:
        architecture = type(empty_model(config, torch.bfloat16)).__name__
    content["architectures"] = [architecture]
    if weights == "nvfp4":
        nets = _NARROW_OF_NETS if pack_delta_nets else _DENSE_NETS
        content["quantization_config"] = QUANTIZATION | {"ignore": [*_DENSE, nets]}
    elif weights == "mxfp4":
        content["quantization_config"] = {"quant_method": "mxfp4"}
    return content


def _write_adapter(folder: Path, size: str, rank: int) -> list[str]:
    """Write a random adapter, and return the last names of its layers."""
    shapes, tensors = _adapted_shapes(size), {}
    device = choose_device()  # drawing large matrices on a CPU is slow
    for name, (outputs, inputs) in shapes.items():
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, device=device) * 0.01).bfloat16()
        tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, device=device) * 0.01).bfloat16()
    write_tensors(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    targets = sorted({name.split(".")[-1] for name in shapes})
    config["target_modules"] = targets
    config["base_model_name_or_path"] = "random"
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return targets


def _adapted_shapes(size: str) -> dict[str, tuple[int, int]]:
    """[out, in] of the layers that the adapter is on, by name: those that this project's policy adapts."""
    if size not in PUBLISHED:
        blocks, shapes = range(ARCHITECTURES[size].layers), linear_shapes(size)
        return {f"model.layers.{block}.{name}": shape for block in blocks for name, shape in shapes.items()}
    config = published_config(size)
    structure, layers = structure_of(config), dict(empty_model(config, torch.bfloat16).named_modules())
    names = [
        f"{structure.blocks}.{block}.{name}" for block in range(len(structure.windows)) for name in structure.linears
    ]
    shapes = {name: (layers[name].out_features, layers[name].in_features) for name in names if name in layers}
    if config.model_type in _WITH_IMAGES:
        return {name.replace("model.", "model.language_model.", 1): shape for name, shape in shapes.items()}
    return shapes


@contextmanager
def no_room_is_out_of_memory() -> Iterator[None]:
    """Raise OutOfMemoryError instead of vLLM's ValueError about too little memory in the block."""
    try:
        yield
    except ValueError as error:
        if any(text in str(error) for text in _NO_ROOM):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise
