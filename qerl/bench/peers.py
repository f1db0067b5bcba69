"""vLLM, the peer, on random weights of known shapes, as users run it: decode speed and rollouts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from qerl.bench.timing import Engine, Start, check_room, measure_decoding, nbytes, unmeasured
from qerl.bench.workloads import Lengths, MixEngine, measure
from qerl.models.loading import write_tensors
from qerl.models.policy import choose_device
from qerl.models.quantize import compressed_config
from qerl.models.random import TEXTS, random_config, write_checkpoint
from qerl.models.structure import empty_model, structure_of
from qerl.report_jobs import PointJob
from qerl.settings.models import Base
from qerl.settings.workloads import Decoding, Mix, PointPart

# Stock vLLM on random weights of known shapes, with an adapter on all layers outside of experts, as a baseline.
#
# vLLM fills bf16, nvfp4 and mxfp4 weights itself (`load_format=dummy`). For nf4 that would leave the layers without
# scales, so vLLM quantizes a random bfloat16 checkpoint with bitsandbytes while loading, as for a QLoRA user. That
# checkpoint is written to TMPDIR, with two bytes per weight. vLLM up to 0.27 has bitsandbytes built in.

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


def start_engine(folder: Path, base: Base, rank: int, **options: Any) -> tuple[Any, Any]:
    """Start vLLM with its `options`; returns the engine and the adapter's LoRARequest or None. Files go to `folder`.

    vLLM is told which layers have an adapter, because it would also run experts and embeddings as layers with one.
    """
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, adapter = folder / "model", folder / "adapter"
    loading = write_model(model, base)
    if rank:
        adapter.mkdir()
        targets = _write_adapter(adapter, base.model, rank)
        loading |= {"enable_lora": True, "max_lora_rank": max(8, rank), "max_loras": 1, "lora_target_modules": targets}
    with no_room_is_out_of_memory():
        engine = LLM(model=str(model), skip_tokenizer_init=True, dtype="bfloat16", **loading, **options)
    return engine, LoRARequest("adapter", 1, str(adapter)) if rank else None


def description(weights: str) -> str:
    """The engine's name and version, for results."""
    import vllm

    return f"vLLM {vllm.__version__}" + (", bitsandbytes" if weights == "nf4" else "")


