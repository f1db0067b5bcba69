"""Times of the portable products on a GPU, for a list of tiles, and of decode steps with them.

    python -m tests.gpu.time_portable compile --share 0/12     # one of 12 processes that fill Triton's cache
    python -m tests.gpu.time_portable products OUT.jsonl       # 7B's products for every tile, beside the Hopper kernels
    python -m tests.gpu.time_portable decode OUT.jsonl         # tokens/s of the engine with `kernels: portable`

Every line of OUT is a JSON object. Each product is compared with float64 and with itself before it is timed.
`tests.gpu.time_products` says how times are taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from qerl.bench.timing import timed
from qerl.formats import tiles as tile_layout
from qerl.formats import words as word_layout
from qerl.formats.codecs import nvfp4_global_scale, quantize
from qerl.kernels.cuda import w4a16 as hopper
from qerl.kernels.cuda.w4a16 import Mode
from qerl.kernels.portable import PortableOperands, Tile, tile_for
from qerl.kernels.triton import linear
from qerl.models.random import random_policy
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings
from tests.gpu.time_products import DEVICE, SHAPES, TOLERANCE, Shape, exact, microseconds

RANK = 16
#: Tiles to time by rows of x.
FEW = [Tile(64, 8, 4, 7, programs=5), Tile(64, 8, 4, 6, programs=5), Tile(32, 8, 2, 5, programs=10)]
CANDIDATES: dict[int, list[Tile]] = {
    1: FEW,
    8: FEW,
    16: [Tile(64, 16, 2, stages, programs=programs) for stages, programs in ((6, 4), (7, 4), (5, 5))],
    32: [Tile(64, 32, 2, 4, programs=4), *(Tile(64, 32, 2, stages, programs=3) for stages in (5, 6))],
    64: [
        *(Tile(64, 64, 4, stages, programs=programs) for stages, programs in ((3, 2), (3, 3), (4, 2))),
        Tile(64, 64, 2, 3, programs=3),
        Tile(128, 64, 8, 4, programs=1),
    ],
    128: [
        *(Tile(64, 128, 4, stages, programs=programs) for stages, programs in ((3, 2), (4, 1), (2, 2))),
        *(Tile(128, 128, 8, stages, programs=1) for stages in (3, 4)),
    ],
    256: [*(Tile(128, 128, 8, stages, programs=1) for stages in (3, 4)), Tile(64, 128, 4, 3, programs=2)],
    512: [Tile(128, 128, 8, 4, programs=1), Tile(64, 128, 4, 3, programs=2)],
    2048: [Tile(128, 128, 8, 3, programs=1), Tile(64, 128, 4, 3, programs=2)],
}

app = typer.Typer()


@dataclass(frozen=True)
class Both:
    """The same weights for the portable products and for those of Hopper."""

    portable: PortableOperands
    hopper: hopper.Operands


def random_operands(shape: Shape) -> Both:
    """NVFP4 weights with an adapter of `RANK` in each layer, and a bias where Qwen2 has one."""
    weights = [torch.randn(rows, shape.columns, device=DEVICE) * 0.02 for rows in shape.rows]
    scale = nvfp4_global_scale(*weights)
    packed = [quantize(weight, "nvfp4", global_scale=scale) for weight in weights]
    bias = torch.randn(sum(shape.rows), device=DEVICE) if shape.mode == Mode.PLAIN else None
    down = (torch.randn(len(packed), RANK, shape.columns, device=DEVICE) * shape.columns**-0.5).bfloat16()
    ups = [(torch.randn(rows, RANK, device=DEVICE) * 0.5).bfloat16() for rows in shape.rows]
    words = word_layout.pack(packed)
    factors = torch.cat([torch.full((n,), f, device=DEVICE) for n, f in zip(words.parts, words.factors, strict=True)])
    portable = PortableOperands(words, factors, bias, down.flatten(0, 1), torch.block_diag(*(2 * up for up in ups)))
    tiles = tile_layout.pack(packed, shape.mode == Mode.GATED)
    return Both(portable, hopper.Operands(tiles, bias, down, ups, (2.0,) * len(ups)))


def multiply(operands: PortableOperands, x: Tensor, out: Tensor, mode: Mode, tile: Tile | None) -> None:
    linear.multiply(operands, x, out, mode == Mode.RESIDUAL, "silu" if mode == Mode.GATED else None, tile)


def error(operands: PortableOperands, x: Tensor, mode: Mode, tile: Tile, before: Tensor, reference: Tensor) -> float:
    """The relative error against float64; RuntimeError if it is too large, or if two launches differ in a bit."""
    first, second = (before.clone() if mode == Mode.RESIDUAL else torch.full_like(before, torch.nan) for _ in range(2))
    for out in (first, second):
        multiply(operands, x, out, mode, tile)
    found = ((first.double() - reference).norm() / reference.norm()).item()
    if not found < TOLERANCE or not torch.equal(first, second):
        raise RuntimeError(f"error {found}, equal launches: {torch.equal(first, second)}")
    return found


def points(name: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """The error and time of each tile, and the time of the Hopper kernels."""
    copies = [random_operands(shape) for _ in range(shape.copies)]
    for rows, tiles in CANDIDATES.items():
        x = torch.randn(rows, shape.columns, device=DEVICE).bfloat16()
        before = torch.randn(rows, shape.width, device=DEVICE).bfloat16()
        reference = exact(copies[0].hopper, x, shape.mode, before)
        out = torch.zeros_like(before)
        label = {"layers": name, "rows": rows}
        calls = [partial(hopper.multiply, both.hopper, x, out, shape.mode) for both in copies]
        yield {**label, "tile": "hopper", "us": round(median(microseconds(calls)), 2)}
        for tile in tiles:
            point = {**label, "tile": astuple(tile), "chosen": tile == tile_for(rows)}
            try:
                point["error"] = round(error(copies[0].portable, x, shape.mode, tile, before, reference), 5)
                calls = [partial(multiply, both.portable, x, out, shape.mode, tile) for both in copies]
                point["us"] = round(median(microseconds(calls)), 2)
            except Exception as failed:  # noqa: BLE001  (a tile that doesn't fit must not end the others)
                point["failed"] = f"{type(failed).__name__}: {failed}"[:200]
            yield point


@app.command("compile")
def compile_share(share: Annotated[str, typer.Option(help="i/n: the i-th of n parts of the list.")]) -> None:
    """Compile a share of all tiles into Triton's cache."""
    number, count = map(int, share.split("/"))
    jobs = [(shape, rows, tile) for rows, tiles in CANDIDATES.items() for tile in tiles for shape in SHAPES.values()]
    made: dict[int, PortableOperands] = {}
    for shape, rows, tile in jobs[number::count]:
        operands = made.setdefault(id(shape), random_operands(shape).portable)
        x = torch.randn(rows, shape.columns, device=DEVICE).bfloat16()
        out = torch.zeros(rows, shape.width, device=DEVICE).bfloat16()
        try:
            multiply(operands, x, out, shape.mode, tile)
        except Exception as failed:  # noqa: BLE001  (`products` reports it)
            print(f"{tile}: {failed}"[:200])
    torch.cuda.synchronize()


