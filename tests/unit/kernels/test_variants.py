"""Thread blocks of the decode product that share a multiprocessor, by the rules of occupancy on Hopper."""

import pytest

from qerl.kernels.cuda.w4a16 import VARIANTS, limits, padded_rows, variant_for

REGISTERS, SHARED_BYTES, MOST_SHARED_BYTES, RESERVED_BYTES = 65536, 233472, 232448, 1024
RANKS = (0, 16, 64, 128)


def registers(variant, rank):
    # Given to warps in units of 256.
    return variant.threads(rank) // 32 * (-(-variant.registers_per_thread(rank) * 32 // 256) * 256)


def fit_together(rank, *variants):
    # Three layers with an adapter each are the most that is fused.
    shared = sum(variant.shared_bytes(3 * rank) + RESERVED_BYTES for variant in variants)
    return sum(registers(variant, rank) for variant in variants) <= REGISTERS and shared <= SHARED_BYTES


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("small", "large"), VARIANTS)
def test_never_two_of_a_launch(small, large, rank):
    for variant in (small, large):
        assert variant.shared_bytes(3 * rank) <= MOST_SHARED_BYTES
        # With many rows the launch bound alone decides; the ring then fills the memory.
        if variant.registers:
            assert not fit_together(rank, variant, variant)
        else:
            assert 2 * variant.shared_bytes(0) > SHARED_BYTES


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "variant", dict.fromkeys(variant for pair in VARIANTS for variant in pair if variant.registers)
)
def test_warps_find_registers_in_their_quarter_of_a_multiprocessor(variant, rank):
    warps = -(-variant.threads(rank) // 32 // 4)
    assert warps * variant.registers_per_thread(rank) * 32 <= REGISTERS // 4


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("small", "large"), [pair for pair in VARIANTS if pair[1].x_tiles <= 2])
def test_up_to_16_rows_the_next_layer_fits_beside(small, large, rank):
    assert fit_together(rank, small, large)


@pytest.mark.parametrize(("rows", "most"), [(1, 8), (8, 8), (9, 16), (129, 160), (512, 512), (513, 512)])
def test_limits_reach_as_far_as_the_rows(rows, most):
    assert limits(rows) == [end for end in limits(9999) if end <= most]
    assert rows > 512 or padded_rows(rows) == most


@pytest.mark.parametrize(("small", "large"), VARIANTS)
def test_row_blocks_of_small_layers_have_room_for_as_many_rows(small, large):
    assert small.rows * small.row_blocks >= large.rows * large.row_blocks


@pytest.mark.parametrize(
    ("rows", "row_block"), [(8, 8), (32, 32), (33, 32), (100, 32), (128, 32), (160, 160), (256, 64)]
)
def test_a_small_layer_has_narrow_row_blocks(rows, row_block):
    small, blocks = variant_for(rows, 3584, 3584, 132)
    large, _ = variant_for(rows, 2 * 18944, 3584, 132)
    assert small.rows == row_block
    assert small.workers(blocks, 132 // small.row_blocks) * small.row_blocks <= 132
    assert large.row_blocks == 1
    assert large.rows >= rows
