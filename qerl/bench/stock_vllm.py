"""Stock vLLM on random weights of Qwen2.5's shapes, with an adapter on all seven projections, as a baseline.

vLLM fills bf16 and nvfp4 weights itself (`load_format=dummy`). For nf4 that would leave the layers without scales, so
vLLM quantizes a random bfloat16 checkpoint with bitsandbytes while loading, as for a QLoRA user. That checkpoint is
written to TMPDIR, with two bytes per weight. vLLM up to 0.27 has bitsandbytes built in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qerl.checkpoints.architectures import ARCHITECTURES, linear_shapes
from qerl.policy.policy import choose_device
from qerl.random_models.checkpoint import model_config, write_checkpoint
from qerl.random_models.tokenizer import TEXTS

#: Texts of vLLM's ValueErrors if its weights leave no memory for the cache, or other processes too little for vLLM.
_NO_ROOM = (
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
)


def start_engine(folder: Path, size: str, weights: str, rank: int, **options: Any) -> tuple[Any, Any]:
    """Start vLLM with its `options`; returns the engine and the adapter's LoRARequest or None. Files go to `folder`."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, adapter = folder / "model", folder / "adapter"
    loading = write_model(model, size, weights)
    lora = {"enable_lora": True, "max_lora_rank": max(8, rank), "max_loras": 1} if rank else {}
    with no_room_is_out_of_memory():
        engine = LLM(model=str(model), skip_tokenizer_init=True, dtype="bfloat16", **loading, **lora, **options)
    if not rank:
        return engine, None
    adapter.mkdir()
    _write_adapter(adapter, size, rank)
    return engine, LoRARequest("adapter", 1, str(adapter))


def description(weights: str) -> str:
    """The engine's name and version, for results."""
    import vllm

    return f"vLLM {vllm.__version__}" + (", bitsandbytes" if weights == "nf4" else "")


def write_model(folder: Path, size: str, weights: str) -> dict[str, str]:
    """Write the checkpoint that vLLM loads to `folder`. Returns the load format."""
    if weights == "nf4":
        write_checkpoint(folder, size, "bf16", TEXTS)
        return {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(size, weights)), encoding="utf-8")
    return {"load_format": "dummy"}


def _write_adapter(folder: Path, size: str, rank: int) -> None:
    shapes, tensors = linear_shapes(size), {}
    device = choose_device()  # drawing large matrices on a CPU is slow
    for layer in range(ARCHITECTURES[size].layers):
        for name, (outputs, inputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, device=device) * 0.01).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, device=device) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": [name.split(".")[-1] for name in shapes], "base_model_name_or_path": "random"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def no_room_is_out_of_memory() -> Iterator[None]:
    """Raise OutOfMemoryError instead of vLLM's ValueError about too little memory in the block."""
    try:
        yield
    except ValueError as error:
        if any(text in str(error) for text in _NO_ROOM):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise
