"""Decode speed of stock vLLM on random weights of known shapes: the baseline for `qerl.bench.decode.engine`.

The adapter is on all layers outside of experts. Prefix caching is off, and CUDA graphs are captured for every requested
number of sequences.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from qerl.bench.decode.points import DecodePoints, Measure, check_room, timed
from qerl.bench.memory import nbytes
from qerl.bench.stock_vllm import description, start_engine
from qerl.checkpoints.published import vocabulary
from qerl.jobs.shapes import DecodeJob, DecodePart, Decoding
from qerl.results.schema.speed import DecodePoint

#: Tokens per sequence (prompt and completion) that the engine is configured for, unless a job needs more.
_LENGTH = 2048


def _start(folder: Path, parts: Sequence[DecodePart]) -> tuple[Any, Any]:
    """vLLM's engine for these parts, which differ in their lengths, and the request for the adapter.

    Raises OutOfMemoryError also if the weights fit but vLLM's cache doesn't.
    """
    # In one process, so that timing this process times the engine.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    work = parts[0].work
    sequences = {count for part in parts for count in part.sequences}
    return start_engine(
        folder,
        work.size,
        work.weights,
        work.rank,
        work.pack_delta_nets,
        max_model_len=max(_LENGTH, *(part.work.prompt + part.work.tokens + 1 for part in parts)),
        gpu_memory_utilization=0.85,
        max_num_seqs=max(sequences),
        # All requests use the adapter, so graphs without it aren't needed.
        compilation_config={"cudagraph_capture_sizes": sorted(sequences), "cudagraph_specialize_lora": False},
        enable_prefix_caching=False,
    )


def _measure(engine: Any, request: Any, work: Decoding, sequences: int) -> DecodePoint:
    """Measure the point with this number of sequences. Its peak is None: vLLM reserves a fixed share of the GPU."""
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
    timing = timed(draw, sequences, work.prompt, work.tokens, vocabulary(work.size))
    return timing.point(sequences, description(work.weights), engine.apply_model(_weight_bytes)[0], None)


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of vLLM's weights, with bitsandbytes' scales (attributes of the parameters), without the adapter."""
    parameters = [*model.parameters()]
    states = [state for one in parameters for state in getattr(one, "bnb_quant_state", {}).values()]
    return nbytes([*parameters, *(state.absmax for state in states)])


def measure_points(job: DecodeJob) -> None:
    """Measure the points that the job's files lack, and write a file after each. All lengths share one engine."""
    files = [(part, DecodePoints(job.out / part.file, part.work)) for part in job.parts]
    left = [part for part, points in files if points.missing(part.sequences)]
    with TemporaryDirectory() as folder:
        start = cache(lambda: _start(Path(folder), left))
        for part, points in files:

            def load(work: Decoding = part.work) -> Measure:
                engine, request = start()
                return lambda count: _measure(engine, request, work, count)

            points.run(part.sequences, load)