@app.command()
def products(out: Path) -> None:
    """Check and time every tile."""
    with out.open("a") as file:
        for name, shape in SHAPES.items():
            for point in points(name, shape):
                print(json.dumps(point), file=file, flush=True)


@app.command()
def decode(
    out: Path,
    sequences: Annotated[str, typer.Option(help="Numbers of sequences, with commas.")] = "1,8,32,64,128",
    tokens: int = 256,
    kernels: str = "portable",
) -> None:
    """Tokens/s of 7B NVFP4 with LoRA r16, prompts of 128 tokens, as `qerl.bench` takes them."""
    policy = random_policy(Base("7B", "nvfp4"), RANK, DEVICE)
    settings = NativeSettings.model_validate({"kv_cache_gib": 2.0**20, "kernels": kernels})
    for count in map(int, sequences.split(",")):
        sampler = EngineSampler(policy, settings, count)

        def draw(prompts: list[list[int]], most: int, seed: int, sampler: EngineSampler = sampler) -> int:
            groups = sampler.generate(prompts, SamplingParams(max_tokens=most, seed=seed, ignore_eos=True))
            return sum(len(completion.token_ids) for group in groups for completion in group)

        timing = timed(draw, count, 128, tokens)
        point = {"sequences": count, "tokens_per_s": round(median(timing.samples), 1), "served": sampler.served}
        point["prompt_s"] = round(median(timing.prompt_samples), 4)
        with out.open("a") as file:
            print(json.dumps(point), file=file, flush=True)
        sampler.release()


if __name__ == "__main__":
    app()
