"""The device state of decoded sequences, which steps read and advance without the host, and what operations share."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import pi, sqrt
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from qerl.kernels.packed_sequences import Packing

# Sizes and norms that the operations of a decode step share.

#: Tokens per page of the KV cache.
PAGE = 64
#: Logits that one program reads when a token is drawn. The random numbers of a token depend on it.
CHUNK = 4096
#: Cosines and sines [positions, R / 2] of the R elements of a head that rotate.
Rope = tuple[Tensor, Tensor]


class RowRuns:
    """The run of each row of x in the present pass of a cohort, whose runs share a base and have adapters of their own.

    The decoder sets `rows` before a pass, also while a graph is captured; norms and products of several runs read it.
    """

    def __init__(self, count: int) -> None:
        #: The number of runs.
        self.count = count
        self.rows = torch.zeros(0, dtype=torch.int32)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's tensors, which are the policy's own: (offset + weight + noise) x / rms(x).

    With `runs`, weight and noise have a row for each run.
    """

    weight: Tensor
    noise: Tensor | None
    eps: float
    offset: float
    runs: RowRuns | None = None


@dataclass(frozen=True)
class Heads:
    """Attention heads of a block: numbers of `query` and `kv` heads of size `dim`, and the norms of both, if any."""

    query: int
    kv: int
    dim: int
    scale: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    #: 0 for norms as in Qwen3, which round before they scale, and 1 for those of Gemma, (1 + w) x / rms(x).
    norm_offset: float = 0.0
    #: The tokens that a token sees, itself included; None: all so far.
    window: int | None = None
    #: The score [query] of a further key without a value, if any.
    sinks: Tensor | None = None
    #: Whether a gate of its results follows each query head, as in Qwen3.5: they are multiplied by the gate's sigmoid.
    gated: bool = False

    @property
    def pitch(self) -> int:
        """Features of qkv from one query head to the next."""
        return 2 * self.dim if self.gated else self.dim

    @property
    def width(self) -> int:
        """Features of qkv: query heads, each with its gate if there are any, then keys and values."""
        return self.query * self.pitch + 2 * self.kv * self.dim

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [n, query, dim], keys and values [n, kv, dim], and gates as queries or None, of qkv [n, width]."""
        heads = qkv.view(len(qkv), -1, self.dim)
        queries, keys, values = heads.split([self.query * self.pitch // self.dim, self.kv, self.kv], dim=1)
        return (queries[:, ::2], keys, values, queries[:, 1::2]) if self.gated else (queries, keys, values, None)


def pages_per_split(pages: int) -> int:
    """The number of pages to which one program attends, by the pages of its sequence.

    Short sequences need many programs to keep the GPU busy, long ones few results to combine.
    `qerl.kernels.triton.attention` has the same rule for the device.
    """
    return next(size for size in (1, 2, 4, 8, 16) if pages <= 8 * size * size or size == 16)


def splits_of(pages: int) -> int:
    """The most splits of a sequence of up to `pages` pages, rounded up to a power of two to need few graphs."""
    most = max(-(-count // pages_per_split(count)) for count in range(1, pages + 1))
    return 1 << (most - 1).bit_length()


# The activations of a gate that products apply themselves: out = activation(gate) * up.

#: As `hidden_act` of a configuration names them; "gelu_pytorch_tanh" is gelu's approximation with tanh.
Activation = Literal["silu", "gelu_pytorch_tanh"]

_ROOT = sqrt(2 / pi)
#: a and b of each activation: x * sigmoid(a * x + b * x^3). For gelu, (1 + tanh(u)) / 2 is sigmoid(2 * u).
COEFFICIENTS: dict[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_pytorch_tanh": (2 * _ROOT, 2 * _ROOT * 0.044715),
}


def gated(both: Tensor, activation: Activation, out: Tensor) -> None:
    """Write activation(gate) * up [B, N / 2] of gate and up side by side [B, N] to `out`, by PyTorch."""
    gate, up = both.chunk(2, dim=-1)
    silu = activation == "silu"
    torch.mul(nn.functional.silu(gate) if silu else nn.functional.gelu(gate, approximate="tanh"), up, out=out)


# The device state of decoded sequences and of sampling, which a step reads and advances without the host.

#: The most stop tokens that a model may have.
MAX_STOPS = 16
IDLE = -1


@dataclass(frozen=True)
class DecodeState:
    """State of `count` sequences. One more slot is always idle; padding rows of a batch use it."""

    position: Tensor  # [slots + 1] int32, position of the last token of each sequence, or IDLE
    drawn: Tensor  # [slots + 1] int32, tokens drawn so far, including those before an interruption
    token: Tensor  # [slots + 1] int64, the last token of each sequence
    limit: Tensor  # [slots + 1] int32, number of tokens to draw
    given: Tensor  # [slots + 1] int32, number of the first tokens of `tokens` that are there before they are drawn
    sequence: Tensor  # [slots + 1] int64, key of the sequence's draws
    run: Tensor  # [slots + 1] int32, the run of a cohort whose policy draws the sequence; 0 without a cohort
    tokens: Tensor  # [slots + 1, tokens] int32, drawn so far
    logprobs: Tensor  # [slots + 1, tokens] float32, of `tokens`
    pages: Tensor  # [slots + 1, pages] int32, pages of each sequence in the cache; page 0 belongs to none

    @classmethod
    def empty(cls, count: int, tokens: int, pages: int, device: torch.device) -> DecodeState:
        """`count` idle slots for up to `tokens` drawn tokens and `pages` pages each."""
        rows = count + 1
        return cls(
            position=torch.full((rows,), IDLE, dtype=torch.int32, device=device),
            drawn=torch.zeros(rows, dtype=torch.int32, device=device),
            token=torch.zeros(rows, dtype=torch.int64, device=device),
            limit=torch.zeros(rows, dtype=torch.int32, device=device),
            given=torch.zeros(rows, dtype=torch.int32, device=device),
            sequence=torch.zeros(rows, dtype=torch.int64, device=device),
            run=torch.zeros(rows, dtype=torch.int32, device=device),
            tokens=torch.zeros(rows, tokens, dtype=torch.int32, device=device),
            logprobs=torch.zeros(rows, tokens, dtype=torch.float32, device=device),
            pages=torch.zeros(rows, pages, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        """The number of slots for sequences, which is also the index of the idle slot."""
        return len(self.token) - 1


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of each run on the device, so that a captured graph reads their present values."""

    scale: Tensor  # [runs, 2] float32: 1 / temperature, and the weight of the noise (0: greedy)
    seed: Tensor  # [runs] int64
    top_p: Tensor  # [runs] float32
    top_k: Tensor  # [runs] int64; the largest integer without truncation
    stops: Tensor  # [MAX_STOPS] int32, padded with -1; runs share them, as they share the model

    @classmethod
    def empty(cls, device: torch.device, runs: int = 1) -> SamplingState:
        """A state with default values, which `set` then changes."""
        return cls(
            scale=torch.ones(runs, 2, device=device),
            seed=torch.zeros(runs, dtype=torch.int64, device=device),
            top_p=torch.ones(runs, device=device),
            top_k=torch.ones(runs, dtype=torch.int64, device=device),
            stops=torch.full((MAX_STOPS,), -1, dtype=torch.int32, device=device),
        )

    def set(
        self, *, temperature: float, seed: int, top_p: float, top_k: int, stops: Collection[int], run: int = 0
    ) -> None:
        """Set a run's parameters. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 don't truncate."""
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"the model has {len(stops)} stop tokens, but the native engine supports {MAX_STOPS}; use engine=vllm"
            )
        self.scale[run].copy_(torch.tensor([1 / (temperature or 1.0), float(temperature > 0)]))
        self.seed[run].fill_((seed + 2**63) % 2**64 - 2**63)  # the signed number with the lowest 64 bits
        self.top_p[run].fill_(max(top_p, torch.finfo(torch.float32).tiny))  # rounded to 0 it would keep no token
        self.top_k[run].fill_(top_k or torch.iinfo(torch.int64).max)
        padded = [*sorted(stops), *[-1] * (MAX_STOPS - len(stops))]
        self.stops.copy_(torch.tensor(padded, dtype=torch.int32))


