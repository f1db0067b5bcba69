"""Times of the packed products of a block on a GPU, beside cuBLAS in bfloat16, after a check against float64.

    python -m tests.gpu.time_products OUT.json --size 7B --rows 256,512 --rank 16

Of a mixture these are the products of attention, and of an expert that all tokens have.

Weights, adapters and inputs are random anew in each call. A CUDA graph runs through several copies of the weights, so
that none is in the L2 cache when it is read. To compare two versions of a kernel, run both on the same GPU, in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich import print
from torch import Tensor, nn

from qerl.bench.timing import gpu_state
from qerl.checkpoints.shapes import shape_of
from qerl.formats.codecs import nvfp4_global_scale, quantize
from qerl.formats.layouts import Tiles
from qerl.kernels.cuda.w4a16 import Mode, Operands, dense, multiply
from qerl.results.schema import Provenance
from qerl.results.speeds import ProductPoint, ProductsResult
from qerl.results.store import write

DEVICE = torch.device("cuda")
#: Relative error of a product with bfloat16 inputs, whose A x and outputs are rounded to bfloat16.
TOLERANCE = 6e-3
WARM_MILLISECONDS, SAMPLES, LAUNCHES = 60, 15, 16
#: Bytes of weights that a graph reads at least, twice what the L2 cache of an H200 holds.
COLD = 110_000_000


@dataclass(frozen=True)
class Shape:
    """Layers that read one input: rows of each, columns, what the epilogue does, and whether there are biases."""

    rows: tuple[int, ...]
    columns: int
    mode: Mode
    biased: bool = False

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(self.rows) // (2 if self.mode == Mode.GATED else 1)

    @property
    def copies(self) -> int:
        """Copies of the weights, which L2 can't hold together."""
        packed = sum(self.rows) * self.columns * 4.5 / 8
        return min(max(4, math.ceil(COLD / packed)), LAUNCHES)


def shapes(size: str) -> dict[str, Shape]:
    """The packed products of a block of a published size, of a hybrid those of a block with attention."""
    model = shape_of(size)
    (q, hidden), (k, _), (v, _), (o, inner), *others = model.linears
    attention = {
        "qkv": Shape((q, k, v), hidden, Mode.PLAIN, model.biased),
        "o": Shape((o,), inner, Mode.RESIDUAL),
    }
    if not others:
        return attention
    (gate, _), (up, _), (down, wide) = others
    return attention | {
        "gate_up": Shape((gate, up), hidden, Mode.GATED),
        "down": Shape((down,), wide, Mode.RESIDUAL),
    }


def random_operands(shape: Shape, rank: int) -> Operands:
    """NVFP4 weights with an adapter of `rank` in each layer, and biases where the model has them."""
    weights = [torch.randn(rows, shape.columns, device=DEVICE) * 0.02 for rows in shape.rows]
    scale = nvfp4_global_scale(*weights)
    packed = [quantize(weight, "nvfp4", global_scale=scale) for weight in weights]
    down = torch.randn(len(shape.rows), rank, shape.columns, device=DEVICE) * shape.columns**-0.5
    return Operands(
        Tiles.pack(packed, shape.mode == Mode.GATED),
        torch.randn(sum(shape.rows), device=DEVICE) if shape.biased else None,
        down.bfloat16(),
        [(torch.randn(rows, rank, device=DEVICE) * 0.5).bfloat16() for rows in shape.rows],
        torch.full((len(shape.rows),), 2.0, device=DEVICE),
    )


def exact(operands: Operands, x: Tensor, mode: Mode, before: Tensor) -> Tensor:
    """The product in float64, with A x in bfloat16 as the kernel has it; x [m, columns] -> [m, width]."""
    outputs = []
    for part, (up, scale) in enumerate(zip(operands.ups, operands.scales, strict=True)):
        y = x.double() @ dense(operands.tiles, part).double().T
        shrunk = (x.double() @ operands.down[part].double().T * scale).bfloat16()
        outputs.append(y + shrunk.double() @ up.double().T)
    if mode == Mode.GATED:
        return nn.functional.silu(outputs[0]) * outputs[1]
    y = torch.cat(outputs, dim=1)
    y = y if operands.bias is None else y + operands.bias.double()
    return y + before.double() if mode == Mode.RESIDUAL else y


def check(operands: Operands, shape: Shape, x: Tensor) -> float:
    """The relative error against float64. RuntimeError if it is too large, or if two launches differ in a bit."""
    before = torch.randn(len(x), shape.width, device=DEVICE).bfloat16()
    first, second = before.clone(), before.clone()
    for out in (first, second):
        multiply(operands, x, out, shape.mode)
    reference = exact(operands, x, shape.mode, before)
    error = ((first.double() - reference).norm() / reference.norm()).item()
    if not error < TOLERANCE or not torch.equal(first, second):
        raise RuntimeError(f"{len(x)} rows of {shape}: error {error}, equal launches: {torch.equal(first, second)}")
    return error


def microseconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Times of a call, by the GPU's clock, in a CUDA graph of LAUNCHES calls that is replayed."""
    launches = list(islice(cycle(calls), LAUNCHES))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Outputs may lie where the caller's stream still reads what it has freed.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()

        def replayed() -> float:
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            return start.elapsed_time(end)

        warmed = 0.0
        while warmed < WARM_MILLISECONDS:
            warmed += replayed()
        return [1e3 * replayed() / len(launches) for _ in range(SAMPLES)]


def point(name: str, shape: Shape, rows: int, rank: int) -> ProductPoint:
    """The errors and times of the packed product and of cuBLAS."""
    operands = [random_operands(shape, rank) for _ in range(shape.copies)]
    x = torch.randn(rows, shape.columns, device=DEVICE).bfloat16()
    error = check(operands[0], shape, x)
    out = torch.zeros(rows, shape.width, dtype=torch.bfloat16, device=DEVICE)
    weights = [torch.randn(sum(shape.rows), shape.columns, device=DEVICE).bfloat16() for _ in range(2)]
    whole = torch.empty(rows, sum(shape.rows), dtype=torch.bfloat16, device=DEVICE)
    return ProductPoint(
        layers=name,
        rows=rows,
        rank=rank,
        error=error,
        microseconds=microseconds([partial(multiply, each, x, out, shape.mode) for each in operands]),
        cublas_microseconds=microseconds([partial(torch.matmul, x, each.T, out=whole) for each in weights]),
    )


def main(
    out: Path,
    rows: Annotated[str, typer.Option(help="Rows of x, with commas between them.")] = "256,384,512,1024",
    rank: Annotated[int, typer.Option(help="Rank of the adapters: 0 or a multiple of 16.")] = 16,
    size: Annotated[str, typer.Option(help="A size of Qwen2.5, or a shape such as qwen3-30b-a3b.")] = "7B",
) -> None:
    """Time the products of a block and write the samples with their stamp to OUT."""
    measured = []
    for count in map(int, rows.split(",")):
        for name, shape in shapes(size).items():
            measured.append(point(name, shape, count, rank))
            packed, cublas = median(measured[-1].microseconds), median(measured[-1].cublas_microseconds)
            print(f"{name:8} {count:5} rows: {packed:8.2f} us, cuBLAS {cublas:8.2f} us")
    result = ProductsResult(
        bench="products",
        size=size,
        weights="nvfp4",
        points=measured,
        gpu=gpu_state(),
        provenance=Provenance.of_now(),
    )
    write(out, result)


if __name__ == "__main__":
    typer.run(main)
