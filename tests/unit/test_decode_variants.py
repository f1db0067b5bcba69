"""Which thread blocks of the decode product share a multiprocessor: resources by the rules of occupancy on Hopper."""

import pytest

from qerl.kernels.linear import _VARIANTS

REGISTERS, SHARED_BYTES, MOST_SHARED_BYTES, RESERVED_BYTES = 65536, 233472, 232448, 1024


def registers(variant):
    # Given to warps in units of 256.
    return variant.threads // 32 * (-(-variant.registers * 32 // 256) * 256)


def fit_together(*variants):
    shared = sum(variant.shared_bytes + RESERVED_BYTES for variant in variants)
    return sum(map(registers, variants)) <= REGISTERS and shared <= SHARED_BYTES


@pytest.mark.parametrize(("small", "large"), _VARIANTS)
def test_never_two_of_a_launch(small, large):
    for variant in (small, large):
        assert variant.shared_bytes <= MOST_SHARED_BYTES
        # With many rows the launch bound alone decides; the ring then fills the memory.
        assert not fit_together(variant, variant) if variant.registers else 2 * variant.shared_bytes > SHARED_BYTES


@pytest.mark.parametrize(("small", "large"), [pair for pair in _VARIANTS if pair[0].nt <= 2])
def test_up_to_16_rows_the_next_layer_fits_beside(small, large):
    assert fit_together(small, large)
