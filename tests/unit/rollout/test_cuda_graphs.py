"""The batch sizes of decode steps' graphs."""

import pytest

from qerl.kernels.cuda.w4a16 import variant_for
from qerl.rollout.decoder import bucket_of

MOST = 1100
SIZES = sorted({bucket_of(rows) for rows in range(1, MOST)})


def multiplied(rows: int) -> int:
    """The rows that a product of 7B's largest layer multiplies for `rows`, those that x lacks too."""
    variant, _ = variant_for(rows, 2 * 18944, 3584, 132)
    blocks = 0
    while blocks * variant.rows < rows:
        blocks += 1
    return blocks * variant.rows


@pytest.mark.parametrize("rows", [1, 3, 17, 100, 129, 161, 193, 256, 257, 384, 385, 512, 513, 1000])
def test_a_graph_is_the_smallest_with_room(rows):
    assert bucket_of(rows) == min(size for size in SIZES if size >= rows)
    assert bucket_of(bucket_of(rows)) == bucket_of(rows)


def test_no_padding_costs_a_product_more_and_beyond_128_rows_a_larger_graph_would():
    for rows in range(1, MOST):
        assert multiplied(bucket_of(rows)) == multiplied(rows)
    for size in [size for size in SIZES if size > 128]:
        assert multiplied(size + 1) > multiplied(size) == size


def test_few_graphs_serve_a_rollout():
    assert len([size for size in SIZES if size <= 512]) == 19
