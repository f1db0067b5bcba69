"""Linear layers with 4-bit weights and LoRA on a GPU: one kernel, compiled for each of a few numbers of rows."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from qerl.kernels import tiles as layout
from qerl.kernels.adapters import unwrap
from qerl.kernels.jit import address, defines, launch, load, params_struct, tensor_map
from qerl.kernels.tiles import Tiles
from qerl.quant.linear import PackedLinear

_SOURCES = (
    "w4a16_instructions.cu",
    "w4a16_division.cu",
    "w4a16_ring.cu",
    "w4a16_lora.cu",
    "w4a16_end.cu",
    "w4a16.cu",
)
_PLAIN, _RESIDUAL, _SILU = range(3)
_POINTER = ctypes.c_void_p


@dataclass(frozen=True)
class _Variant:
    """How the kernel is compiled for up to 8 * nt rows.

    `stages` of the ring bound what is in flight; `registers` of a thread, with few rows; `alone`: not two thread blocks
    of a launch on a multiprocessor, for which memory is asked that isn't needed.
    """

    nt: int
    stages: int
    registers: int = 0
    alone: bool = False

    @property
    def columns(self) -> int:
        """Of W and x in a stage."""
        return 256 if self.nt <= 8 else 128

    @property
    def few(self) -> bool:
        """Rows: A x isn't multiplied in the ring's stages, but by warps of its own."""
        return self.nt <= 4

    @property
    def shrinkers(self) -> int:
        """Warps for A x or its sums; one where two thread blocks share a multiprocessor's registers."""
        return 1 if self.nt <= 2 else 3

    def shared_bytes(self, width: int) -> int:
        """Of the ring, 1,024 for its first stage to be aligned, with the fewest rows sums that warps exchange.

        With few rows also A x, which has `width` columns.
        """
        stage = layout.BLOCK_BYTES * self.columns // layout.BLOCK_COLUMNS + 8 * self.nt * 2 * self.columns
        exchanged = 4096 * self.nt if self.nt <= 2 else 0
        shrunk = 16 * self.nt * width if self.few else 0
        return max(self.stages * stage + 1024 + exchanged + shrunk, _ALONE_BYTES if self.alone else 0)

    def workers(self, blocks: int, most: int) -> int:
        """Thread blocks that share `blocks` of W.

        With many rows stages of A take the place of some of W's: everyone is to have one of W's yet.
        """
        return min(most, blocks if self.few else max(blocks // 2, 1))

    def threads(self, rank: int) -> int:
        """Warps that multiply, one that copies, those for A x or its sums; an idle one, see `registers_of`."""
        return 32 * (8 + 1 + self.shrinkers + self._idle(rank))

    def registers_of(self, rank: int) -> int:
        """A thread's. Without adapters few do, too few to keep two thread blocks apart: an idle warp does that."""
        return 96 if self._idle(rank) else self.registers

    def _idle(self, rank: int) -> bool:
        return self.few and not self.alone and not rank


#: Shared memory with which two thread blocks of a launch don't fit onto a multiprocessor. Otherwise, where a norm's
#: block takes the place of one, two end up on another multiprocessor, and all wait for it: 28 % of a step at one
#: sequence.
_ALONE_BYTES = 116000
#: Stages of a thread block from which on a layer is large.
_LARGE = 6
#: By rows, for small and for large layers; the last serves any number, in row blocks of its own height. Up to 16 rows a
#: thread block of each kind fit onto a multiprocessor together, so that the next layer's weights are on their way
#: while this one ends, but not two of a kind: memory keeps small layers' apart, registers large ones'.
_VARIANTS = (
    (_Variant(nt=1, stages=4, registers=96, alone=True), _Variant(nt=1, stages=4, registers=104)),
    (_Variant(nt=2, stages=4, registers=96, alone=True), _Variant(nt=2, stages=3, registers=104)),
    (_Variant(nt=4, stages=3, registers=168, alone=True),) * 2,
    (_Variant(nt=8, stages=4), _Variant(nt=8, stages=4)),
    (_Variant(nt=16, stages=5), _Variant(nt=16, stages=5)),
    (_Variant(nt=32, stages=3), _Variant(nt=32, stages=3)),
)
#: What memory for sums holds until they are there, in the kernel's source too.
_EMPTY = -1
#: Into how many spans of columns A x is divided with few rows, by how many rows A has.
_SPANS = (8, 40)
#: Rows of A in a stage, with many rows.
_SHRINK_ROWS = 32
_MOST_ROWS = 8 * _VARIANTS[-1][0].nt
#: Thread blocks that share a row block of x at least: more row blocks than leave so many take launches of their own.
_LEAST_WORKERS = 4

_Params = params_struct(
    x_map=ctypes.c_uint8 * 128,
    a_map=ctypes.c_uint8 * 128,
    weights=_POINTER,
    x=_POINTER,
    out=_POINTER,
    bias=_POINTER,
    lora_a=_POINTER,
    lora_b=_POINTER * 3,
    shrunk=_POINTER,
    sums=_POINTER,
    shrink_sums=_POINTER,
    counters=_POINTER,
    factor=ctypes.c_float * 3,
    lora_factor=ctypes.c_float * 3,
    part_end=ctypes.c_int * 3,
    **dict.fromkeys(
        (
            "m",
            "rows",
            "columns",
            "parts",
            "mode",
            "scale_multiplier",
            "scale_offset",
            "row_blocks",
            "senders",
            "span",
        ),
        ctypes.c_int,
    ),
)


class _Workspace:
    """What the kernels of a GPU leave for each other within a launch; launches of a stream follow one another."""

    def __init__(self, device: torch.device) -> None:
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        #: Captured graphs hold the addresses of buffers that were too small later: none is ever freed.
        self._buffers: dict[str, list[Tensor]] = defaultdict(list)

    def get(self, name: str, count: int, fill: int = 0) -> Tensor:
        """At least `count` words of 32 bits, all `fill` at first."""
        buffers = self._buffers[name]
        if not buffers or buffers[-1].numel() < count:
            buffers.append(torch.full((max(count, 1),), fill, dtype=torch.int32, device=self._device))
        return buffers[-1]


@cache
def _workspace(device: torch.device) -> _Workspace:
    return _Workspace(device)


def serves(layers: Sequence[nn.Module], dtype: torch.dtype) -> bool:
    """Whether `W4Linear` can take these layers: a GPU with the instructions, format, shapes and dtype."""
    bases = [base for base in (unwrap(layer).base for layer in layers) if isinstance(base, PackedLinear)]
    if len(bases) < len(layers) or dtype != torch.bfloat16 or len({base.weights_format for base in bases}) > 1:
        return False
    device = bases[0].qweight.device
    shapes = [(base.out_features, base.in_features) for base in bases]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and layout.fits(bases[0].weights_format, shapes)


class W4Linear:
    """`FusedLinear` over NVFP4 or MXFP4 layers; bfloat16 activations.

    The layers' weights move into `Tiles`, of which the layers read their own part from then on: there is one copy.
    """

    def __init__(self, layers: Sequence[nn.Module], interleaved: bool = False) -> None:
        """`interleaved`: of gate and up, for `silu`."""
        adapted = [unwrap(layer) for layer in layers]
        bases = [layer.base for layer in adapted if isinstance(layer.base, PackedLinear)]
        self.tiles = _tiles_of(bases, interleaved)
        self.out_features = self.tiles.rows
        device = self.tiles.data.device
        self._workspace = _workspace(device)
        self._loras = [layer.lora for layer in adapted]
        self._bias = _bias(bases, interleaved)
        ranks = [len(lora.down) for lora in self._loras if lora is not None]
        self.rank = -(-max(ranks) // 16) * 16 if ranks else 0
        shape = (len(layers), self.rank, self.tiles.columns)
        self._a = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._b = [torch.zeros(rows, self.rank, dtype=torch.bfloat16, device=device) for rows in self.tiles.parts]
        self.sync()

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """What `sync` copies, (to, from); ranks are padded with zeros to a multiple of 16."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for part, lora in enumerate(self._loras):
            if lora is not None:
                rank = len(lora.down)
                pairs += [(self._a[part, :rank], lora.down), (self._b[part][:, :rank], lora.up)]
        return pairs

    @torch.no_grad()
    def sync(self) -> None:
        """Take over the adapters as they are now, in bfloat16."""
        for to, from_ in self.copies():
            to.copy_(from_)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False, silu: bool = False) -> None:
        """x [m, in], out [m, outs] (with `silu` [m, outs / 2]): bfloat16, contiguous."""
        m, columns = x.shape
        width = self.tiles.rows // 2 if silu else self.tiles.rows
        if silu != self.tiles.interleaved or columns != self.tiles.columns or out.shape != (m, width):
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} don't fit this layer (silu={silu})")
        for tensor in (x, out):
            if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
                raise ValueError("activations must be contiguous bfloat16")
        most = self._workspace.processors // _LEAST_WORKERS * _MOST_ROWS
        for rows, outs in zip(x.split(most), out.split(most), strict=True):
            self._launch(rows, outs, _SILU if silu else _RESIDUAL if residual else _PLAIN)

    def _launch(self, x: Tensor, out: Tensor, mode: int) -> None:
        m, columns = x.shape
        small, large = next((pair for pair in _VARIANTS if m <= 8 * pair[0].nt), _VARIANTS[-1])
        blocks = -(-self.tiles.rows // layout.BLOCK_ROWS) * (columns // small.columns)
        variant = large if blocks >= _LARGE * self._workspace.processors else small
        row_blocks = -(-m // (8 * variant.nt))
        workers = variant.workers(blocks, self._workspace.processors // row_blocks)
        params = self._params(x, out, mode, variant, row_blocks, workers)
        registers = variant.registers_of(self.rank)
        options = defines(NT=variant.nt, STAGES=variant.stages, REGISTERS=registers, RANK=self.rank)
        shared_bytes = variant.shared_bytes(len(self.tiles.parts) * self.rank)
        function = load(_SOURCES, "w4a16", options, shared_bytes, x.get_device())
        launch(function, workers * row_blocks, variant.threads(self.rank), shared_bytes, params)

    def _division(self, variant: _Variant, workers: int) -> tuple[int, int]:
        """Of A x: how many thread blocks send sums of 16 rows of A at most, and with few rows the columns of each."""
        width = len(self.tiles.parts) * self.rank
        if variant.few:
            blocks = self.tiles.columns // layout.BLOCK_COLUMNS
            warps = variant.shrinkers * self._workspace.processors
            most = min(max(warps // max(width // 16, 1), _SPANS[0]), _SPANS[1])
            span = -(-blocks // most)
            return -(-blocks // span), span
        blocks = self.tiles.columns // variant.columns
        units = -(-width // _SHRINK_ROWS) * blocks
        least = max(1, units // workers)  # units of a thread block
        return 2 * min(blocks, blocks // least + 2), 0

    def _params(
        self, x: Tensor, out: Tensor, mode: int, variant: _Variant, row_blocks: int, workers: int
    ) -> ctypes.Structure:
        tiles, parts, get = self.tiles, len(self.tiles.parts), self._workspace.get
        width = parts * self.rank
        senders, span = self._division(variant, workers)
        multiplier, offset = tiles.scale_decode
        x_map = tensor_map(x, 8 * variant.nt, variant.columns)
        ends = [sum(tiles.parts[: i + 1]) for i in range(parts)]
        return _Params(
            x_map=x_map,
            a_map=tensor_map(self._a.flatten(0, 1), _SHRINK_ROWS, variant.columns)
            if self.rank and not variant.few
            else x_map,
            weights=address(tiles.data),
            x=address(x),
            out=address(out),
            bias=address(self._bias),
            lora_a=address(self._a),
            lora_b=(_POINTER * 3)(*(address(b) for b in self._b)),
            shrunk=address(get("shrunk", row_blocks * 4 * variant.nt * width)),
            sums=address(get("sums", 2 * self._workspace.processors * layout.BLOCK_ROWS * _MOST_ROWS, _EMPTY)),
            shrink_sums=address(get("shrink_sums", row_blocks * width * senders * variant.nt * 8, _EMPTY)),
            counters=address(get("counters", 2 * row_blocks)),
            factor=(ctypes.c_float * 3)(*tiles.factors),
            lora_factor=(ctypes.c_float * 3)(*(lora.scale if lora else 0.0 for lora in self._loras)),
            part_end=(ctypes.c_int * 3)(*(ends + [tiles.rows] * 3)[:3]),
            m=x.shape[0],
            rows=tiles.rows,
            columns=tiles.columns,
            parts=parts,
            mode=mode,
            scale_multiplier=multiplier,
            scale_offset=offset - (1 << 32) if offset >= 1 << 31 else offset,
            row_blocks=row_blocks,
            senders=senders,
            span=span,
        )


def _tiles_of(bases: Sequence[PackedLinear], interleaved: bool) -> Tiles:
    """The tiles that these layers share already, or new ones, which replace the layers' own tensors."""
    if bases[0].tiles is None:
        tiles = layout.pack([base.packed for base in bases], interleaved)
        for part, base in enumerate(bases):
            base.use_tiles(tiles, part)
    assert bases[0].tiles is not None
    return bases[0].tiles


def _bias(bases: Sequence[PackedLinear], interleaved: bool) -> Tensor | None:
    """Float32, in the order of the tiles' rows."""
    biases = [base.bias.data.float() for base in bases if base.bias is not None]
    if not biases:
        return None
    if interleaved or len(biases) < len(bases):
        raise ValueError("layers that are fused need a bias each or none; gate and up have none in known models")
    return torch.cat(biases)
