"""Kernels of decode steps and prompts against PyTorch, in Triton's interpreter, which `test_interpreter.py` starts.

Heads are those of families: windows shorter and longer than a page, heads of which a part rotates, norms 1 + w, and
sinks. The interpreter has no arithmetic of bfloat16, so activations are float32 here; `tests/gpu` has bfloat16.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.packed_sequences import Packing, attend_packed
from qerl.kernels.state import FP8, IDLE, PAGE, DecodeState, Heads, KVCache, Norm, PromptRow, pack, rounded, splits_of
from qerl.kernels.triton import attention, prompt_attention
from qerl.kernels.triton.linear import narrow_product
from qerl.kernels.triton.norms import add_normed, clamped_glu, rms_norm
from tests.conftest import in_nightly

CPU = torch.device("cpu")
#: Sequences of less than a page to so many pages that some splits are of two.
LENGTHS = [1, 3, 64, 129, 600]
#: Query heads, KV heads, their size, how much of it rotates, offset of the norms or None, window, and whether they have
#: sinks and gates.
HEADS = [
    (4, 2, 16, 16, None, None, False),
    (4, 2, 16, 12, None, 8, False),
    (3, 3, 24, 18, 0.0, 64, False),
    (2, 1, 32, 32, 1.0, 1, False),
    (4, 1, 32, 32, 1.0, 100, False),
    (2, 1, 16, 12, 1.0, 1000, False),
    (16, 2, 64, 64, None, 8, True),
    (8, 1, 16, 16, None, None, True),
    (6, 2, 24, 8, 1.0, None, False, True),
]
#: Those of each run: between them they have windows, norms, gates and parts that rotate; sinks have own cases.
EACH = [HEADS[1], HEADS[2], HEADS[4], HEADS[8]]
OTHERS = [shape for shape in HEADS if shape not in EACH]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The sizes of a GPU, and what a kernel would read of memory that isn't set."""
    properties = SimpleNamespace(
        multi_processor_count=8, shared_memory_per_block_optin=100_000, shared_memory_per_multiprocessor=101_000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(prompt_attention, "_reads", lambda dim_block, device: (32, 1))
    torch.manual_seed(0)


def heads_of(query, kv, dim, rotary, offset, window, has_sinks, gated=False):
    norms = [None if offset is None else 1 - offset + 0.3 * torch.randn(dim) for _ in range(2)]
    made = Heads(query, kv, dim, 0.3, *norms, eps=1e-6, norm_offset=offset or 0.0, window=window, gated=gated)
    if has_sinks:  # far below and far above scores, too
        made = replace(made, sinks=torch.linspace(-200, 20, query)[torch.randperm(query)])
    angle = torch.rand(1024, rotary // 2) * 6
    return made, (angle.cos(), angle.sin())


def kernels_order(dim, rotary):
    """The order of a key's elements in the kernels' cache: pairs that rotate together are half a head apart."""
    rest = (dim - rotary) // 2
    return [*range(rotary // 2), *range(rotary, rotary + rest), *range(rotary // 2, rotary), *range(rotary + rest, dim)]


def both_caches(count, heads, order, fp8=False):
    """Random keys and values, as PyTorch's operations and as the kernels have them."""
    plain = torch.randn(count, 2, heads.kv, PAGE, heads.dim)
    kernels = plain.clone()
    kernels[:, 0] = plain[:, 0][..., order]
    return [KVCache(*rounded(cache)) if fp8 else KVCache(cache) for cache in (kernels, plain)]


def compare(ours, plain, order):
    """Keys differ by roundings, which are too small to change an element in FP8."""
    pages = torch.arange(ours.pages)
    found, expected = ours.pages_of(pages, torch.float32), plain.pages_of(pages, torch.float32)
    expected[:, 0] = expected[:, 0][..., order]
    if ours.scales is not None:
        assert torch.equal(ours.scales, plain.scales)
        # Triton's interpreter halves what rounds up to a power of two, and rounds the smallest numbers otherwise.
        lost = (expected.frexp().mantissa.abs() == 0.5) & (found == expected / 2)
        assert lost.float().mean() < 1e-2
        found = torch.where(lost, expected, found)
    close = 1e-5 if ours.scales is None else 2**-9 * float(ours.scales.max())
    torch.testing.assert_close(found[:, 0], expected[:, 0], atol=close, rtol=1e-5)
    torch.testing.assert_close(found[:, 1], expected[:, 1], atol=0 if ours.scales is None else close, rtol=0)


def as_stored(ours, order, monkeypatch):
    """The kernels' cache in FP8 as the reference has it, which then stores nothing and reads what they stored."""
    data = ours.data.view(torch.uint8).clone()
    data[:, 0] = data[:, 0][..., torch.tensor(order).argsort()]
    stored = KVCache(data.view(FP8), ours.scales)

    def put(self, page, place, key, value):
        held = stored.pages_of(page.long()[:, None], key.dtype)[torch.arange(len(page)), 0, :, :, place]
        return held.unbind(1)

    monkeypatch.setattr(KVCache, "put", put)
    return stored


@pytest.mark.parametrize(
    ("shape", "least_programs", "fp8"),
    [
        *((shape, 1000 * (number % 2), False) for number, shape in enumerate(EACH)),
        *((HEADS[0], 0, True), (HEADS[6], 1000, True)),
        *in_nightly(
            *((shape, 1000 * (number % 2), False) for number, shape in enumerate(OTHERS)),
            (HEADS[2], 1000, True),
        ),
    ],
    ids=str,
)
def test_steps(shape, least_programs, fp8, monkeypatch):
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    (heads, rope), order = heads_of(*shape), kernels_order(*shape[2:4])
    each = -(-max(LENGTHS) // PAGE)
    state = DecodeState.empty(len(LENGTHS), 1, each, CPU)
    state.pages[:-1] = torch.randperm(len(LENGTHS) * each).view(len(LENGTHS), each).int() + 1
    state.position[:-1] = torch.tensor(LENGTHS).int() - 1
    state.position[2] = IDLE
    ours, plain = both_caches(1 + len(LENGTHS) * each, heads, order, fp8)
    rows = torch.tensor([3, 2, 0, 4, 1], dtype=torch.int32)
    qkv = torch.randn(len(rows), heads.width)
    found = attention.attend(qkv, ours, state, rows, rope, heads, splits_of(each))
    expected = reference.attend(qkv, plain, state, rows, rope, heads, splits_of(each))
    compare(ours, plain, order)
    if fp8:
        stored = as_stored(ours, order, monkeypatch)
        expected = reference.attend(qkv, stored, state, rows, rope, heads, splits_of(each))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


#: For each sequence its length, and its pages: those of a prompt have the same numbers.
SHARED = [
    (260, [1, 2, 3, 4, 5]),  # the prompt's three full pages, and more
    (193, [1, 2, 3, 6]),  # its new token alone begins a page
    (192, [1, 2, 20]),  # its new token ends a page, which is its own then
    (450, [1, 2, 3, 7, 8, 9, 10, 11]),
    (70, [12, 13]),  # nothing in common with the next ones
    (130, [14, 15, 16]),
    (129, [14, 15, 17]),
    (200, [14, 15, 18, 19]),
]


@pytest.mark.parametrize(
    ("heads", "gated", "fp8", "idle"),
    [
        ((4, 1), False, True, 1),
        ((6, 1), True, False, None),
        *in_nightly(((14, 2), False, False, 1), ((10, 2), False, True, None), ((6, 1), True, True, 1)),
    ],
    ids=str,
)
def test_rows_that_share_pages(heads, gated, fp8, idle, monkeypatch):
    """Two rows to a program. That bits equal those of each row alone is a case of `tests/gpu`."""
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 0)
    monkeypatch.setattr(attention, "_LEAST_SHARED_PROGRAMS", 1e-3)
    (heads, rope), order = heads_of(*heads, 32, 24, None, None, False, gated), kernels_order(32, 24)
    state = DecodeState.empty(len(SHARED), 1, max(len(pages) for _, pages in SHARED), CPU)
    for slot, (length, pages) in enumerate(SHARED):
        state.position[slot] = length - 1
        state.pages[slot, : len(pages)] = torch.tensor(pages)
    if idle is not None:
        state.position[idle] = IDLE
    ours, plain = both_caches(21, heads, order, fp8)
    rows = torch.arange(len(SHARED), dtype=torch.int32)
    qkv = torch.randn(len(rows), heads.width)
    assert attention._rows_together(heads, len(rows), 8) == 2
    found = attention.attend(qkv, ours, state, rows, rope, heads, 8)
    expected = reference.attend(qkv, plain, state, rows, rope, heads, 8)
    compare(ours, plain, order)
    if fp8:
        expected = reference.attend(qkv, as_stored(ours, order, monkeypatch), state, rows, rope, heads, 8)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def prompts_of(lengths, pages):
    packed = torch.from_numpy(pack([[1] * n for n in lengths], pages, PAGE, sum(lengths)))
    return PromptRow.of(packed, sum(lengths), len(lengths), Packing.of(lengths, [None] * len(lengths), CPU))


@pytest.mark.parametrize(
    ("shape", "fp8"),
    [
        *((shape, False) for shape in EACH),
        (HEADS[2], True),
        *in_nightly(*((shape, False) for shape in OTHERS), (HEADS[1], True)),
    ],
    ids=str,
)
def test_prompts_are_rotated_and_stored(shape, fp8, monkeypatch):
    (heads, rope), order = heads_of(*shape), kernels_order(*shape[2:4])
    row, (ours, plain) = prompts_of([1, 12], [[2], [1]]), both_caches(3, heads, order, fp8)
    qkv = torch.randn(13, heads.width)
    found = prompt_attention.attend_prompts(qkv.clone(), ours, row, rope, heads)
    expected = reference.attend_prompts(qkv, plain, row, rope, heads)
    compare(ours, plain, order)
    if fp8:
        expected = reference.attend_prompts(qkv, as_stored(ours, order, monkeypatch), row, rope, heads)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [*EACH, HEADS[7], *in_nightly(*((HEADS[n],) for n in (0, 3, 5, 6)))], ids=str)
def test_prompts_attend(shape):
    """The kernel of 16-bit prompts on float32."""
    heads, _ = heads_of(*shape)
    lengths = [1, 130]
    row = prompts_of(lengths, [[1], [2, 3, 4]])
    qkv = torch.randn(sum(lengths), heads.width)
    *exact, gates = (part if part is None else part.double() for part in heads.parts(qkv))
    expected = attend_packed(*exact, row.packing, heads.scale, heads.window, heads.sinks).flatten(1)
    expected = expected if gates is None else expected / (1 + (-gates).exp().flatten(1))
    found = prompt_attention._attend_to_prompts(qkv, row.blocks, heads)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("noisy", [False, True])
def test_norms(offset, noisy):
    x, before = torch.randn(3, 80), torch.randn(3, 80)
    norm = Norm(torch.randn(80), torch.randn(80) if noisy else None, 1e-6, offset)
    then = Norm(torch.randn(80), None, 0.1, 1.0)
    expected = reference.rms_norm(x, norm)
    torch.testing.assert_close(rms_norm(x, norm), expected)
    for first, second in ((norm, then), (then, norm)):
        to, expected_to = before.clone(), before.clone()
        normed = add_normed(to, x, first, second)
        torch.testing.assert_close(normed, reference.add_normed(expected_to, x, first, second))
        torch.testing.assert_close(to, expected_to)


@pytest.mark.parametrize(("rows", "width", "columns", "rank"), [(1, 96, 1536, 32), (70, 20, 700, 5), (129, 33, 640, 0)])
def test_narrow_products(rows, width, columns, rank):
    x, weight = torch.randn(rows, columns), torch.randn(width, columns)
    down, up = torch.randn(rank, columns), torch.randn(width, rank)
    out = torch.full((rows, width), torch.nan)
    narrow_product(x, weight, down, up, out)
    exact = x.double() @ weight.double().T + (x.double() @ down.double().T).float().double() @ up.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)


def test_the_gate_of_gpt_oss():
    both = torch.randn(3, 2 * 1100) * 8
    gate, up = (part.double() for part in both.view(3, 1100, 2).unbind(-1))
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    for found in (clamped_glu(both, 1.702, 7.0), reference.clamped_glu(both, 1.702, 7.0)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
