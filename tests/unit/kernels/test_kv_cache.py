"""The KV cache: pages, and rounding to FP8 by its definition."""

import pytest
import torch

from qerl.kernels.state import FP8, PAGE, Heads, KVCache, page_bytes, rounded

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 24, 1.0)


def numbers_of_fp8():
    """All finite numbers of E4M3 by its definition: bias 7, subnormals, and no infinity."""
    numbers = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                numbers.add((mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7))
    return torch.tensor(sorted(numbers | {-one for one in numbers}), dtype=torch.float64)


def test_elements_are_rounded_to_the_nearest_number_times_a_power_of_two():
    torch.manual_seed(0)
    x = torch.randn(200, 16) * torch.logspace(-20, 4, 200)[:, None]
    x[0] = 0
    codes, scales = rounded(x)
    assert torch.equal(scales.frexp().mantissa, torch.full((200,), 0.5))
    largest = (x.abs().amax(-1) / scales)[1:]
    assert largest.min() >= 128
    assert largest.max() < 256
    scaled = (x.double() / scales[:, None]).flatten()
    error = (codes.double().flatten() - scaled).abs()
    nearest = (scaled[:, None] - numbers_of_fp8()).abs().amin(1)
    assert torch.equal(error, nearest)
    read = codes.float() * scales[:, None]
    assert torch.equal(read.bfloat16().float(), read)


def test_keys_and_values_come_back_as_they_were_stored():
    torch.manual_seed(0)
    page, place = torch.tensor([2, 1, 2]), torch.tensor([5, 0, 63])
    key, value = torch.randn(2, 3, 2, 24)
    for dtype in (torch.float32, FP8):
        [cache] = KVCache.empty(1, 4, HEADS, dtype, CPU).blocks()
        stored = cache.put(page, place, key, value)
        held = cache.pages_of(page[:, None], torch.float32)[torch.arange(3), 0, :, :, place]
        assert torch.equal(held, torch.stack(stored, 1))
        step = 0 if dtype == torch.float32 else 1 / 16
        torch.testing.assert_close(held, torch.stack([key, value], 1), rtol=step, atol=step / 16)
        empty = cache.pages_of(torch.tensor([[0, 3]]), torch.float32)
        assert not empty.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_pages_are_copied_whole_and_counted(dtype):
    torch.manual_seed(0)
    cache = KVCache.empty(3, 5, HEADS, dtype, CPU)
    for block in cache.blocks():
        pages, places = torch.arange(5).repeat_interleave(PAGE), torch.arange(PAGE).repeat(5)
        block.put(pages, places, *torch.randn(2, 5 * PAGE, 2, 24).bfloat16())
    everything = torch.arange(5)
    before = [block.pages_of(everything, torch.float32).clone() for block in cache.blocks()]
    cache.copy_pages(torch.tensor([1, 2]), torch.tensor([4, 3]))
    for block, old in zip(cache.blocks(), before, strict=True):
        assert torch.equal(block.pages_of(everything, torch.float32), old[[0, 1, 2, 2, 1]])
    assert cache.nbytes == 3 * 5 * page_bytes(2, 24, dtype)
