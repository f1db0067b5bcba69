"""Rollouts of mixed lengths by stock vLLM, as users run it: CUDA graphs, prefix cache, a separate engine process.

Each completion is a request with its own `max_tokens`; requests with the same prompt share its cache. Log-probabilities
of the drawn tokens are requested, because an update needs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qerl.bench.rollout_mix.workload import MixEngine, Workload, measure
from qerl.bench.stock_vllm import description, start_engine
from qerl.jobs.shapes import Mix, RolloutMixJob

#: Bytes of vLLM's KV cache on a CPU, where it lies in the machine's memory.
_CPU_CACHE_BYTES = 2**28


def _options(work: Mix) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": work.prompt_tokens[1] + work.longest,
        "max_num_seqs": work.sequences,
        "enable_prefix_caching": True,
    }
    if not torch.cuda.is_available():
        return options | {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enforce_eager": True}
    # All requests use the adapter, so graphs without it aren't needed.
    return options | {"gpu_memory_utilization": 0.85, "compilation_config": {"cudagraph_specialize_lora": False}}


def _start(folder: Path, work: Mix, workload: Workload) -> MixEngine:
    # CUDA is initialized in this process, so a forked process couldn't use it.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import SamplingParams

    engine, adapter = start_engine(folder, work.size, work.weights, work.rank, **_options(work))
    # One request per completion; requests with the same prompt are adjacent, as RL trainers send them.
    params = [
        SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        for group in workload.completion_tokens
        for tokens in group
    ]

    def rollout(prompts: list[list[int]], _: int) -> list[list[int]]:
        engine.reset_prefix_cache()  # a trace's prompts are those of the round before
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(work.group)]
        outputs = engine.generate(inputs, params, lora_request=adapter, use_tqdm=False)
        drawn = [_length(output.outputs[0]) for output in outputs]
        return [drawn[start : start + work.group] for start in range(0, len(drawn), work.group)]

    return MixEngine(description(work.weights), rollout, close=engine.llm_engine.engine_core.shutdown)


def _length(completion: Any) -> int:
    """The number of tokens of a completion. Raises RuntimeError if a token has no log-probability."""
    tokens: list[int] = completion.token_ids
    if any(token not in entry for token, entry in zip(tokens, completion.logprobs, strict=True)):
        raise RuntimeError("vLLM gave no log-probability of a token that it drew: its time says nothing")
    return len(tokens)


def measure_mix(job: RolloutMixJob) -> None:
    """Time the rollouts and write the result."""
    with TemporaryDirectory() as folder:
        measure(job, lambda workload: _start(Path(folder), job.work, workload))
