"""Attention of decode steps and of prompts against float64, with a cache in the activations' dtype and in FP8.

Heads are those of families: windows shorter and longer than a page, heads of which a part rotates, norms 1 + w, sinks
and gates.
"""

from dataclasses import replace

import pytest
import torch

from qerl.kernels import reference
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import IDLE, LEAST_FP8_CAPABILITY, PAGE, DecodeState, PromptRow, pack, splits_of
from qerl.kernels.triton import attention, prompt_attention
from qerl.rollout.decoder import attend_together
from tests.conftest import in_nightly
from tests.gpu.exact import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_near,
    assert_steps,
    assert_stored,
    attended,
    cache_of,
    close_in,
    copied,
    heads_of,
    held,
    kernels_order,
    paged,
    parts,
)

pytestmark = pytest.mark.usefixtures("poisoned", "dependent_launch", "sizes_of_a_gpu")
#: Query heads, KV heads, their size, how much of it rotates, offset of the norms or None, window, sinks, gates.
QWEN2, QWEN3, GEMMA, GPT_OSS = (
    *((28, 4, 128, 128), (16, 8, 128, 128, 0.0)),
    *((4, 1, 256, 256, 1.0, 512), (64, 8, 64, 64, None, 128, True)),
)
OTHERS = [
    *((3, 3, 80, 80), (4, 2, 16, 16, 0.0), (32, 1, 64, 64, 0.0), (24, 8, 128, 96), (32, 32, 96, 96, None, 700)),
    *((24, 8, 128, 96, None, 70), (2, 1, 32, 24, 1.0, 1), (8, 1, 16, 16, None, None, True)),
    (24, 4, 256, 64, 1.0, None, False, True),
]
#: For the interpreter; between those of each run they have windows, norms, gates, sinks and parts that rotate.
SMALL = [
    (4, 2, 16, 12, None, 8),
    (3, 3, 24, 18, 0.0, 64),
    (4, 1, 32, 32, 1.0, 100),
    (6, 2, 24, 8, 1.0, None, False, True),
]
SMALL_IN_FP8 = [(4, 2, 16, 16), (16, 2, 64, 64, None, 8, True)]
AT_NIGHT = [(2, 1, 32, 32, 1.0, 1), (2, 1, 16, 12, 1.0, 1000), (8, 1, 16, 16, None, None, True)]
HEADS = [
    *((shape, False) for shape in (SMALL if INTERPRETED else (QWEN2, QWEN3, GEMMA, GPT_OSS, *OTHERS))),
    *((shape, True) for shape in (SMALL_IN_FP8 if INTERPRETED else (QWEN2, QWEN3, GEMMA, (4, 2, 16, 16, 0.0, 70)))),
    *in_nightly(*((shape, False) for shape in SMALL_IN_FP8 + AT_NIGHT), *((shape, True) for shape in SMALL[:2])),
]
shapes = pytest.mark.parametrize(("shape", "fp8"), HEADS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Sequences of less than a page to so many pages that some splits are of two.
LENGTHS = [1, 3, 64, 129, 600] if INTERPRETED else [1, 2, 64, 65, 129, 512, 513, 1500, 2100]
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


def skip_unless_there_is(fp8):
    if fp8 and not INTERPRETED and torch.cuda.get_device_capability() < LEAST_FP8_CAPABILITY:
        pytest.skip("needs a CUDA device that converts FP8")


@pytest.mark.parametrize("least_programs", [0, 1000], ids=["whole", "split"])
@dtypes
@shapes
def test_steps(shape, fp8, dtype, least_programs, monkeypatch):
    """A row alone has the same bits, and idle rows have zeros."""
    skip_unless_there_is(fp8)
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", least_programs)
    heads, rope = heads_of(dtype, *shape)
    state, before = paged(LENGTHS, heads, dtype, fp8)
    state.position[2] = IDLE
    count = len(LENGTHS)
    rows = torch.tensor([count, *torch.randperm(count).tolist(), count], dtype=torch.int32, device=DEVICE)
    qkv, splits = torch.randn(len(rows), heads.width, device=DEVICE).to(dtype), splits_of(state.pages.shape[1])
    after = copied(before)
    out = attention.attend(qkv, after, state, rows, rope, heads, splits)
    order, close = kernels_order(heads, rope), close_in(dtype)
    assert_steps(out, qkv, before, after, state, rows, rope, heads, order, close)
    if INTERPRETED:
        order, zeros = torch.arange(heads.dim), replace(before, data=before.data.nan_to_num(0)) if not fp8 else before
        after = copied(zeros)
        out = reference.attend(qkv, after, state, rows, rope, heads, splits)
        assert_steps(out, qkv, zeros, after, state, rows, rope, heads, order, close)
        return
    for row in range(len(rows)):
        alone = attention.attend(qkv[[row]], copied(before), state, rows[[row]], rope, heads, splits)
        assert torch.equal(alone[0], out[row])


@dtypes
@shapes
def test_tokens_of_a_sequence_together_are_those_of_steps(shape, fp8, dtype):
    skip_unless_there_is(fp8)
    heads, rope = heads_of(dtype, *shape)
    ends, counts = ([3, 66], [2, 4]) if INTERPRETED else ([3, 130, 700], [2, 70, 300])
    state, _ = paged(ends, heads, dtype, fp8)
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    state.position[:-1] = torch.tensor(starts, device=DEVICE).int()
    before = cache_of(state, heads, dtype, fp8)
    places = [(slot, place) for slot, end in enumerate(ends) for place in range(starts[slot], end)]
    slots, positions = torch.tensor([*places, (len(ends), IDLE)], device=DEVICE).T
    qkv = torch.randn(len(slots), heads.width, device=DEVICE).to(dtype)
    alone, steps = copied(before), []
    for row, (slot, place) in enumerate(places):
        state.position[slot] = place
        steps.append(attention.attend(qkv[[row]], alone, state, slots[[row]].int(), rope, heads, 1))
    together, rows = copied(before), torch.arange(len(slots), dtype=torch.int32, device=DEVICE)
    each = replace(state, position=positions.int(), pages=state.pages[slots])
    out = attend_together(attention.attend, each, rows, qkv, together, heads, rope)
    torch.testing.assert_close(out[:-1].double(), torch.cat(steps).double(), **close_in(dtype))
    assert torch.equal(together.data.view(torch.uint8), alone.data.view(torch.uint8))


@pytest.mark.parametrize(
    ("heads", "gated", "fp8", "idle"),
    [
        *(((4, 1, 32, 24), False, True, [1]), ((6, 1, 32, 24), True, False, [])),
        *in_nightly(((14, 2, 32, 24), False, False, [1]), ((6, 1, 32, 24), True, True, [1])),
    ]
    if INTERPRETED
    else [
        ((28, 4, 128, 128), False, False, [3, 17]),
        ((32, 8, 128, 128), True, True, []),
        ((40, 8, 128, 128), False, False, [1]),
    ],
    ids=str,
)
@dtypes
def test_rows_that_share_a_prompt_have_the_bits_of_rows_alone(dtype, heads, gated, fp8, idle, monkeypatch):
    """Two rows to a program; the interpreter's sums have other roundings for other shapes."""
    skip_unless_there_is(fp8)
    heads, rope = heads_of(dtype, *heads, None, None, False, gated)
    copies = 1 if INTERPRETED else 32
    state = DecodeState.empty(copies * len(SHARED), 1, max(len(pages) for _, pages in SHARED), DEVICE)
    for slot in range(state.count):
        length, pages = SHARED[slot % len(SHARED)]
        state.position[slot] = length - 1
        state.pages[slot, : len(pages)] = torch.tensor(pages) + 20 * (slot // len(SHARED))
    before = cache_of(state, heads, dtype, fp8)
    state.position[idle] = IDLE
    rows = torch.arange(state.count, dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(len(rows), heads.width, device=DEVICE).to(dtype)
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 0)
    outcomes = []
    for least, number in ((1e-3, 2), (1e6, 1)):
        monkeypatch.setattr(attention, "_LEAST_SHARED_PROGRAMS", least)
        multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        assert attention._rows_together(heads, len(rows), multiprocessors) == number
        after = copied(before)
        out = attention.attend(qkv, after, state, rows, rope, heads, 8)
        if number == 2:
            assert_steps(out, qkv, before, after, state, rows, rope, heads, kernels_order(heads, rope), close_in(dtype))
        outcomes.append((out, after.data.view(torch.uint8)))
    assert INTERPRETED or all(map(torch.equal, *outcomes))


@dtypes
@shapes
def test_prompts(shape, fp8, dtype):
    """On a GPU with padding, as in a graph."""
    skip_unless_there_is(fp8)
    padding = 0 if INTERPRETED else 117
    heads, rope = heads_of(dtype, *shape)
    lengths = [1, 130] if INTERPRETED else [1, 64, 300, 2, 65, 128, 129, 63]
    tokens, numbers = sum(lengths) + padding, iter((torch.randperm(20) + 1).tolist())
    pages = [[next(numbers) for _ in range(-(-length // PAGE))] for length in lengths]
    packed = torch.tensor(pack([[7] * n for n in lengths], pages, PAGE, tokens, 9)).to(DEVICE)
    all_lengths = [*lengths, padding] if padding else lengths
    row = PromptRow.of(packed, tokens, 9, Packing.of(all_lengths, [None] * len(all_lengths), DEVICE))
    qkv = torch.randn(tokens, heads.width, device=DEVICE).to(dtype)
    query, key, value, gates = parts(qkv, row.positions, rope, heads)
    empty, close = DecodeState.empty(1, 1, 1, DEVICE), close_in(dtype)
    empty.pages[0, 0], empty.position[0] = 20, 0
    real, order = slice(sum(lengths)), kernels_order(heads, rope)
    place = row.places[real].long()
    ours, plain = (prompt_attention.attend_prompts, order), (reference.attend_prompts, torch.arange(heads.dim))
    for attend, of_cache in (ours, plain) if INTERPRETED else (ours,):
        cache, given = cache_of(empty, heads, dtype, fp8), qkv.clone()
        results = [attend(given, cache, row, rope, heads)]
        assert_stored(cache, place // PAGE, place % PAGE, of_cache, key[real], value[real], close)
        keys, values = key, value
        if fp8:  # attention reads what decode steps read
            stored = [part[place] for part in held(cache, torch.arange(cache.pages, device=DEVICE), of_cache)]
            keys, values = (torch.cat([one, part[len(one) :]]) for one, part in zip(stored, (key, value), strict=True))
        whole = [query, keys, values, *([] if gates is None else [gates])]
        pieces = zip(*(part.split(all_lengths) for part in whole), strict=True)
        expected = torch.cat([attended(*piece[:3], *(piece[3:] or [None]), heads) for piece in pieces])[real]
        if INTERPRETED and attend is ours[0]:  # the kernel of prompts in 16 bits
            results.append(prompt_attention._attend_to_prompts(given, row.blocks, heads))
        for found in results:
            torch.testing.assert_close(found[real].double(), expected, **close | {"atol": 1.5 * close["atol"]})
            assert_near(found[real], expected, 5e-3 if dtype == torch.bfloat16 else 2e-6 if INTERPRETED else 1e-6)
        data = cache.data.float().permute(0, 3, 1, 2, 4)
        data[place // PAGE, place % PAGE] = torch.nan
        assert fp8 or data[1:].isnan().all()


def test_a_prompt_whose_offsets_pass_32_bits_is_refused():
    heads, _ = heads_of(torch.bfloat16, 24, 4, 256, 64, gated=True)  # Qwen3.5-27B's
    qkv = torch.zeros(1, heads.width, dtype=torch.bfloat16, device=DEVICE).expand(2**31 // heads.width + 1, -1)
    with pytest.raises(ValueError, match=r"149,797 tokens, .* takes 149,796 of this model; lower `max_prompt_tokens`"):
        prompt_attention._attend_to_prompts(qkv, None, heads)
