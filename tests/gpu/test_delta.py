"""The kernels of delta nets against PyTorch in float64."""

from dataclasses import replace

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import IDLE, PAGE, DecodeState, DeltaHeads, DeltaState, DeltaStates, PromptRow, pack
from qerl.kernels.triton import delta
from tests.conftest import NIGHTLY
from tests.gpu.exact import DEVICE, INTERPRETED

#: Key and value heads, features of each, and taps; powers of two and others, and more columns than a program has.
SMALL, LARGE = [(2, 4, 8, 16, 4), (1, 3, 12, 24, 3), (2, 2, 16, 32, 2)], [(16, 48, 128, 128, 4), (2, 6, 64, 96, 3)]
LENGTHS = [1, 6, 2]
shapes = pytest.mark.parametrize("shape", SMALL[not NIGHTLY :] if INTERPRETED else LARGE, ids=str)
#: GPUs have fast exponentials and logarithms.
CLOSE = {"rtol": 1e-5, "atol": 2e-6} if INTERPRETED else {"rtol": 1e-4, "atol": 1e-5}


def heads_of(key, value, key_dim, value_dim, taps):
    torch.manual_seed(0)
    channels = 2 * key * key_dim + value * value_dim
    return DeltaHeads(
        key, value, key_dim, value_dim, torch.randn(channels, taps, device=DEVICE), torch.randn(value, device=DEVICE),
        torch.randn(value, device=DEVICE), torch.rand(value_dim, device=DEVICE) + 0.5, 1e-6,
    )  # fmt: skip


def inputs(heads, count):
    """Convolution's inputs, gates of the output, b and a, as columns of one tensor."""
    parts = [heads.channels, heads.parts[2], heads.value, heads.value]
    return torch.randn(count, sum(parts), device=DEVICE).split(parts, 1)


def states(heads, slots):
    made = DeltaStates.empty(heads, 1, slots, torch.float32, DEVICE)
    return DeltaState(torch.randn_like(made.recent[0]), torch.randn_like(made.recurrent[0]))


def wide(value):
    """Tensors of a dataclass or a list in float64."""
    if isinstance(value, DeltaHeads | DeltaState):
        changed = {k: v.double() for k, v in vars(value).items() if isinstance(v, torch.Tensor)}
        return replace(value, **changed)
    return [one.double() for one in value]


def same(found, net, expected, exact, rows):
    torch.testing.assert_close(found.double(), expected, **CLOSE)
    torch.testing.assert_close(net.recent[rows].double(), exact.recent[rows], rtol=0, atol=0)
    torch.testing.assert_close(net.recurrent[rows].double(), exact.recurrent[rows], **CLOSE)


@shapes
def test_steps(shape):
    heads = heads_of(*shape)
    state, net = DecodeState.empty(5, 1, 1, DEVICE), states(heads, 5)
    state.position[:5] = torch.tensor([3, 0, IDLE, 7, 1], device=DEVICE)
    exact, rows = wide(net), torch.tensor([3, 2, 0, 4, 5, 5], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        given = inputs(heads, len(rows))
        found = delta.delta_step(*given, heads, net, state, rows)
        expected = reference.delta_step(*wide(given), wide(heads), exact, state, rows)
        same(found, net, expected, exact, slice(None))
        assert not found[[1, 4, 5]].any()


@shapes
@pytest.mark.parametrize("padding", [0, 7])
def test_prompts(shape, padding):
    """With padding as in a graph: tokens after the prompts, and prompts without tokens."""
    heads, tokens = heads_of(*shape), sum(LENGTHS) + padding
    most = len(LENGTHS) + 2 if padding else None
    packed = pack([[1] * n for n in LENGTHS], [[1]] * len(LENGTHS), PAGE, tokens, most)
    net, slots = states(heads, 5), [4, 0, 2] + [5] * (2 if padding else 0)
    packing = Packing.of(LENGTHS, [None] * len(LENGTHS), DEVICE)
    place = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    row, exact = PromptRow.of(torch.from_numpy(packed).to(DEVICE), tokens, len(slots), packing, place), wide(net)
    given = inputs(heads, tokens)
    found = delta.delta_prompts(*given, heads, net, row)
    expected = reference.delta_prompts(*wide(given), wide(heads), exact, row)
    same(found, net, expected, exact, [0, 1, 2, 3, 4])
    assert not found[sum(LENGTHS) :].any()
