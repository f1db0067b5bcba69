"""Times of the packed products of a block on a GPU, beside cuBLAS in bfloat16, after a check against float64.

    python -m tests.gpu.time_products OUT.json --size 7B --rows 256,512 --rank 16 --humming

Of a mixture these are the products of attention, and of an expert that all tokens have. With `--humming` the product
of `humming` is timed on the same weights, as vLLM 0.33 runs it on Hopper. Like cuBLAS it has no adapter, activation or
residual, which the packed product includes: vLLM has other kernels for them.

Weights, adapters and inputs are random anew in each call. A CUDA graph runs through several copies of the weights, so
that none is in the L2 cache when it is read. To compare two versions of a kernel, run both on the same GPU, in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import typer
from pydantic import Field
from rich import print
from torch import Tensor

from qerl.bench.timing import gpu_state
from qerl.checkpoints.shapes import shape_of
from qerl.formats.codecs import joined
from qerl.host.provenance import installed_version
from qerl.models.linear import PackedLinear, W4Linear
from qerl.results.schema import Provenance, Stored, write
from qerl.results.speeds import GpuState
from qerl.settings.models import WeightFormat
from tests.gpu.test_products import TOLERANCE, exact, random_layers, weights_of

DEVICE = torch.device("cuda")
WARM_MILLISECONDS, SAMPLES, LAUNCHES = 60, 15, 16
#: Bytes of weights that a graph reads at least, twice what the L2 cache of an H200 holds.
COLD = 110_000_000
#: The version of humming-kernels whose functions are called here, and its name for the layout of packed NVFP4 weights.
HUMMING_VERSION = "0.1.19"
HUMMING_FORMAT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "type": "float",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 16,
}


class ProductPoint(Stored):
    """Microseconds of a launch of the packed product and of cuBLAS in bfloat16, and the error relative to float64.

    The times of humming's product are empty where it wasn't measured.
    """

    layers: str
    rows: int
    rank: int
    error: float
    microseconds: list[float]
    cublas_microseconds: list[float]
    humming_microseconds: list[float] = Field([])


class ProductsResult(Stored):
    """kernels/products-*.json: the packed products of a block."""

    bench: Literal["products"]
    size: str
    weights: WeightFormat
    points: list[ProductPoint]
    gpu: GpuState | None
    provenance: Provenance


def shapes(size: str) -> dict[str, list[tuple[int, int]]]:
    """The packed products of a block of a published size, of a hybrid those of a block with attention."""
    q, k, v, o, *others = shape_of(size).linears
    attention = {"qkv": [q, k, v], "o": [o]}
    if not others:
        return attention
    gate, up, down = others
    return attention | {"gate_up": [gate, up], "down": [down]}


def relative_error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def check(product: W4Linear, options: dict[str, object], x: Tensor, expected: Tensor, before: Tensor) -> float:
    """The relative error against float64. RuntimeError if it is too large, or if two launches differ in a bit."""
    first, second = before.clone(), before.clone()
    for out in (first, second):
        product(x, out, **options)  # type: ignore[arg-type]
    error = relative_error(first, expected)
    if not error < TOLERANCE or not torch.equal(first, second):
        raise RuntimeError(f"{len(x)} rows: error {error}, equal launches: {torch.equal(first, second)}")
    return error


def humming_product(layers: list[PackedLinear], x: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """A call of humming's product of the layers together, which puts x W^T + b into `out`.

    Padding, options and the choice of the kernel are those of vLLM 0.33. Its table of kernels for all numbers of rows
    takes minutes to compile, so only the one for these rows is.
    """
    from humming.forward import humming_forward
    from humming.schema import BaseWeightSchema, HummingInputSchema
    from humming.transform import prepare_and_transform_humming_tensors
    from humming.tune import get_heuristics_config

    outputs, columns, dtype = out.shape[1], x.shape[1], torch.bfloat16
    tensors = dict(joined([layer.packed for layer in layers]).tensors)
    if layers[0].bias is not None:
        tensors["bias"] = torch.cat([layer.bias for layer in layers]).to(dtype)
    schema, tensors = BaseWeightSchema.from_config(HUMMING_FORMAT).convert_humming(
        tensors, shape_n_stacks=[outputs], shape_k_stacks=[columns], param_dtype=dtype
    )
    config, tensors = prepare_and_transform_humming_tensors(
        tensors,
        shape_n=outputs,
        shape_k=columns,
        weight_schema=schema,
        input_schema=HummingInputSchema(),
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        has_bias="bias" in tensors,
        torch_dtype=dtype,
        device=x.device,
    )
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return partial(
        humming_forward,
        config,
        inputs=x,
        outputs=out,
        locks=torch.zeros(8 * processors, dtype=torch.int32, device=x.device),
        compute_config={"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "dense"},
        tuning_config=get_heuristics_config(config, len(x), device=x.device),
        **tensors,
    )


def check_humming(call: Callable[[], Tensor], out: Tensor, expected: Tensor) -> None:
    """RuntimeError if `call` puts too large an error into `out`. The first call compiles."""
    call()
    error = relative_error(out, expected)
    # A code times a block's scale is exact in bfloat16. But blocks that share an output add their parts in bfloat16, in
    # any order: the at most 11 parts here (264 blocks for 28 tiles) have 2.6 times the error of one rounding, 4.3e-3.
    # So the packed product's tolerance holds for it, too, and two launches may differ.
    if not error < TOLERANCE:
        raise RuntimeError(f"humming, {len(out)} rows: error {error}")


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


@torch.no_grad()
def point(kind: str, layers: list[tuple[int, int]], biased: bool, rows: int, rank: int, humming: bool) -> ProductPoint:
    """The errors and times of the packed product, of cuBLAS and of humming's product."""
    outputs, columns = sum(rows_of_w for rows_of_w, _ in layers), layers[0][1]
    copies = min(max(4, math.ceil(COLD / (outputs * columns * 4.5 / 8))), LAUNCHES)  # which L2 can't hold together
    gated, residual = kind == "gate_up", kind in ("o", "down")
    made = [random_layers(layers, "nvfp4", biased and kind == "qkv", rank) for _ in range(copies)]
    first = weights_of(made[0])
    x = torch.randn(rows, columns, device=DEVICE).bfloat16()
    whole = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
    rivals = []
    if humming:
        bases = [[getattr(layer, "base_layer", layer) for layer in parts] for parts in made]
        rivals = [humming_product(parts, x, whole) for parts in bases]
        check_humming(rivals[0], whole, exact(bases[0], first, x, kind="without activation"))
    products = [W4Linear(parts, interleaved=gated) for parts in made]
    out = torch.randn(rows, outputs // (1 + gated), device=DEVICE).bfloat16()
    options = {"residual": residual, "activation": "silu" if gated else None}
    expected = exact(made[0], first, x, kind, out if residual else None)
    weights = [torch.randn(outputs, columns, device=DEVICE).bfloat16() for _ in range(2)]
    return ProductPoint(
        layers=kind,
        rows=rows,
        rank=rank,
        error=check(products[0], options, x, expected, out),
        microseconds=microseconds([partial(product, x, out, **options) for product in products]),
        cublas_microseconds=microseconds([partial(torch.matmul, x, each.T, out=whole) for each in weights]),
        humming_microseconds=microseconds(rivals) if humming else [],
    )


def main(
    out: Path,
    rows: Annotated[str, typer.Option(help="Rows of x, with commas between them.")] = "256,384,512,1024",
    rank: Annotated[int, typer.Option(help="Rank of the adapters: 0 or a multiple of 16.")] = 16,
    size: Annotated[str, typer.Option(help="A size of Qwen2.5, or a shape such as qwen3-30b-a3b.")] = "7B",
    humming: Annotated[bool, typer.Option("--humming", help="Time the product of humming-kernels as well.")] = False,
) -> None:
    """Time the products of a block and write the samples with their stamp to OUT."""
    if humming and installed_version("humming-kernels") != HUMMING_VERSION:
        raise typer.BadParameter(f"--humming needs `pip install humming-kernels=={HUMMING_VERSION}`")
    measured = []
    for count in map(int, rows.split(",")):
        for name, layers in shapes(size).items():
            measured.append(point(name, layers, shape_of(size).biased, count, rank, humming))
            packed, cublas = median(measured[-1].microseconds), median(measured[-1].cublas_microseconds)
            rival = f", humming {median(measured[-1].humming_microseconds):8.2f} us" if humming else ""
            print(f"{name:8} {count:5} rows: {packed:8.2f} us, cuBLAS {cublas:8.2f} us{rival}")
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
