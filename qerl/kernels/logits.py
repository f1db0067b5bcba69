"""Statistics and gradient of tiles of logits in Triton; `qerl.kernels.reference` has the PyTorch versions.

Each kernel reads a tile once, as cuBLAS wrote it, and computes in float32 registers; the gradient overwrites the tile
for the next product. These kernels follow cuBLAS, which doesn't use programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns that a program has in registers at a time.
_BLOCK = 4096

#: Less than any logit, but finite, so that the difference of two isn't NaN and the first tile is no special case.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _statistics(logits, targets, state, first, rows, width, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    peak = tl.load(state + row)
    total = tl.load(state + rows + row)
    moment = tl.load(state + 2 * rows + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(line + column, inside, other=0.0).to(tl.float32) * inverse
        x = tl.where(inside, x, _LOWEST)
        rising = tl.maximum(peak, tl.max(x, axis=0))
        shift = peak - rising
        distance = x - rising
        mass = tl.exp(distance)
        moment = tl.exp(shift) * (moment + shift * total) + tl.sum(mass * distance, axis=0)
        total = tl.exp(shift) * total + tl.sum(mass, axis=0)
        peak = rising
    tl.store(state + row, peak)
    tl.store(state + rows + row, total)
    tl.store(state + 2 * rows + row, moment)
    place = tl.load(targets + row) - first
    in_tile = (place >= 0) & (place < width)
    tl.store(state + 3 * rows + row, tl.load(line + place, in_tile, other=0.0).to(tl.float32) * inverse, in_tile)


@triton.jit
def _gradient(logits, targets, lse, grad, first, width, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    place = tl.load(targets + row) - first
    level = tl.load(lse + row)
    scale = tl.load(grad + row) * inverse
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(line + column, inside, other=0.0).to(tl.float32) * inverse
        out = scale * ((column == place).to(tl.float32) - tl.exp(x - level))
        tl.store(line + column, out.to(logits.dtype.element_ty), inside)


def tile_statistics(
    tiles: Iterable[tuple[int, Tensor]], targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.tile_statistics`; tiles must be contiguous and aren't changed.

    For each row, the maximum m, S = sum exp(x - m), T = sum exp(x - m) (x - m) and the target's logit are carried from
    tile to tile. The entropy log S - T / S is a sum of two non-negative terms relative to the maximum, and so not a
    small difference of large numbers.
    """
    rows = len(targets)
    state = torch.zeros(4, rows, dtype=torch.float32, device=targets.device)
    state[0] = _LOWEST.value
    targets = targets.contiguous()
    for first, logits in tiles:
        _statistics[(rows,)](
            logits, targets, state, first, rows, logits.shape[1], 1.0 / temperature, BLOCK=_BLOCK, num_warps=8
        )
    peak, total, moment, chosen = state
    return chosen, peak + total.log(), total.log() - moment / total


def tile_gradient(logits: Tensor, first: int, targets: Tensor, lse: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """See `reference.tile_gradient`; it overwrites `logits`, which must be contiguous."""
    _gradient[(len(logits),)](
        logits, targets.contiguous(), lse.contiguous(), grad.contiguous(), first, logits.shape[1], 1.0 / temperature,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits
