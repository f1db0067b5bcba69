"""Linear layers with 4-bit weights and LoRA that run as one product on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qerl.formats import tiles as layout
from qerl.formats.codecs import split_rows
from qerl.formats.tiles import Tiles
from qerl.kernels.activations import Activation
from qerl.kernels.w4a16.product import Mode, Operands, multiply
from qerl.layers.adapters import Lora, unwrap
from qerl.layers.packed_linear import PackedLinear


def is_hopper(capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability (None: the CPU) has the instructions of `W4Linear`."""
    return capability is not None and capability[0] == 9


def serves(weights_format: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether `W4Linear` supports layers of `shapes` [out, in] in a format, with activations of `dtype`."""
    return dtype == torch.bfloat16 and layout.fits(weights_format, shapes)


class W4Linear:
    """A `FusedLinear` of NVFP4 or MXFP4 layers with bfloat16 activations.

    The layers' weights move into `Tiles`, of which each layer then reads its part, so there is only one copy.
    """

    def __init__(self, layers: Sequence[nn.Module], interleaved: bool = False) -> None:
        """With `interleaved`, the layers are gate and up, or one with both as its halves, called with an activation."""
        adapted = [unwrap(layer) for layer in layers]
        bases = [layer.base for layer in adapted if isinstance(layer.base, PackedLinear)]
        self.tiles = _tiles_of(bases, interleaved)
        self.out_features = self.tiles.rows
        device = self.tiles.data.device
        self._loras = [layer.lora for layer in adapted]
        if len(self.tiles.parts) > len(layers):
            self._loras = [half for lora in self._loras for half in _halves_of(lora)]
        ranks = [len(lora.down) for lora in self._loras if lora is not None]
        self.rank = -(-max(ranks) // 16) * 16 if ranks else 0
        shape = (len(self._loras), self.rank, self.tiles.columns)
        self.operands = Operands(
            tiles=self.tiles,
            bias=_bias(bases, interleaved),
            lora_a=torch.zeros(shape, dtype=torch.bfloat16, device=device),
            lora_b=[torch.zeros(rows, self.rank, dtype=torch.bfloat16, device=device) for rows in self.tiles.parts],
            lora_scales=tuple(lora.scale if lora else 0.0 for lora in self._loras),
        )
        self.sync()

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The copies of `sync` as (to, from); ranks are padded with zeros to a multiple of 16."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for lora, a, b in zip(self._loras, self.operands.lora_a, self.operands.lora_b, strict=True):
            if lora is not None:
                rank = len(lora.down)
                pairs += [(a[:rank], lora.down), (b[:, :rank], lora.up)]
        return pairs

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the present adapters, in bfloat16."""
        for to, from_ in self.copies():
            to.copy_(from_)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, activation: Activation | None = None) -> None:
        """See `FusedLinear`; x [m, in] and out [m, outs], with an activation [m, outs / 2], are contiguous bfloat16."""
        m, columns = x.shape
        width = self.tiles.rows // 2 if activation else self.tiles.rows
        if bool(activation) != self.tiles.interleaved or columns != self.tiles.columns or out.shape != (m, width):
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit this layer ({activation=})")
        for tensor in (x, out):
            if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
                raise ValueError("activations must be contiguous bfloat16")
        if activation:
            multiply(self.operands, x, out, Mode.GATED, activation)
        else:
            multiply(self.operands, x, out, Mode.RESIDUAL if residual else Mode.PLAIN)


def _tiles_of(bases: Sequence[PackedLinear], interleaved: bool) -> Tiles:
    """The tiles that these layers already share, or new ones, which replace the layers' packed tensors."""
    tiles = bases[0].tiles
    if not isinstance(tiles, Tiles) and interleaved and len(bases) == 1:
        tiles = layout.pack(split_rows(bases[0].packed, bases[0].out_features // 2), interleaved)
        bases[0].use_tiles(tiles, 0, 1)
    elif not isinstance(tiles, Tiles):
        tiles = layout.pack([base.packed for base in bases], interleaved)
        for part, base in enumerate(bases):
            base.use_tiles(tiles, part)
    return tiles


def _halves_of(lora: Lora | None) -> list[Lora | None]:
    """The adapters of a fused layer's halves, which share the matrix A."""
    return [None, None] if lora is None else [Lora(lora.down, up, lora.scale) for up in lora.up.detach().chunk(2)]


def _bias(bases: Sequence[PackedLinear], interleaved: bool) -> Tensor | None:
    """The biases in float32, in the order of the tiles' rows; None without biases."""
    biases = [base.bias.data.float() for base in bases if base.bias is not None]
    if not biases:
        return None
    if interleaved or len(biases) < len(bases):
        raise ValueError("fused layers must all have a bias or none, and gate and up none")
    return torch.cat(biases)
