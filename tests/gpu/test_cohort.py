"""Several runs on one base: kernels take the adapter, norms, noise and sampling of each row's run, and so the engine
draws for each run by its policy."""

import numpy as np
import pytest
import torch

from qerl.kernels import reference, triton
from qerl.kernels.cuda import w4a16
from qerl.kernels.state import DecodeState, Norm, RowRuns, SamplingState, dry_run
from qerl.kernels.triton.linear import Copies, narrow_product
from qerl.models.linear import PortableLinear, W4Linear
from qerl.models.policy import with_adapters
from qerl.rl.noise import Noise
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.gpu.exact import DEVICE, INTERPRETED, differences, k3
from tests.gpu.test_products import DTYPE, TOLERANCE, backends, exact, on_hopper, random_layers, shapes_of, weights_of
from tests.tiny import random_checkpoint

CUDA = torch.device("cuda")
PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117)) * 20]
on_gpu = pytest.mark.skipif(INTERPRETED, reason="machine code that the interpreter lacks")

pytestmark = pytest.mark.usefixtures("poisoned")


def runs_of(rows, count):
    runs = RowRuns(count)
    runs.rows = torch.randint(count, (rows,), dtype=torch.int32, device=DEVICE)
    return runs


class Twins:
    """Layers of several runs."""

    def __init__(self, runs, layers):
        self.runs, self._layers = runs, layers

    def of(self, layer):
        return [each[self._layers[0].index(layer)] for each in self._layers]


def test_norms():
    runs, x = runs_of(7, 3), torch.randn(7, 80, device=DEVICE)
    norm = Norm(torch.randn(3, 80, device=DEVICE), torch.randn(3, 80, device=DEVICE), 1e-6, 0.0, runs)
    each = [Norm(weight, noise, 1e-6, 0.0) for weight, noise in zip(norm.weight, norm.noise, strict=True)]
    rows = [reference.rms_norm(row[None], each[run])[0] for row, run in zip(x, runs.rows, strict=True)]
    for found in (triton.rms_norm(x, norm), reference.rms_norm(x, norm)):
        torch.testing.assert_close(found, torch.stack(rows))
    other, to = Norm(torch.randn(80, device=DEVICE), None, 0.1, 1.0), torch.randn(7, 80, device=DEVICE)
    for first, second in ((norm, other), (other, norm)):
        found, expected = to.clone(), to.clone()
        then = triton.add_normed(found, x, first, second)
        torch.testing.assert_close(then, reference.add_normed(expected, x, first, second))
        torch.testing.assert_close(found, expected)


class Products:
    """A product of several runs, with an adapter of each of the `ranks`, and what it should give."""

    def __init__(self, backend, kind, shapes, ranks):
        self.kind, self.each = kind, [random_layers(shapes, "nvfp4", kind == "qkv", rank) for rank in ranks]
        for layers in self.each[1:]:
            for place, (layer, first) in enumerate(zip(layers, self.each[0], strict=True)):
                base = getattr(first, "base_layer", first)
                if hasattr(layer, "base_layer"):
                    layer.base_layer = base
                else:
                    layers[place] = base
        self.weights, self.gated, twins = (
            weights_of(self.each[0]),
            kind == "gate_up",
            Twins(RowRuns(len(ranks)), self.each),
        )
        self.runs, first = twins.runs, self.each[0]
        self.product = (
            W4Linear(first, self.gated, twins) if backend is W4Linear else PortableLinear(first, DTYPE, twins)
        )
        if backend is W4Linear:
            with dry_run(DEVICE):  # compiles all variants at the same time
                for rows in w4a16.limits(512):
                    x = torch.zeros(rows, self.product.operands.tiles.columns, device=DEVICE, dtype=DTYPE)
                    self(x, torch.zeros(rows, dtype=torch.int32, device=DEVICE))

    def __call__(self, x, runs):
        self.runs.rows = runs
        width = self.product.out_features // (1 + self.gated)
        out = torch.full((len(x), width), torch.nan, device=DEVICE, dtype=DTYPE)
        self.product(x, out, activation="silu" if self.gated else None)
        return out

    def check(self, x, runs):
        """Against float64, for the rows of each run; returns the outputs."""
        out = self(x, runs)
        for run in runs.unique().tolist():
            rows = runs == run
            expected = exact(self.each[run], self.weights, x[rows], self.kind)
            assert (out[rows].double() - expected).norm() <= TOLERANCE * expected.norm()
        return out


