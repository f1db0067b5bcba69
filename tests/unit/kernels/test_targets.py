"""Every kernel in Triton compiles for every supported generation of GPUs, within its shared memory; none is run."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from qerl.formats.codecs import quantize
from qerl.formats.layouts import Words
from qerl.kernels.state import (
    BLOCK_SIZES,
    FP8,
    LEAST_FP8_CAPABILITY,
    PAGE,
    DecodeState,
    DeltaHeads,
    DeltaStates,
    GroupedLora,
    Heads,
    KVCache,
    Norm,
    PromptRow,
    RowRuns,
    SamplingState,
    pack,
)
from qerl.kernels.triton import attention, delta, experts, launch, linear, norms, prompt_attention, sampling
from qerl.kernels.triton.linear import PortableOperands, dense, multiply, tiles
from tests.conftest import NIGHTLY
from tests.unit.kernels.machine_code import loops_with_products, machine_code, overwritten

#: Multiprocessors of a GPU of each capability, by which launches are divided, and bytes of shared memory of a thread
#: block (CUDA programming guide, technical specifications).
GPUS = {
    **{(8, 0): (108, 163 * 1024), (8, 6): (82, 99 * 1024), (8, 9): (128, 99 * 1024)},
    **{(9, 0): (132, 227 * 1024), (10, 0): (148, 227 * 1024), (12, 0): (170, 99 * 1024)},
}
CPU = torch.device("cpu")
#: The widths of Qwen2.5-7B; its kernels differ from other models' in sizes that are powers of two.
HIDDEN, HEADS, VOCABULARY = 3584, Heads(28, 4, 128, 128**-0.5), 152064


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


#: The heads of Gemma 3 1B, in its layers with windows, and of Phi-4-mini, with the elements that rotate.
GEMMA = Heads(4, 1, 256, 0.0625, zeros(256), zeros(256), 1e-6, norm_offset=1.0, window=512)
PHI = Heads(24, 8, 128, 128**-0.5)
#: The heads of gpt-oss, in its layers with windows.
GPT_OSS = Heads(64, 8, 64, 0.125, window=128, sinks=zeros(64))
#: The heads of Qwen3.5-27B's attention.
QWEN = Heads(24, 4, 256, 0.0625, zeros(256), zeros(256), 1e-6, norm_offset=1.0, gated=True)


def rope_of(rotary):
    return zeros(4096, rotary // 2), zeros(4096, rotary // 2)


def row_of(count, heads, dtype=torch.bfloat16):
    """Queries, keys and values of `count` tokens, and a block's cache."""
    return zeros(count, heads.width), next(KVCache.empty(1, 9, heads, dtype, CPU).blocks())


def products():
    for weights_format in ("nvfp4", "mxfp4"):
        words = Words.pack([quantize(torch.randn(256, 1024), weights_format)])
        operands = PortableOperands(words, torch.ones(256), torch.ones(256), zeros(48, 1024), zeros(256, 48))
        for tile in tiles():
            multiply(operands, zeros(tile.m, 1024), zeros(tile.m, 128), activation="gelu_pytorch_tanh", tile=tile)
            multiply(operands, zeros(tile.m, 1024), zeros(tile.m, 256), residual=True, tile=tile)
        runs, run_of_rank = RowRuns(2), torch.tensor([0, 1] * 24, dtype=torch.int32)
        runs.rows = torch.zeros(8, dtype=torch.int32)
        of_runs = replace(operands, runs=runs, run_of_rank=run_of_rank)
        multiply(of_runs, zeros(8, 1024), zeros(8, 256))
        dense(words, 0, torch.bfloat16)


