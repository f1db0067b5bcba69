"""Norms, products and draws of a cohort in Triton's interpreter, which `test_interpreter.py` starts: each row by its
run alone."""

import pytest
import torch
from torch import nn

from qerl.kernels import reference
from qerl.kernels.state import Norm, RowRuns
from qerl.kernels.triton import add_normed, rms_norm
from qerl.kernels.triton.linear import Copies, narrow_product
from qerl.models.linear import PortableLinear
from tests.unit.kernels.portable_cases import assert_close, exact, layers_of


def runs_of(rows, count):
    runs = RowRuns(count)
    runs.rows = torch.randint(count, (rows,), dtype=torch.int32)
    return runs


class Twins:
    """Layers of several runs on the first one's bases."""

    def __init__(self, runs, layers):
        self.runs, self._layers = runs, layers

    def of(self, layer):
        return [each[self._layers[0].index(layer)] for each in self._layers]


def test_norms_of_runs():
    runs, x = runs_of(7, 3), torch.randn(7, 80)
    norm = Norm(torch.randn(3, 80), torch.randn(3, 80), 1e-6, 0.0, runs)
    expected = torch.stack(
        [
            reference.rms_norm(row[None], Norm(norm.weight[run], norm.noise[run], 1e-6, 0.0))[0]
            for row, run in zip(x, runs.rows, strict=True)
        ]
    )
    for found in (rms_norm(x, norm), reference.rms_norm(x, norm)):
        torch.testing.assert_close(found, expected)
    other, to = Norm(torch.randn(80), None, 0.1, 1.0), torch.randn(7, 80)
    for first, second in ((norm, other), (other, norm)):
        found, wanted = to.clone(), to.clone()
        torch.testing.assert_close(add_normed(found, x, first, second), reference.add_normed(wanted, x, first, second))


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("kind", ["biased", "silu"])
@torch.no_grad()
def test_portable_products_of_runs(rows, kind):
    widths = (72, 24, 19) if kind == "biased" else (136, 136)
    each = [layers_of("nvfp4", widths, 256, bias=kind == "biased", rank=rank) for rank in (4, 19, 3)]
    for layers in each[1:]:
        for layer, first in zip(layers, each[0], strict=True):
            base = getattr(first, "base_layer", first)
            if hasattr(layer, "base_layer"):
                layer.base_layer = base
            else:
                layers[layers.index(layer)] = first
    runs = runs_of(rows, 3)
    x = torch.randn(rows, 256)
    parts = [exact(layers, x) for layers in each]
    product = PortableLinear(each[0], torch.float32, Twins(runs, each))
    own = [torch.stack([parts[run][part][row] for row, run in enumerate(runs.rows)]) for part in range(len(widths))]
    if kind == "silu":
        out, expected = torch.empty(rows, 136), nn.functional.silu(own[0]) * own[1]
        product(x, out, activation="silu")
    else:
        out, expected = torch.empty(rows, 115), torch.cat(own, 1)
        product(x, out)
    assert_close(out, expected)


@pytest.mark.parametrize("rows", [1, 70])
def test_narrow_products_of_runs(rows):
    x, weight, down, up = torch.randn(rows, 640), torch.randn(20, 640), torch.randn(7, 640), torch.randn(20, 7)
    runs, run_of_rank = runs_of(rows, 2), torch.tensor([0, 0, 0, 1, 1, 0, 1], dtype=torch.int32)
    out = torch.empty(rows, 20)
    narrow_product(x, weight, down, up, out, runs, run_of_rank)
    shrunk = (x.double() @ down.double().T) * (runs.rows[:, None] == run_of_rank)
    expected = x.double() @ weight.double().T + shrunk.float().double() @ up.double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


def test_copies_into_parts_of_rows():
    target, sources = torch.zeros(5, 12, dtype=torch.bfloat16), [torch.randn(5, 4), torch.randn(5, 7)]
    Copies([target[:, :4], target[:, 5:]], sources)()
    for found, source in zip((target[:, :4], target[:, 5:]), sources, strict=True):
        torch.testing.assert_close(found.float(), source, rtol=2**-7, atol=0)  # the interpreter truncates
    assert not target[:, 4].any()