@backends
@pytest.mark.parametrize("ranks", [(4, 40, 16), (8, 0, 64)], ids=str)
@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
@torch.no_grad()
def test_products(kind, ranks, backend):
    """Of runs with different ranks, in every variant of the rows' number; rows in any order, and run by run."""
    check_products(kind, ranks, backend)


@on_hopper
@pytest.mark.parametrize("ranks", [(4, 40, 16), (8, 0, 64)], ids=str)
@pytest.mark.parametrize("kind", ["qkv", "gate_up"])
@torch.no_grad()
def test_products_by_runs(kind, ranks, monkeypatch):
    """As for more ranks than are stacked."""
    monkeypatch.setattr(w4a16, "MOST_STACKED_RANKS", 0)
    check_products(kind, ranks, W4Linear)


def check_products(kind, ranks, backend):
    shapes = {"qkv": [(256, 512), (128, 512), (64, 512)], "gate_up": [(512, 256), (512, 256)]}[kind]
    if INTERPRETED:
        shapes = shapes_of(kind, "interpreted")
    products = Products(backend, kind, shapes, ranks)
    for rows in (1, 9, 70) if INTERPRETED else (1, 8, 9, 16, 25, 40, 64, 70, 128, 150, 300):
        x, runs = torch.randn(rows, shapes[0][1], device=DEVICE, dtype=DTYPE), runs_of(rows, 3).rows
        products.check(x, runs)
        products.check(x, runs.sort(descending=True)[0])


@on_hopper
@pytest.mark.parametrize(("count", "stacked"), [(2, 64), (4, 128), (8, 256), (16, 0)])
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
@torch.no_grad()
def test_products_of_many_runs(kind, count, stacked, monkeypatch):
    """In every variant for large layers, too. A row's bits depend on no other row, not even on a run that diverged."""
    monkeypatch.setattr(w4a16, "MOST_STACKED_RANKS", stacked)
    shapes = shapes_of(kind, "7b")
    products = Products(W4Linear, kind, shapes, (32,) * count)
    for rows in (8, 16, 32, 40, 64, 96, 128, 160, 192, 224, 256, 500):
        x, runs = torch.randn(rows, shapes[0][1], device=DEVICE, dtype=DTYPE), runs_of(rows, count).rows
        out = products.check(x, runs)
        order = runs.argsort(descending=True)
        assert torch.equal(products(x[order], runs[order]), out[order])
    for name, parameter in torch.nn.ModuleList(products.each[1]).named_parameters():
        if "lora_" in name:
            parameter.fill_(torch.nan)
    products.product.sync()
    found = products(x, runs)
    assert torch.equal(found[runs != 1], out[runs != 1])
    assert found[runs == 1].isnan().any(1).all()