def mixtures():
    """Qwen3-30B-A3B's numbers of experts, with narrow ones, and all sizes of blocks; columns that end within one.

    Dense weights, and adapters, which are dense too, have the same tiles: the smallest and the largest suffice.
    """
    words = Words.pack([quantize(torch.randn(256, 256), "nvfp4")])
    ones = torch.ones(256)
    packed = experts.GroupedOperands(words, 128, ones, None)
    biased = experts.GroupedOperands(Words.pack([quantize(torch.randn(256, 224), "mxfp4")]), 128, ones, ones)
    dense_weights = experts.GroupedOperands(zeros(256, 256), 128, None, None)
    for bias in (None, torch.zeros(128)):
        experts.scores(zeros(4, 256), torch.zeros(128, 256), bias)
    for tokens in (64, 128, 256, 1024, 2049):
        experts.route(torch.zeros(tokens, 128), 8, True)
        groups = experts.group(torch.zeros(tokens, 8, dtype=torch.int32), 128)
        x, pairs = zeros(tokens, 256), 8 * tokens
        ends = NIGHTLY or tokens in (64, 2049)
        for operands in (packed, biased, dense_weights) if ends else (packed, biased):
            experts.input_gradient(operands, zeros(tokens, 128), groups, zeros(pairs, 256))
            # Products of several strips, which have no asynchronous products, take long to compile: one a format.
            if ends or operands is packed:
                experts.multiply(operands, x, groups, zeros(pairs, 64), silu=True)
            if ends or operands is biased:
                experts.multiply(operands, x, groups, zeros(pairs, 128))
        if ends:
            adapters_of_experts(packed, x, groups, torch.bfloat16)
        experts.combine(zeros(pairs, 256), torch.zeros(tokens, 8), x, True)
        if tokens in (64, 2049):  # float32, which has other tiles
            adapters_of_experts(packed, x.float(), groups, torch.float32)
            adapters_of_experts(biased, x, groups, torch.bfloat16)
            for operands in (packed, experts.GroupedOperands(torch.zeros(256, 256), 128, None, None)):
                experts.multiply(operands, x.float(), groups, torch.zeros(pairs, 64), silu=True)
                experts.input_gradient(operands, torch.zeros(tokens, 128), groups, torch.zeros(pairs, 256))
    assert groups.size == BLOCK_SIZES[-1]