# The KV cache of decoded sequences: keys and values in pages, in the model's dtype or rounded to FP8.

#: The dtype of rounded elements, with 4 bits of exponent and 3 of mantissa.
FP8 = torch.float8_e4m3fn
#: The compute capability from which GPUs convert to and from FP8; Triton has no conversion for older ones.
LEAST_FP8_CAPABILITY = (8, 9)
#: The largest element of a key or value is a scale times [128, 256). FP8 has numbers up to 448.
LARGEST = 128.0
#: A key or value with smaller elements gets the scale of this one.
SMALLEST = 2.0**-100
#: The bits of a float32's exponent, with which it is a power of two.
EXPONENT = 0x7F800000


@dataclass(frozen=True)
class KVCache:
    """Pages of keys and values of all blocks, or of one block, then without the first dimension.

    In FP8 each key and each value of a head has a scale.
    """

    data: Tensor  # [layers, pages, 2, Hkv, PAGE, D], in the model's dtype or FP8
    scales: Tensor | None = None  # [layers, pages, 2, Hkv, PAGE] float32, with FP8

    @classmethod
    def empty(cls, layers: int, pages: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache of zeros in `dtype`, because attention multiplies masked tokens by 0."""
        data = torch.zeros(layers, pages, 2, heads.kv, PAGE, heads.dim, dtype=dtype, device=device)
        return cls(data, torch.zeros(data.shape[:-1], device=device) if dtype == FP8 else None)

    @property
    def pages(self) -> int:
        """Number of pages of a block."""
        return self.data.shape[-5]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def blocks(self) -> Iterator[KVCache]:
        """The cache of each block."""
        for number, data in enumerate(self.data):
            yield KVCache(data, None if self.scales is None else self.scales[number])

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy the pages `source` [n] to `target` [n] in each block."""
        for block in self.blocks():
            # Bytes, because not every operation knows FP8.
            for part in (_as_bytes(block.data), block.scales):
                if part is not None:
                    part[target] = part[source]

    def put(self, page: Tensor, place: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, Hkv, D] of tokens at `place` [n] in `page` [n] of a block.

        Returns them as `pages_of` does.
        """
        if self.scales is None:
            self.data[page, 0, :, place], self.data[page, 1, :, place] = key, value
            return key, value
        both, scales = rounded(torch.stack([key, value], 1))
        _as_bytes(self.data)[page, :, :, place] = both.view(torch.uint8)
        self.scales[page, :, :, place] = scales
        return _exact(both, scales, key.dtype).unbind(1)  # type: ignore[return-value]

    def pages_of(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys and values [B, P, 2, Hkv, PAGE, D] of the pages [B, P] of a block."""
        if self.scales is None:
            return self.data[pages]
        return _exact(_as_bytes(self.data)[pages].view(FP8), self.scales[pages], dtype)


def page_bytes(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page of a block's keys and values, for so many KV heads of size `dim`."""
    return 2 * heads * PAGE * (dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [..., D] in FP8, and the scales [...] by which they are multiplied."""
    peak = x.float().abs().amax(-1).clamp(min=SMALLEST)
    # A power of two, so that a rounded element times its scale is exact in bfloat16: prompts attend in bfloat16 to what
    # decode steps read in FP8.
    scales = (peak.view(torch.int32) & EXPONENT).view(torch.float32) / LARGEST
    return (x.float() / scales[..., None]).to(FP8), scales


def _exact(both: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (both.float() * scales[..., None]).to(dtype)


def _as_bytes(data: Tensor) -> Tensor:
    return data.view(torch.uint8) if data.dtype == FP8 else data


# What a gated delta net is made of, and what it keeps of each sequence: a few inputs and a recurrent state.


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a delta net: `key` heads for queries and keys of `key_dim`, `value` heads of `value_dim`.

    Channels C are queries, keys and values. Consecutive value heads share a query and a key head.
    """

    key: int
    value: int
    key_dim: int
    value_dim: int
    convolution: Tensor  # [C, taps], of the newest token last
    log_rate: Tensor  # [value], logarithm of the decay's rate
    rate_bias: Tensor  # [value]
    norm: Tensor  # [value_dim], weight of the norm of each head's output
    eps: float

    @property
    def channels(self) -> int:
        """C, the inputs of the convolution."""
        return 2 * self.key * self.key_dim + self.value * self.value_dim

    @property
    def taps(self) -> int:
        """Tokens that the convolution reads, the present one included."""
        return self.convolution.shape[1]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        return self.key * self.key_dim, self.key * self.key_dim, self.value * self.value_dim


@dataclass(frozen=True)
class DeltaState:
    """What one delta net keeps of the sequences in R rows."""

    recent: Tensor  # [R, taps - 1, C], inputs of the convolution at the last tokens, zeros before the first one
    recurrent: Tensor  # [R, value, key_dim, value_dim] float32


@dataclass(frozen=True)
class DeltaStates:
    """The states of all delta nets of a model: a row for each slot, one that is idle, and one that is held.

    The held row has the state after a prompt for completions of its group that still wait for a slot.
    """

    recent: Tensor  # [nets, slots + 2, taps - 1, C]
    recurrent: Tensor  # [nets, slots + 2, value, key_dim, value_dim] float32

    @classmethod
    def empty(cls, heads: DeltaHeads, nets: int, slots: int, dtype: torch.dtype, device: torch.device) -> DeltaStates:
        """Zeros for `slots` sequences; `dtype` is that of the model."""
        recent = torch.zeros(nets, slots + 2, heads.taps - 1, heads.channels, dtype=dtype, device=device)
        size = (nets, slots + 2, heads.value, heads.key_dim, heads.value_dim)
        return cls(recent, torch.zeros(size, dtype=torch.float32, device=device))

    @property
    def group_row(self) -> int:
        """The row of a waiting group."""
        return self.recent.shape[1] - 1

    @property
    def idle(self) -> int:
        """The row of the idle slot."""
        return self.group_row - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.recent.nbytes + self.recurrent.nbytes

    def nets(self) -> Iterator[DeltaState]:
        """The states of each net."""
        return map(DeltaState, self.recent, self.recurrent)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` [n] to rows `target` [n]; all are read before one is written."""
        for net in self.nets():
            net.recent[target] = net.recent[source]
            net.recurrent[target] = net.recurrent[source]


def state_bytes(heads: DeltaHeads, dtype: torch.dtype) -> int:
    """Bytes of a sequence's state in one net."""
    recurrent = heads.value * heads.key_dim * heads.value_dim * torch.float32.itemsize
    return recurrent + (heads.taps - 1) * heads.channels * dtype.itemsize


# Prompts packed in one row of tokens on the device, with positions, places in the cache and blocks of queries.

#: Queries of a prompt per program of attention.
QUERY_BLOCK = 128


@dataclass(frozen=True)
class PromptRow:
    """`n` tokens of concatenated prompts; padding, if any, is a further prompt at the end."""

    ids: Tensor  # [n] int32
    positions: Tensor  # [n] int32, of each token in its prompt
    places: Tensor  # [n] int32, place in the cache: page * PAGE + offset in the page
    last: Tensor  # [prompts] int32, index of each prompt's last token; 0 for padding prompts of a graph
    blocks: Tensor  # [blocks, 3] int32, for each block of queries: its first query, and its prompt's start and end
    #: The prompts' lengths, for attention prompt by prompt; None in graphs, which must not depend on the host.
    packing: Packing | None
    runs: Tensor  # [n] int32, the run of a cohort that each token is of
    #: [prompts] int32, the rows of delta nets' states that get those after each prompt; None without delta nets.
    slots: Tensor | None = None

    @classmethod
    def of(
        cls, row: Tensor, tokens: int, prompts: int, packing: Packing | None, slots: Tensor | None = None
    ) -> PromptRow:
        """Views of the fields in a `row` from `pack`; `tokens` and `prompts` include a graph's padding."""
        parts = [tokens, tokens, tokens, tokens, prompts]
        ids, positions, places, runs, last, blocks = row.split([*parts, len(row) - sum(parts)])
        return cls(ids, positions, places, last, blocks.view(-1, 3), packing, runs, slots)

    @property
    def starts(self) -> Tensor:
        """[prompts] int32, each prompt's first token. That of padding isn't before its end."""
        return pad(self.ends[:-1], (1, 0))

    @property
    def ends(self) -> Tensor:
        """[prompts] int32, the place after each prompt's last token; 1 for padding prompts of a graph."""
        return self.last + 1


def pack(
    prompts: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    page: int,
    tokens: int,
    most: int | None = None,
    runs: Sequence[int] | None = None,
) -> np.ndarray:
    """The concatenated fields of a `PromptRow` of `tokens`, int32.

    `page` is the number of tokens per page. Padding has position 0 and goes to page 0, which no sequence owns. With
    `most`, prompts and blocks are padded with empty ones, so that their numbers don't depend on the prompts. `runs`
    names each prompt's run, 0 by default.
    """
    ends = list(accumulate([len(prompt) for prompt in prompts], initial=0))
    row = np.zeros((4, tokens), dtype=np.int32)
    for start, prompt, page_numbers, run in zip(ends[:-1], prompts, pages, runs or [0] * len(prompts), strict=True):
        position = np.arange(len(prompt))
        place = np.asarray(page_numbers)[position // page] * page + position % page
        row[:3, start : start + len(prompt)] = prompt, position, place
        row[3, start : start + len(prompt)] = run
    blocks = _blocks([*ends, tokens] if ends[-1] < tokens else ends)
    if most is not None:
        blocks += [(0, 0, 0)] * (tokens // QUERY_BLOCK + most + 1 - len(blocks))
    last = np.zeros(most or len(prompts), dtype=np.int32)
    last[: len(prompts)] = np.array(ends[1:]) - 1
    return np.concatenate([row.ravel(), last, np.array(blocks, dtype=np.int32).ravel()])


def _blocks(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks of queries of the prompts between `ends`; blocks with the most keys come first."""
    blocks = [(start, first, end) for first, end in pairwise(ends) for start in range(first, end, QUERY_BLOCK)]
    return sorted(blocks, key=lambda block: block[1] - block[0])


# Groups of a mixture's pairs, a token and one of its experts: blocks that each have pairs of one expert.
#
# A grouped product multiplies each block by its expert's weights. The number of blocks depends on nothing but the
# numbers of tokens and experts, so that no host waits for the choice of experts and CUDA graphs can have it.

#: Pairs of a block, and the most pairs of an expert on average with which blocks have that size. An expert that more
#: tokens choose has several blocks, which decode its weights again; a larger block has more pairs that don't exist.
#: They were chosen by times of 1 to 2,048 tokens of Qwen3-30B-A3B and 1 to 512 of gpt-oss-20b on an H200, of which
#: docs/lab/mixtures.md names those that weren't timed with the present kernel.
_MOST_ON_AVERAGE = {8: 4, 16: 8, 32: 16, 64: 128}
BLOCK_SIZES = (*_MOST_ON_AVERAGE, 128)


@dataclass(frozen=True)
class Groups:
    """The pairs of T tokens with k experts each. Pair p is token p // k with its expert number p % k."""

    pairs: Tensor
    """Pairs of each block, int32 [blocks, size]; `count` where a block has fewer."""
    experts: Tensor
    """Expert of each block, int32 [blocks]; -1 of blocks without pairs, whose `pairs` have no meaning."""
    count: int
    """Number of pairs, T k."""
    chosen: int
    """Experts of a token, k."""

    @classmethod
    def empty(cls, tokens: int, chosen: int, experts: int, device: torch.device) -> Groups:
        """Room for any choice of experts, which a kernel fills."""
        size = block_size(tokens, chosen, experts)
        blocks = most_blocks(tokens, chosen, experts, size)
        pairs = torch.empty(blocks, size, dtype=torch.int32, device=device)
        return cls(pairs, torch.empty(blocks, dtype=torch.int32, device=device), tokens * chosen, chosen)

    @property
    def size(self) -> int:
        """Pairs of a block."""
        return self.pairs.shape[1]


@dataclass(frozen=True)
class GroupedLora:
    """LoRA of every expert on a product's pairs, which adds B [N, R] of a pair's expert times its A x [R]."""

    shrunk: Tensor
    """A x of each pair, [pairs, R]."""
    up: Tensor
    """B of each expert with the adapter's scale, [experts, N, R]."""


def block_size(tokens: int, chosen: int, experts: int) -> int:
    """Pairs of a block. It depends on how many an expert has on average, but not on the choice of experts."""
    sizes = (size for size, most in _MOST_ON_AVERAGE.items() if tokens * chosen <= most * experts)
    return next(sizes, BLOCK_SIZES[-1])


def most_blocks(tokens: int, chosen: int, experts: int, size: int) -> int:
    """The most blocks that pairs of `tokens` with `chosen` of `experts` can fill, however they are chosen."""
    pairs = tokens * chosen
    used = min(pairs, experts)
    full = (pairs - used) // size
    return used if tokens <= size else used + full


# Buffers that keep their contents between launches.


class Workspace:
    """Buffers in which the thread blocks of a launch exchange sums and counts.

    All launches on a device share them, so no two may run at the same time on different streams.
    """

    def __init__(self, device: torch.device) -> None:
        # Triton's interpreter runs kernels on the CPU.
        gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 8
        self._device = device
        #: No buffer is ever freed, since captured graphs contain the addresses of those that later were too small.
        self._buffers: dict[str, list[Tensor]] = defaultdict(list)

    def get(self, name: str, count: int, fill: int = 0) -> Tensor:
        """A buffer of at least `count` 32-bit words, which are initially `fill`."""
        buffers = self._buffers[name]
        if not buffers or buffers[-1].numel() < count:
            buffers.append(torch.full((max(count, 1),), fill, dtype=torch.int32, device=self._device))
        return buffers[-1]


@cache
def workspace(device: torch.device) -> Workspace:
    """The buffers of a device."""
    return Workspace(device)


# Dry runs: all kernels of a pass are compiled at the same time, before the pass runs.
#
# Otherwise each kernel is compiled by its first launch, and the others wait. Triton takes 0.2 to 1.5 s for a kernel and
# 0.35 s for the C code of its launcher, and NVRTC up to 2.5 s. A first GRPO step of 7B has 22 kernels of Triton and 10
# of NVRTC.

#: The threads of the present dry run, and what they compile, by function and arguments.
_present: ContextVar[tuple[ThreadPoolExecutor, dict[Hashable, Future[Any]]] | None] = ContextVar(
    "dry_run", default=None
)


@contextmanager
def dry_run(device: torch.device) -> Iterator[None]:
    """A block in which launches of this package's kernels on a GPU compile them and run nothing.

    At its end all are compiled. What isn't a launch runs, on memory that no kernel has written, so no number from the
    block means anything. Raises what the compilers raise.
    """
    from triton import AsyncCompileMode

    compiled: dict[Hashable, Future[Any]] = {}
    # A new thread's GPU is the first one. Compilers work without Python's lock.
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        token = _present.set((threads, compiled))
        try:
            with AsyncCompileMode(threads) as mode:
                yield
        finally:
            _present.reset(token)
        # Triton compiles a launcher when `run` is read.
        kernels = [kernel.result() for kernel in mode.future_kernels.values()]
        for future in (*compiled.values(), *(threads.submit(getattr, kernel, "run") for kernel in kernels)):
            future.result()


def in_dry_run() -> bool:
    """Whether launches compile kernels and run nothing."""
    return _present.get() is not None


def compile_later(compiler: Callable[..., Any], *arguments: Hashable) -> bool:
    """Whether this is a dry run. A thread then calls `compiler`, once for equal arguments."""
    if (present := _present.get()) is None:
        return False
    threads, compiled = present
    if (compiler, arguments) not in compiled:
        compiled[compiler, arguments] = threads.submit(compiler, *arguments)
    return True


# Capture of GPU work in CUDA graphs.

Graph = TypeVar("Graph")


def capture(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Capture `work`, which has run before, in a CUDA graph. The returned function replays it on the same tensors.

    `memory` is a handle of `torch.cuda.graph_pool_handle` for its allocations.
    """
    if in_dry_run():
        raise RuntimeError("work is captured in a dry run, whose launches do nothing: a defect of the caller")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        work()
    return graph.replay


def captured(work: Callable[[], None], memory: Any = None) -> Callable[[], None]:
    """Run `work` once, which compiles kernels and initializes libraries, then `capture` it."""
    work()
    return capture(work, memory)


class GraphBySize(dict[Hashable, Graph]):
    """Graphs by the sizes of their tensors and by what else differs, each captured at its first use.

    They share the memory pool `memory`, so no two may run at the same time; None on a CPU, where nothing is captured.
    """

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def at(self, size: Hashable, make: Callable[[], Graph]) -> Graph:
        """The graph of this size, or what `make` returns, which is then the size's graph."""
        if size not in self:
            self[size] = make()
        return self[size]
