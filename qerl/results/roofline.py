"""The floor of a decode step: its least time, by the bytes that it must move and the FLOPs that it must compute.

Each byte counts once, as if caches were perfect. Writes other than to the KV cache (activations, logits) don't count.
Both counts are therefore lower bounds for any engine.
"""

from __future__ import annotations

import math

from qerl.checkpoints.architectures import ARCHITECTURES, linear_shapes
from qerl.formats.codecs import tensor_specs
from qerl.results.schema.speed import Ceilings

_BF16 = 2


def mean_context(prompt: int, tokens: int) -> float:
    """The mean number of cached tokens of a sequence over the steps that decode `tokens` after a prompt."""
    return prompt + tokens / 2


def byte_parts(size: str, weights: str, rank: int, sequences: int, context: float) -> dict[str, float]:
    """Bytes of one decode step by kind. `context` is the number of cached tokens per sequence before the step.

    Packed weights count as `qerl.quantization` stores them, with scales and tables (NF4 with double quantization); all
    else is bfloat16. Of the embedding one row per sequence is read, of the head everything, even if both are tied.
    """
    hidden, layers, heads, kv_heads, _, vocabulary, _ = ARCHITECTURES[size]
    narrow = hidden // heads * kv_heads
    shapes = linear_shapes(size)
    norms = (2 * layers + 1) * hidden
    biases = layers * sum(shapes[f"self_attn.{name}_proj"][0] for name in "qkv")
    return {
        "linear": float(layers * sum(_weight_bytes(weights, shape) for shape in shapes.values())),
        "adapter": float(_BF16 * _adapter_weights(size, rank)),
        "head": float(_BF16 * vocabulary * hidden),
        "embedding": float(_BF16 * sequences * hidden),
        "norms and biases": float(_BF16 * (norms + biases)),
        "cache": _BF16 * sequences * layers * 2 * narrow * (context + 1),
    }


def step_bytes(size: str, weights: str, rank: int, sequences: int, context: float) -> float:
    """The bytes of one decode step, which are the sum of `byte_parts`."""
    return sum(byte_parts(size, weights, rank, sequences, context).values())


def step_flops(size: str, rank: int, sequences: int, context: float) -> float:
    """FLOPs of one decode step: projections, adapters, head and attention over `context`; a multiply-add counts two."""
    hidden, layers, _, _, _, vocabulary, _ = ARCHITECTURES[size]
    linear = layers * sum(map(math.prod, linear_shapes(size).values()))
    products = 2 * (linear + _adapter_weights(size, rank) + vocabulary * hidden)
    # q k^T and p v: 4 FLOPs per token of the context and element of a head; hidden = heads * head size.
    return sequences * (products + 4 * context * layers * hidden)


def step_floor(moved: float, flops: float, ceilings: Ceilings) -> float:
    """The least seconds of a step. Moving bytes and computing overlap, so the slower of the two bounds it."""
    return max(moved / ceilings.copy_bytes_per_second, flops / ceilings.matmul_flops_per_second)


def _weight_bytes(weights: str, shape: tuple[int, int]) -> int:
    if weights == "bf16":
        return _BF16 * math.prod(shape)
    return sum(math.prod(size) * dtype.itemsize for size, dtype in tensor_specs(weights, shape).values())


def _adapter_weights(size: str, rank: int) -> int:
    """Number of elements of A and B on all seven projections of all layers."""
    return ARCHITECTURES[size][1] * rank * sum(rows + columns for rows, columns in linear_shapes(size).values())