def write_model(folder: Path, base: Base) -> dict[str, Any]:
    """Write the checkpoint that vLLM loads to `folder`. Returns vLLM's options for it."""
    if base.weights == "nf4":
        write_checkpoint(folder, base.model, TEXTS)
        return {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    folder.mkdir()
    content = _content(base)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return {"load_format": "dummy"} | (_TEXT_ALONE if "text_config" in content else {})


def _content(base: Base) -> dict[str, Any]:
    """The content of config.json."""
    config = random_config(base.model)
    content = config.to_dict() | {"torch_dtype": "bfloat16"}
    if config.model_type in _WITH_IMAGES:
        kind, architecture = _WITH_IMAGES[config.model_type]
        content = {"model_type": kind, "text_config": content, "torch_dtype": "bfloat16"}
    else:
        architecture = type(empty_model(config, torch.bfloat16)).__name__
    content["architectures"] = [architecture]
    if base.weights == "nvfp4":
        nets = _NARROW_OF_NETS if base.packed_nets else _DENSE_NETS
        content["quantization_config"] = compressed_config("nvfp4", [*_DENSE, nets]).model_dump(mode="json")
    elif base.weights == "mxfp4":
        content["quantization_config"] = {"quant_method": "mxfp4"}
    return content


# Stock vLLM is told which layers have an adapter: it would run experts and the head as layers with one, which could
# flatter this engine.
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
    config = random_config(size)
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


# Decode speed of stock vLLM on random weights of known shapes: the baseline for this project's engine.
#
# The adapter is on all layers outside of experts. Prefix caching is off, and CUDA graphs are captured for every
# requested number of sequences.

#: Tokens per sequence (prompt and completion) that the engine is configured for, unless a job needs more.
_LENGTH = 2048


def _start_decode(folder: Path, parts: Sequence[PointPart[Decoding, int]]) -> tuple[Any, Any]:
    """vLLM's engine for these parts, which differ in their lengths, and the request for the adapter.

    Raises OutOfMemoryError also if the weights fit but vLLM's cache doesn't.
    """
    # In one process, so that timing this process times the engine.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    work = parts[0].work
    sequences = {count for part in parts for count in part.points}
    return start_engine(
        folder,
        work.base,
        work.rank,
        max_model_len=max(_LENGTH, *(part.work.prompt + part.work.tokens + 1 for part in parts)),
        gpu_memory_utilization=0.85,
        max_num_seqs=max(sequences),
        # All requests use the adapter, so graphs without it aren't needed.
        compilation_config={"cudagraph_capture_sizes": sorted(sequences), "cudagraph_specialize_lora": False},
        enable_prefix_caching=False,
    )


def _vllm_engine(engine: Any, request: Any, work: Decoding, sequences: int) -> Engine:
    """vLLM for a number of sequences. It reserves a fixed share of the GPU, so that its peak says nothing."""
    import vllm

    def draw(prompts: list[list[int]], count: int, _: int) -> int:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(texts, params, lora_request=request, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    cache = engine.llm_engine.vllm_config.cache_config
    # vLLM reserves one block for itself.
    check_room(cache.num_gpu_blocks - 1, cache.block_size, sequences, work.prompt + work.tokens + 1)
    return Engine(draw, description(work.weights), lambda: int(engine.apply_model(_weight_bytes)[0]), has_peak=False)


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of vLLM's weights, with bitsandbytes' scales (attributes of the parameters), without the adapter."""
    parameters = [*model.parameters()]
    states = [state for one in parameters for state in getattr(one, "bnb_quant_state", {}).values()]
    return nbytes([*parameters, *(state.absmax for state in states)])


def decode_vllm(job: PointJob[Decoding, int]) -> None:
    """Measure the parts that have no file yet, and write a file after each. All lengths share one engine."""
    parts = [*unmeasured(job)]
    with TemporaryDirectory() as folder:
        start = cache(lambda: _start_decode(Path(folder), parts))

        @contextmanager
        def engines(work: Decoding) -> Iterator[tuple[Start, dict[str, Any]]]:
            yield partial(_vllm_engine, *start(), work), {}

        for part in parts:
            measure_decoding(part, job.out / part.file, engines(part.work))


# Rollouts of mixed lengths by stock vLLM, as users run it: CUDA graphs, prefix cache, a separate engine process.
#
# Each completion is a request with its own `max_tokens`; requests with the same prompt share its cache.
# Log-probabilities of the drawn tokens are requested, because an update needs them.

#: Bytes of vLLM's KV cache on a CPU, where it lies in the machine's memory.
_CPU_CACHE_BYTES = 2**28


def _start_mix(folder: Path, work: Mix, workload: Lengths) -> MixEngine:
    # CUDA is initialized in this process, so a forked process couldn't use it.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import SamplingParams

    # All requests use the adapter, so graphs without it aren't needed.
    options = {"gpu_memory_utilization": 0.85, "compilation_config": {"cudagraph_specialize_lora": False}}
    if not torch.cuda.is_available():
        options = {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enforce_eager": True}
    engine, adapter = start_engine(
        folder,
        work.base,
        work.rank,
        max_model_len=work.prompt[1] + work.tokens,
        max_num_seqs=work.sequences,
        enable_prefix_caching=True,
        **options,
    )
    # One request per completion; requests with the same prompt are adjacent, as RL trainers send them.
    params = [
        SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        for group in workload.completion_tokens
        for tokens in group
    ]

    def rollout(prompts: list[list[int]], _: int) -> list[list[int]]:
        engine.reset_prefix_cache()  # a trace has the same prompts in each round
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(work.group_size)]
        outputs = engine.generate(inputs, params, lora_request=adapter, use_tqdm=False)
        drawn = [_length(output.outputs[0]) for output in outputs]
        return [drawn[start : start + work.group_size] for start in range(0, len(drawn), work.group_size)]

    return MixEngine(description(work.weights), rollout, close=engine.llm_engine.engine_core.shutdown)


def _length(completion: Any) -> int:
    """The number of tokens of a completion. Raises RuntimeError if a token has no log-probability."""
    tokens: list[int] = completion.token_ids
    if any(token not in entry for token, entry in zip(tokens, completion.logprobs, strict=True)):
        raise RuntimeError("vLLM gave no log-probability of a token that it drew: its time says nothing")
    return len(tokens)


def mix_vllm(job: PointJob[Mix, None]) -> None:
    """Time the rollouts and write the result."""
    for part in unmeasured(job):
        with TemporaryDirectory() as folder:
            measure(part.work, job.out / part.file, partial(_start_mix, Path(folder), part.work))
