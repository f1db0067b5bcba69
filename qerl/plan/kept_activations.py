"""Bytes per token that a block keeps for its backward pass on a GPU, without adapters."""

from __future__ import annotations

from qerl.checkpoints.model_shape import HALF, DeltaNets, ModelShape
from qerl.kernels.packed_sequences import SINK_FEATURES


def kept_bytes(shape: ModelShape) -> int:
    """Bytes per token that a block keeps.

    These are the inputs of both norms and the first one's result, the rotated queries and keys, the values,
    attention's result and log-sum-exps, and what the MLP keeps. Attention with sinks keeps copies of its inputs and
    its result with more features, those of keys for all heads. Of a hybrid it is a block with a delta net, which
    most blocks have and which keeps more than attention.
    """
    if shape.nets:
        return HALF * 3 * shape.hidden + net_kept_bytes(shape.nets) + 2 * 4 + _kept_of_mlp(shape)
    attention = 3 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width
    if shape.mixture and shape.mixture.biased:
        attention = 3 * shape.hidden + shape.query_width + 4 * (shape.query_width + shape.heads * SINK_FEATURES)
    return HALF * attention + 4 * shape.heads + 2 * 4 + _kept_of_mlp(shape)


def net_kept_bytes(nets: DeltaNets) -> int:
    """Bytes per token that a delta net keeps, without its input.

    They were counted in `qerl.layers.delta_rule`, whose chunks have 64 tokens. For each value head it keeps matrices of
    a chunk, decayed queries and keys, what the chunk's system gives, and the state before it, all in float32. Queries,
    keys and their products are kept for each key head. The rest are the 16-bit row of the convolution and the norm.
    """
    value_head = 12 * nets.key_dim + 24 * nets.value_dim + nets.key_dim * nets.value_dim // 16 + 1054
    key_head = 28 * nets.key_dim + 520
    return nets.value * value_head + nets.key * key_head


def _kept_of_mlp(shape: ModelShape) -> int:
    """Bytes per token that an MLP keeps: its input, gate, up and their product.

    A mixture keeps gate, up and the outputs of a token's experts, with their numbers and weights and the router's
    probabilities, but not its input. A shared expert is an MLP, whose output and gate are kept, too.
    """
    mixture = shape.mixture
    if mixture is None:
        return HALF * (shape.hidden + 3 * shape.intermediate)
    routed = HALF * (2 * shape.intermediate + mixture.chosen * shape.hidden)
    choice = 4 * mixture.experts + (8 + 4 + 4) * mixture.chosen + 4
    shared = HALF * (2 * shape.hidden + 3 * mixture.shared + 1) if mixture.shared else 0
    return routed + choice + shared