def adapters_of_experts(operands, x, groups, dtype):
    """Ranks of gate and up together, and their gradients; large ones with the largest blocks, or in nightly runs."""
    large = groups.size == BLOCK_SIZES[-1] and dtype == torch.bfloat16
    for rank in (32, 128) if NIGHTLY or large else (32,):
        shrunk, up = torch.zeros(groups.count, rank, dtype=dtype), torch.zeros(2, 128, rank, dtype=dtype)
        down, grad = torch.zeros(2, rank, 256, dtype=dtype), torch.zeros(groups.count, 128, dtype=dtype)
        experts.dense_product(down, x, groups, shrunk)
        for silu in (False, True):
            out = torch.zeros(groups.count, 128 // (1 + silu), dtype=dtype)
            experts.multiply(operands, x, groups, out, silu, GroupedLora(shrunk, up))
        experts.dense_input_gradient(up, grad, groups, shrunk)
        experts.dense_input_gradient(down, shrunk, groups, torch.zeros(groups.count, 256, dtype=dtype), True)
        experts.dense_weight_gradient(grad, shrunk, groups, 128)
        experts.dense_weight_gradient(shrunk, x, groups, 128)


def decode_steps():
    state = DecodeState.empty(64, 8, 8, CPU)
    normed = replace(HEADS, q_norm=zeros(128), k_norm=zeros(128), eps=1e-6)
    for count, heads, rotary in (
        (4, HEADS, 128),
        (64, HEADS, 128),
        (2048, HEADS, 128),
        (64, normed, 128),
        (4, GEMMA, 256),
        (170, GEMMA, 256),
        (4, PHI, 96),
        (4, GPT_OSS, 64),
        (64, GPT_OSS, 64),
        (4, QWEN, 64),
        (64, QWEN, 64),
    ):
        rows = torch.zeros(count, dtype=torch.int32)
        qkv, cache = row_of(count, heads)
        attention.attend(qkv, cache, state, rows, rope_of(rotary), heads, 8)
    sampling_state = SamplingState.empty(CPU)
    rows = torch.zeros(2, dtype=torch.int32)
    for truncated, replayed in ((False, False), (True, False), (False, True)):
        sampling.draw(zeros(2, VOCABULARY), rows, state, sampling_state, truncated, replayed)
    noisy, plain = Norm(zeros(HIDDEN), torch.zeros(HIDDEN), 1e-6, 0.0), Norm(zeros(HIDDEN), None, 1e-6, 1.0)
    norms.rms_norm(zeros(4, HIDDEN), noisy)
    norms.add_normed(zeros(4, HIDDEN), zeros(4, HIDDEN), plain, noisy)
    for rows in (1, 64):
        linear.narrow_product(zeros(rows, 5120), zeros(96, 5120), zeros(32, 5120), zeros(96, 32), zeros(rows, 96))
    norms.clamped_glu(zeros(4, 2 * HIDDEN), 1.702, 7.0)
    linear.Copies([zeros(2, 4)], [torch.zeros(2, 4)])()
    heads, states = nets()
    delta.delta_step(*inputs_of(4, heads), heads, next(states.nets()), state, torch.zeros(4, dtype=torch.int32))


def nets():
    """The delta nets of Qwen3.5-27B and states of them."""
    heads = DeltaHeads(16, 48, 128, 128, zeros(10240, 4), zeros(48), zeros(48), zeros(128), 1e-6)
    return heads, DeltaStates.empty(heads, 1, 2, torch.bfloat16, CPU)


def inputs_of(count, heads):
    parts = [heads.channels, heads.parts[2], heads.value, heads.value]
    return zeros(count, sum(parts)).split(parts, 1)


def prompts():
    row = PromptRow.of(torch.from_numpy(pack([[1] * 200], [[1, 2, 3, 4]], PAGE, 200)), 200, 1, None)
    for heads, rotary in ((HEADS, 128), (GEMMA, 256), (PHI, 96), (GPT_OSS, 64), (QWEN, 64)):
        qkv, cache = row_of(200, heads)
        prompt_attention.attend_prompts(qkv, cache, row, rope_of(rotary), heads)
    heads, states = nets()
    placed = replace(row, slots=torch.zeros(1, dtype=torch.int32))
    delta.delta_prompts(*inputs_of(200, heads), heads, next(states.nets()), placed)


def in_fp8():
    state, normed = DecodeState.empty(64, 8, 8, CPU), replace(HEADS, q_norm=zeros(128), k_norm=zeros(128), eps=1e-6)
    for count, heads, rotary in ((64, normed, 128), (4, GEMMA, 256), (170, GEMMA, 256)):
        qkv, cache = row_of(count, heads, FP8)
        rows = torch.zeros(count, dtype=torch.int32)
        attention.attend(qkv, cache, state, rows, rope_of(rotary), heads, 8)
    row = PromptRow.of(torch.from_numpy(pack([[1] * 70], [[1, 2]], PAGE, 70)), 70, 1, None)
    prompt_attention.attend_prompts(*row_of(70, PHI, FP8), row, rope_of(96), PHI)


def updates():
    x, weight = zeros(4, HIDDEN), torch.ones(HIDDEN)
    _, inverses = norms.norm_forward(x, weight, 1e-6)
    norms.norm_backward(x, x, weight, inverses, True)
    norms.swiglu_forward(x, x)
    norms.swiglu_backward(x, x, x)
    for back in (False, True):
        for heads, weights in ((28, ()), (32, (zeros(128), zeros(128)))):
            query, key = zeros(4, heads, 128), zeros(4, 4, 128)
            norms.rotate(query, key, zeros(4, 128), zeros(4, 128), weights, 1e-6, (query, key) if back else ())
    both, sums = zeros(32, 2 * 768), torch.ones(4, 8)
    norms.swiglu_forward(both)
    norms.swiglu_backward(zeros(32, 768), both)
    experts.combine_gradients(zeros(4, 2048), zeros(32, 2048), sums)
    experts.group_many(torch.zeros(4608, 8, dtype=torch.int32), 128)
    targets, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    sampling.tile_statistics([(0, zeros(4, 8192))], targets, 1.0)
    sampling.tile_gradient(zeros(4, 8192), 0, targets, ones, ones, 1.0)
    sampling.tile_gradient(zeros(4, 8192), 0, targets, ones, ones, 1.0, ones, ones)


# Compilation of launches for a GPU that isn't here: a driver for Triton that compiles and starts nothing.


class _Driver:
    """As much of a driver as a launch asks for before it compiles."""

    def __init__(self, capability):
        self.number = 10 * capability[0] + capability[1]

    def get_current_device(self):
        # Triton keeps compiled kernels by device.
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.number, 32)


