"""Decode speed of stock vLLM on random weights of Qwen2.5's shapes: the yardstick beside `qerl.bench.decode.engine`.

The adapter is on all seven projections. Prefix caching is off, CUDA graphs are captured for all numbers of sequences
that are asked for. vLLM fills bf16 and nvfp4 weights itself (load_format=dummy). For nf4 it quantizes a random bfloat16
checkpoint with bitsandbytes as it loads it, as a QLoRA user does. Its dummy loader makes none of the scales that the
layers then read. That checkpoint lies in TMPDIR and has two bytes per weight. vLLM up to 0.27 has bitsandbytes built
in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from qerl.bench.decode.points import DecodePoints, Measure, check_room, timed
from qerl.bench.memory import nbytes
from qerl.checkpoints.architectures import ARCHITECTURES, linear_shapes
from qerl.jobs.shapes import DecodeJob, Decoding
from qerl.policy.policy import choose_device
from qerl.random_models.checkpoint import model_config, write_checkpoint
from qerl.random_models.tokenizer import TEXTS

#: Tokens of a prompt and what follows it that the engine is set up for, more where a job has more.
_LENGTH = 2048
#: What vLLM says, as a mere ValueError, where weights leave no room for the cache, or others none for its share.
_NO_ROOM = (
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
)


def _write_adapter(folder: Path, size: str, rank: int) -> None:
    shapes, tensors = linear_shapes(size), {}
    device = choose_device()  # large ones take a CPU long
    for layer in range(ARCHITECTURES[size][1]):
        for name, (outputs, inputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, device=device) * 0.01).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, device=device) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": [name.split(".")[-1] for name in shapes], "base_model_name_or_path": "random"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _checkpoint(folder: Path, work: Decoding) -> dict[str, str]:
    """Write the checkpoint that vLLM loads to `folder`. Returns the load format."""
    if work.weights == "nf4":
        write_checkpoint(folder, work.size, "bf16", TEXTS)
        return {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(work.size, work.weights)))
    return {"load_format": "dummy"}


def _engine(folder: Path, work: Decoding, sequences: list[int]) -> tuple[Any, Any]:
    """The engine, and the adapter's request or None."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, adapter = folder / "model", folder / "adapter"
    loading = _checkpoint(model, work)
    lora = {"enable_lora": True, "max_lora_rank": max(8, work.rank), "max_loras": 1} if work.rank else {}
    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(_LENGTH, work.prompt + work.tokens + 1),
        gpu_memory_utilization=0.85,
        max_num_seqs=max(sequences),
        # All requests have the adapter: no second set of graphs without one.
        compilation_config={"cudagraph_capture_sizes": sorted(set(sequences)), "cudagraph_specialize_lora": False},
        enable_prefix_caching=False,
        **loading,
        **lora,
    )
    if not work.rank:
        return engine, None
    adapter.mkdir()
    _write_adapter(adapter, work.size, work.rank)
    return engine, LoRARequest("adapter", 1, str(adapter))


def _load(folder: Path, work: Decoding, sequences: list[int]) -> Measure:
    """What measures; OutOfMemoryError also where vLLM has room for the weights and none for its cache."""
    # One process: the engine's work is then what this process waits for.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with no_room_is_out_of_memory():
        engine, request = _engine(folder, work, sequences)
    return lambda count: _measure(engine, request, work, count)


@contextmanager
def no_room_is_out_of_memory() -> Iterator[None]:
    """Raise OutOfMemoryError if vLLM says in the block that it has too little memory."""
    try:
        yield
    except ValueError as error:
        if any(text in str(error) for text in _NO_ROOM):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise


def _measure(engine: Any, request: Any, work: Decoding, sequences: int) -> dict[str, Any]:
    """Figures of a point. The peak is None: vLLM takes a set share of the GPU, whatever it needs."""
    import vllm

    def draw(prompts: list[list[int]], count: int, _: int) -> int:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(texts, params, lora_request=request, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    cache = engine.llm_engine.vllm_config.cache_config
    # vLLM keeps one block free for itself.
    check_room(cache.num_gpu_blocks - 1, cache.block_size, sequences, work.prompt + work.tokens + 1)
    figures = timed(draw, sequences, work.prompt, work.tokens)
    sampler = f"vLLM {vllm.__version__}"
    return figures | {
        "sampler": f"{sampler}, bitsandbytes" if work.weights == "nf4" else sampler,
        "peak_memory_bytes": None,
        "weight_bytes": engine.apply_model(_weight_bytes)[0],
    }


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of vLLM's weights; scales of bitsandbytes hang on the parameters. The adapter isn't counted."""
    parameters = [*model.parameters()]
    states = [state for one in parameters for state in getattr(one, "bnb_quant_state", {}).values()]
    return nbytes([*parameters, *(state.absmax for state in states)])


def measure_points(job: DecodeJob) -> None:
    """Measure the points that the job's file lacks, and write the file after each."""
    with TemporaryDirectory() as folder:
        DecodePoints(job.out, job.work).run(job.sequences, lambda: _load(Path(folder), job.work, job.sequences))
