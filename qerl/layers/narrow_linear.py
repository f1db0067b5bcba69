"""Dense layers with few outputs and their adapters, as one launch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qerl.kernels.activations import Activation
from qerl.layers.dense_linear import TorchLinear

#: The most rows of x for which one launch is worth it; with more, cuBLAS's five launches read x fewer times.
_MOST_ROWS = 128


class NarrowLinear(TorchLinear):
    """A `FusedLinear` of dense layers; with few rows in 16 bits, product and adapters are one launch on a GPU."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        super().__init__(layers, dtype)
        self._fused = self._weight is not None and self._bias is None and dtype.itemsize == 2

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`."""
        if residual or activation or not (self._fused and x.is_cuda and len(x) <= _MOST_ROWS):
            super().__call__(x, out, residual, activation)
            return
        from qerl.kernels.narrow import narrow_product

        assert self._weight is not None
        rank = self._adapters.rank
        narrow_product(x, self._weight, *((self._adapters.down, self._adapters.up) if rank else (x[:0], x[:0])), out)
