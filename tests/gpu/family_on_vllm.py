"""Stock vLLM on a model of another family with random weights, for `tests.gpu.time_families`.

vLLM fills the weights itself (`load_format=dummy`), so a checkpoint is its config.json. The adapter is on the layers
that this project's policy adapts, by the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from qerl.bench.stock_vllm import no_room_is_out_of_memory
from qerl.layers.empty_model import empty_model
from qerl.layers.structure import Structure
from qerl.random_models.checkpoint import model_config

#: Layers that stay in bfloat16 in this project's files, too: routers, gates of one number and delta nets.
_DENSE = ("lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*linear_attn.*")
Draw = Callable[[list[list[int]], int, int], int]


def write_config(folder: Path, config: PreTrainedConfig, weights: str) -> None:
    """Write config.json for weights in `bf16` or `nvfp4`."""
    content = config.to_dict() | {"architectures": [type(empty_model(config, torch.bfloat16)).__name__]}
    content["torch_dtype"] = "bfloat16"
    if weights == "nvfp4":
        content["quantization_config"] = model_config("tiny", weights)["quantization_config"] | {"ignore": [*_DENSE]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def write_adapter(folder: Path, config: PreTrainedConfig, structure: Structure, rank: int) -> None:
    """Write a random adapter on all linear layers of the blocks, in PEFT's layout."""
    lm, tensors = empty_model(config, torch.bfloat16), {}
    for number in range(len(structure.windows)):
        for name in structure.linears:
            layer = f"{structure.blocks}.{number}.{name}"
            if layer not in dict(lm.named_modules()):
                continue
            module: Any = lm.get_submodule(layer)
            shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
            for part, shape in shapes.items():
                tensors[f"base_model.model.{layer}.{part}.weight"] = (torch.randn(shape) * 0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    LoraConfig(r=rank, lora_alpha=rank, target_modules=list(structure.targets), task_type="CAUSAL_LM").save_pretrained(
        folder
    )


def start(
    folder: Path, config: PreTrainedConfig, structure: Structure, weights: str, rank: int, counts: Sequence[int]
) -> Draw:
    """Start vLLM with the adapter and CUDA graphs of these numbers of sequences; returns what draws tokens."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    write_config(folder / "model", config, weights)
    write_adapter(folder / "adapter", config, structure, rank)
    options: dict[str, Any] = {"gpu_memory_utilization": 0.85}
    graphs = {"cudagraph_capture_sizes": sorted(counts), "cudagraph_specialize_lora": False}
    if torch.cuda.is_available():
        options["compilation_config"] = graphs
    else:
        options = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}
    with no_room_is_out_of_memory():
        engine = LLM(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            load_format="dummy",
            enable_lora=True,
            max_lora_rank=max(8, rank),
            max_loras=1,
            max_model_len=2048,
            max_num_seqs=max(counts),
            enable_prefix_caching=False,
            **options,
        )
    request = LoRARequest("adapter", 1, str(folder / "adapter"))

    def draw(prompts: list[list[int]], count: int, _: int) -> int:
        params = SamplingParams(max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(texts, params, lora_request=request, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return draw
