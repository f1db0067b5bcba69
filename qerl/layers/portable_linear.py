"""Linear layers with 4-bit weights and LoRA that run as one product on any supported GPU, by kernels in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qerl.formats import words as layout
from qerl.formats.words import Words
from qerl.kernels.activations import Activation
from qerl.kernels.portable.variants import PortableOperands
from qerl.layers.adapters import StackedAdapters, unwrap
from qerl.layers.packed_linear import PackedLinear


class PortableLinear:
    """A `FusedLinear` of NVFP4 or MXFP4 layers.

    The layers' weights move into `Words`, of which each layer then reads its part, so there is only one copy.
    """

    @staticmethod
    def serves(
        capability: tuple[int, int] | None, weights_format: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> bool:
        """Whether this class supports layers of `shapes` [out, in] in a format, with activations of `dtype`.

        `capability` is the compute capability of their GPU, and None on a CPU.
        """
        return capability is not None and dtype == torch.bfloat16 and layout.fits(weights_format, shapes)

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        adapted = [unwrap(layer) for layer in layers]
        self._bases = [layer.base for layer in adapted if isinstance(layer.base, PackedLinear)]
        self._words = words_of(self._bases)
        self.out_features = self._words.rows
        self._dtype = dtype
        self._adapters = StackedAdapters(adapted, dtype)
        rows = [
            torch.full((part,), factor) for part, factor in zip(self._words.parts, self._words.factors, strict=True)
        ]
        factors = torch.cat(rows).to(self._words.data.device)
        biased = any(base.bias is not None for base in self._bases)
        self.operands = PortableOperands(
            words=self._words,
            factors=factors,
            bias=torch.zeros_like(factors) if biased else None,
            down=self._adapters.down,
            up=self._adapters.up,
        )
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """See `FusedLinear`."""
        self._adapters.sync()
        if (bias := self.operands.bias) is not None:
            for part, base in zip(bias.split(self._words.parts), self._bases, strict=True):
                if base.bias is not None:
                    part.copy_(base.bias)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`; x [m, in] and out [m, outs], with an activation [m, outs / 2], are contiguous."""
        from qerl.kernels.portable.launches import multiply

        width = self.out_features // 2 if activation else self.out_features
        if x.shape[1] != self._words.columns or out.shape != (len(x), width):
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit this layer ({activation=})")
        for tensor in (x, out):
            if tensor.dtype != self._dtype or not tensor.is_contiguous():
                raise ValueError(f"activations must be contiguous {self._dtype}")
        multiply(self.operands, x, out, residual, activation)


def words_of(bases: Sequence[PackedLinear]) -> Words:
    """The words that these layers already share, or new ones, which replace the layers' tensors."""
    words = bases[0].tiles
    if not isinstance(words, Words):
        words = layout.pack([base.packed for base in bases])
        for part, base in enumerate(bases):
            base.use_tiles(words, part)
    return words
