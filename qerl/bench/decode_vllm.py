"""Decode speed of stock vLLM on random weights of Qwen2.5's shapes: the yardstick beside `qerl.bench.decode`.

vLLM fills the weights itself (load_format=dummy); the adapter is on all seven projections. Prefix caching is off, CUDA
graphs are captured for the batch sizes that are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from qerl.bench.decode import REPEATS
from qerl.bench.shapes import SHAPES, model_config
from qerl.provenance import stamp, write_json


def _write_adapter(folder: Path, size: str, rank: int) -> None:
    hidden, layers, heads, kv_heads, intermediate, _, _ = SHAPES[size]
    narrow = hidden // heads * kv_heads
    widths = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    tensors = {}
    for layer in range(layers):
        for name, (inputs, outputs) in widths.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs) * 0.01).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": [name.split(".")[-1] for name in widths], "base_model_name_or_path": "random"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _engine(folder: Path, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The engine, and the adapter's request or None."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    (folder / "config.json").write_text(json.dumps(model_config(arguments.size, arguments.weights)))
    lora = {"enable_lora": True, "max_lora_rank": max(8, arguments.rank), "max_loras": 1} if arguments.rank else {}
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        gpu_memory_utilization=0.85,
        max_num_seqs=max(arguments.sequences),
        compilation_config={"cudagraph_capture_sizes": sorted(arguments.sequences)},
        enable_prefix_caching=False,
        **lora,
    )
    if not arguments.rank:
        return engine, None
    adapter = folder / "adapter"
    adapter.mkdir()
    _write_adapter(adapter, arguments.size, arguments.rank)
    return engine, LoRARequest("adapter", 1, str(adapter))


def _measure(engine: Any, request: Any, sequences: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from vllm import SamplingParams

    def seconds(count: int, round_: int) -> float:
        numbers = np.random.default_rng([sequences, round_]).integers(1000, 100000, size=(sequences, arguments.prompt))
        params = SamplingParams(temperature=1.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": row} for row in numbers.tolist()]
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(prompts, params, lora_request=request, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(4, 0)
    prompts = min(seconds(1, 100 + i) for i in range(2))
    samples = [seconds(arguments.tokens + 1, 1 + i) - prompts for i in range(REPEATS)]
    return {
        "sequences": sequences,
        "samples": [sequences * arguments.tokens / taken for taken in samples],
        "step_ms": 1e3 * median(samples) / arguments.tokens,
        "prompt_seconds": prompts,
    }


def main() -> None:
    """Time one policy and write the samples, after each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="7B")
    parser.add_argument("--weights", default="nvfp4", choices=("bf16", "nvfp4"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    # One process: the engine's work is then what this process waits for.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    label = {"size": arguments.size, "weights": arguments.weights, "rank": arguments.rank}
    points = []
    with TemporaryDirectory() as folder:
        engine, request = _engine(Path(folder), arguments)
        for sequences in arguments.sequences:
            points.append(
                label | _measure(engine, request, sequences, arguments) | {"sampler": f"vLLM {vllm.__version__}"}
            )
            print(f"{label} {sequences}: {median(points[-1]['samples']):.1f} tok/s", flush=True)
            write_json(
                arguments.out,
                {"prompt": arguments.prompt, "tokens": arguments.tokens, "points": points, "provenance": stamp()},
            )


if __name__ == "__main__":
    main()
