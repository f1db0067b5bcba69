"""Codecs, kernel layouts and graders compared with stored vectors, which must agree on every machine.

The vectors (vectors.safetensors, answers.jsonl in the folder `gates.vectors`) don't come from this code. Packed weights
are from compressed-tensors and bitsandbytes, products from float64 (`python -m tests.vectors`), and verdicts from a
person.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qerl.data.grading import is_correct, well_formed
from qerl.formats.codecs import PACKED_FORMATS, Packed, dequantize, from_checkpoint, quantize
from qerl.formats.layouts import Tiles
from qerl.jobs import NumericsJob
from qerl.models.linear import PackedLinear
from qerl.results.schema import NumericsResult, Provenance
from qerl.results.store import write

VECTORS = "vectors.safetensors"
ANSWERS = "answers.jsonl"


# Gates start from a committed policy: pre-training takes longer than all gates together, and its variation would be
# in every comparison.
def measure_numerics(job: NumericsJob) -> None:
    """Compare codecs and graders with the vectors; the result has numbers by name."""
    values = {**dict(_formats(load_file(job.vectors / VECTORS))), "graders": wrong_verdicts(job.vectors / ANSWERS)}
    write(job.out, NumericsResult(values=values, provenance=Provenance.of_now()))


def _formats(vectors: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """For each format of the vectors, the number of bytes that differ and the error of a layer's product.

    `vectors` has weight [out, in] in bfloat16 and x [rows, in] in float32. For each format it has the tensors of a
    checkpoint, the bfloat16 weight that they represent (`dense`) and x times that weight in float64 (`product`).
    """
    for name in (each for each in PACKED_FORMATS if f"{each}/dense" in vectors):
        stored = {key.rpartition("/")[2]: tensor for key, tensor in vectors.items() if key.startswith(f"{name}/")}
        dense, product = stored.pop("dense"), stored.pop("product")
        packed = from_checkpoint(name, stored)
        yield f"codec/{name}", _differing(quantize(vectors["weight"], name), packed)
        yield f"dequantize/{name}", differing(dequantize(packed, torch.bfloat16), dense)
        yield f"product/{name}", _product_error(packed, vectors["x"], product)
        if Tiles.fits(name, [packed.shape]):
            yield f"tiles/{name}", _differing(Tiles.pack([packed]).unpack(0), packed)


def _differing(made: Packed, stored: Packed) -> float:
    return sum(differing(made.tensors[key], tensor) for key, tensor in stored.tensors.items())


def differing(a: Tensor, b: Tensor) -> float:
    """The number of bytes that differ; all bytes if the shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float(b.numel() * b.element_size())
    return float((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def _product_error(packed: Packed, x: Tensor, product: Tensor) -> float:
    """The largest error of the layer's float32 product, relative to the largest element of the float64 product."""
    with torch.no_grad():
        made = PackedLinear.from_packed(packed)(x).double()
    return float((made - product).abs().max() / product.abs().max())


def wrong_verdicts(file: Path) -> float:
    """The number of answers that are graded wrongly."""
    wrong = 0
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        text, answer, how = row["text"], row["answer"], (row["format"], row["form"])
        graded = is_correct(text, answer, *how), well_formed(text, *how)
        wrong += graded != (row["correct"], row["well_formed"])
    return float(wrong)
