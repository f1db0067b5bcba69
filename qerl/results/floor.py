"""The floor of a decode step: its least time, by the bytes that it must move and the FLOPs that it must compute.

Each byte counts once, as if caches were perfect. Writes other than to the KV cache and delta nets' states (activations,
logits) don't count. Both counts are therefore lower bounds for any engine. Experts count as often as tokens take them
that choose at random; the bytes of a less even choice are fewer.
"""

from __future__ import annotations

from qerl.checkpoints.shapes import HALF, ModelShape, shape_of
from qerl.formats.codecs import stored_bytes
from qerl.settings.models import Base

_FLOAT32 = 4


def mean_context(prompt: int, tokens: int) -> float:
    """The mean number of cached tokens of a sequence over the steps that decode `tokens` after a prompt."""
    return prompt + tokens / 2


def byte_parts(base: Base, rank: int, sequences: int, context: float) -> dict[str, float]:
    """Bytes of one decode step by kind. `context` is the number of cached tokens per sequence before the step.

    Packed weights count as `qerl.models` stores them, with scales and tables (NF4 with double quantization); all
    else is bfloat16, but for routers and recurrent states in float32. Of the embedding one row per sequence is read, of
    the head everything, even if both are tied.
    """
    shape, weights = shape_of(base.model).with_packed_nets(base.packed_nets), base.weights
    norms = (2 * shape.layers + 1) * shape.hidden
    biases = shape.layers * (shape.query_width + 2 * shape.kv_width) * shape.biased
    return {
        "linear": _linear_bytes(shape, weights) + _expert_bytes(shape, weights, sequences),
        "adapter": float(HALF * shape.adapter_numbers(rank)),
        "head": float(HALF * shape.vocabulary * shape.hidden),
        "embedding": float(HALF * sequences * shape.hidden),
        "norms and biases": float(HALF * (norms + biases)),
        "cache": HALF * sequences * 2 * shape.kv_width * _attended(shape, context + 1),
        "states": 2.0 * sequences * shape.nets.state_bytes if shape.nets else 0.0,
    }


def step_bytes(base: Base, rank: int, sequences: int, context: float) -> float:
    """The bytes of one decode step, which are the sum of `byte_parts`."""
    return sum(byte_parts(base, rank, sequences, context).values())


def step_flops(size: str, rank: int, sequences: int, context: float) -> float:
    """FLOPs of one decode step: products, adapters, head, attention and recurrences; a multiply-add counts two."""
    shape = shape_of(size)
    router = shape.layers * shape.mixture.experts * shape.hidden if shape.mixture else 0
    products = shape.products + router + shape.adapter_numbers(rank) + shape.vocabulary * shape.hidden
    # q k^T and p v: 4 FLOPs per token of the context and element of a head.
    attention = 4 * shape.query_width * _attended(shape, context)
    return sequences * (2 * products + attention + _recurrence(shape))


def _attended(shape: ModelShape, tokens: float) -> float:
    """The tokens that all blocks with attention read, of `tokens` in the cache."""
    return (shape.attentions - shape.windowed) * tokens + shape.windowed * min(tokens, shape.window)


def _linear_bytes(shape: ModelShape, weights: str) -> float:
    """Bytes of all layers outside of experts."""
    return float(stored_bytes(shape.attention_format(weights), shape.packable) + stored_bytes("bf16", shape.dense))


def _expert_bytes(shape: ModelShape, weights: str, sequences: int) -> float:
    """Bytes of the experts that some sequence takes, in the mean of random choices, and of the routers."""
    if shape.mixture is None:
        return 0.0
    experts = shape.mixture.experts
    taken = experts * (1 - (1 - shape.mixture.chosen / experts) ** sequences)
    return shape.layers * (taken * stored_bytes(weights, shape.expert_linears) + _FLOAT32 * experts * shape.hidden)


def _recurrence(shape: ModelShape) -> float:
    """FLOPs of a token in all delta nets: the state is read with the key, changed, and read with the query."""
    nets = shape.nets
    return 6.0 * nets.count * nets.value * nets.key_dim * nets.value_dim if nets else 0.0