@pytest.mark.parametrize("rows", [1, 70])
def test_narrow_products(rows):
    def draw(*shape):
        return torch.randn(shape, device=DEVICE)

    x, weight, down, up = draw(rows, 640), draw(20, 640), draw(7, 640), draw(20, 7)
    runs = runs_of(rows, 2)
    run_of_rank = torch.tensor([0, 0, 0, 1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    out = torch.empty(rows, 20, device=DEVICE)
    narrow_product(x, weight, down, up, out, runs, run_of_rank)
    shrunk = (x.double() @ down.double().T) * (runs.rows[:, None] == run_of_rank)
    expected = x.double() @ weight.double().T + shrunk.float().double() @ up.double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


def test_copies_into_parts_of_rows():
    target = torch.zeros(5, 12, dtype=torch.bfloat16, device=DEVICE)
    sources = [torch.randn(5, 4, device=DEVICE), torch.randn(5, 7, device=DEVICE)]
    Copies([target[:, :4], target[:, 5:]], sources)()
    for found, source in zip((target[:, :4], target[:, 5:]), sources, strict=True):
        torch.testing.assert_close(found.float(), source, rtol=2**-7, atol=0)  # the interpreter truncates
    assert not target[:, 4].any()


@pytest.fixture(scope="module", params=with_portable("bf16", "nvfp4"))
def policies(request, tmp_path_factory):
    """Runs of different ranks, of which one adapts few layers, with their noise."""
    folder = tmp_path_factory.mktemp(request.param) / "m"
    with kernels_of(request.param) as weights:
        random_checkpoint(folder, "small", weights)
        adapters = [
            (AdapterSettings(rank=8), 0),
            (AdapterSettings(rank=40), 1),
            (AdapterSettings(rank=16, targets=["q_proj", "down_proj"]), 2),
        ]
        made = [*with_adapters(folder, adapters, "bfloat16", torch.device("cuda", 0))]
        for number, policy in enumerate(made):
            torch.manual_seed(number)
            for _, parameter in policy.trainable():
                parameter.data += 0.02 * torch.randn_like(parameter)
            policy.lm.generation_config.eos_token_id = []
        yield made


@on_gpu
@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_logprobs_are_those_of_each_runs_policy(policies, count):
    sampler = EngineSampler(policies[0], NativeSettings(), 512, policies[1:])
    noises = [
        Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed)
        for seed, policy in enumerate(policies)
    ]
    for noise in noises:
        noise.set(1, 4)
    try:
        params = [
            SamplingParams(max_tokens=length, count=count, seed=length, ignore_eos=True) for length in (60, 30, 90)
        ]
        drawn = sampler.generate_all([Request(PROMPTS, each) for each in params])
        for policy, groups in zip(policies, drawn, strict=True):
            difference = differences(policy, PROMPTS, groups)
            assert np.abs(difference).max() <= 0.03
            assert k3(difference) <= 1e-4
    finally:
        for noise in noises:
            noise.clear()


@on_gpu
@pytest.mark.parametrize("truncated", [False, True])
def test_draws_of_runs(truncated):
    """Temperature, truncation and seed are those of a sequence's run."""
    parameters = [(0.7, 3, 0.9, 0), (1.3, 8, 1.0, 5), (0.0, 3, 1.0, 0)]
    logits = torch.randn(6, 300, device=CUDA)

    def state_of(run):
        state, sampling = DecodeState.empty(6, 4, 1, CUDA), SamplingState.empty(CUDA, 3 if run is None else 1)
        state.position[:6], state.limit[:] = 5, 4
        state.sequence[:6] = torch.arange(6, device=CUDA)
        for number, (temperature, seed, top_p, top_k) in enumerate(parameters):
            if run in (None, number):
                values = {"temperature": temperature, "seed": seed, "top_p": top_p, "top_k": top_k}
                sampling.set(**values, stops=(), run=number if run is None else 0)
        if run is None:
            state.run[:6] = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32, device=CUDA)
        return state, sampling

    rows = torch.arange(6, dtype=torch.int32, device=CUDA)
    for function in (triton.draw, reference.draw):
        together, sampling = state_of(None)
        function(logits, rows, together, sampling, truncated)
        for run in range(3):
            alone, own = state_of(run)
            reference.draw(logits, rows, alone, own, truncated)
            places = [run, run + 3]
            assert together.tokens[places, 0].tolist() == alone.tokens[places, 0].tolist()
            torch.testing.assert_close(together.logprobs[places, 0], alone.logprobs[places, 0])
