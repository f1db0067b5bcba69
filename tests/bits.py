"""The size of packed weights."""

import math

from qerl.formats.codecs import Packed


def bits_per_weight(packed: Packed) -> float:
    """The stored bits of one weight, including scales and look-up tables."""
    stored = sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors.values())
    return 8 * stored / math.prod(packed.shape)