@contextmanager
def launches_for(capability, monkeypatch, *, all_variants=True):
    """A list to which every launch in the context adds its compiled kernel, instead of running it.

    Without `all_variants` only the last launch of each kernel is compiled for each precision of its tensors, at the end
    of the context.
    """
    compiled, last, run, (processors, shared_bytes) = [], {}, JITFunction.run, GPUS[capability]

    def compile_only(self, *args, grid, warmup, **kwargs):
        if all_variants:
            compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        else:
            dtypes = tuple(getattr(argument, "dtype", None) for argument in args)
            last[self, dtypes] = partial(run, self, *args, grid=grid, warmup=True, **kwargs)

    with monkeypatch.context() as patch:
        properties = SimpleNamespace(
            multi_processor_count=processors,
            shared_memory_per_block_optin=shared_bytes,
            shared_memory_per_multiprocessor=shared_bytes + 1024,
        )
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(launch, "_supported", lambda device: capability >= (9, 0))
        patch.setattr(JITFunction, "run", compile_only)
        triton.runtime.driver.set_active(_Driver(capability))
        try:
            yield compiled
            compiled += [compile_one() for compile_one in last.values()]
        finally:
            triton.runtime.driver._active = None


#: Of each generation one, of Ampere and Ada that with the least shared memory; all of them in nightly runs.
CAPABILITIES = GPUS if NIGHTLY else ((8, 6), (9, 0), (12, 0))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda pair: ".".join(map(str, pair)))
@pytest.mark.parametrize("part", [products, mixtures, decode_steps, prompts, updates, in_fp8])
def test_kernels_compile_and_fit(part, capability, monkeypatch, tmp_path):
    """Each kernel once for each generation and precision, as its last launch; in nightly runs all launches."""
    if part is in_fp8 and capability < LEAST_FP8_CAPABILITY:
        with pytest.raises(CompilationError, match="fp8e4nv not supported"), launches_for(capability, monkeypatch):
            part()
        return
    prompt_attention._reads.cache_clear()
    with launches_for(capability, monkeypatch, all_variants=NIGHTLY) as compiled:
        part()
    prompt_attention._reads.cache_clear()
    sizes = {kernel.metadata.name: kernel.metadata.shared for kernel in compiled}
    assert compiled
    assert all(kernel.asm["cubin"] for kernel in compiled)
    assert max(sizes.values()) <= GPUS[capability][1], sizes
    if capability == (9, 0):
        # Other kernels have no asynchronous product; to disassemble one takes as long as to compile it.
        products_of = {kernel.asm["cubin"] for kernel in compiled if "wgmma.mma_async" in kernel.asm["ptx"]}
        codes = [machine_code(cubin, tmp_path) for cubin in products_of]
        assert not [line for code in codes for line in overwritten(code)]
        assert any(map(loops_with_products, codes)) == (part in (products, mixtures, prompts, in_fp8))


TURN = """
.L_x_1:
        /*0000*/                   LDS.128 R56, [R3] ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R52, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0050*/              @P0 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(("pending", "count"), [("0x0", 0), ("0x1", 1), ("0x2", 1)])
def test_a_write_to_an_operand_that_is_still_read_is_seen(pending, count):
    """The second product's registers are written in the next turn; no product is left after a wait for all."""
    lines = overwritten(TURN.replace("{pending}", pending))
    assert lines == ["LDS.128 R56, [R3]"] * count
