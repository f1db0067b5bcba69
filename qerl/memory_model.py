"""The memory model: bytes of a GRPO step by a model's shape, a run's settings and the memory of GPUs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from qerl.checkpoints.shapes import HALF, DeltaNets, ModelShape
from qerl.formats.codecs import stored_bytes
from qerl.formats.layouts import BLOCK_COLUMNS
from qerl.kernels.packed_sequences import SINK_FEATURES
from qerl.kernels.state import FP8, page_bytes
from qerl.models.logprobs import COLUMNS, ROWS
from qerl.rl.packing import Sample, row_tokens, split
from qerl.rl.passes import USABLE, recomputed_blocks
from qerl.rollout.decoder import PROMPT_BUCKETS, bucket_of
from qerl.rollout.engine import FREE_SHARE, PREFILL_TOKENS, pages_for
from qerl.rollout.sampler import Completion
from qerl.settings.run import KvCacheDtype, NativeSettings, OptimizerSettings, RunSettings

# Bytes per token that a block keeps for its backward pass on a GPU, without adapters.


def kept_bytes(shape: ModelShape) -> int:
    """Bytes per token that a block keeps.

    These are the inputs of both norms and the first one's result, the rotated queries and keys, the values,
    attention's result and log-sum-exps, and what the MLP keeps. Attention with sinks keeps copies of its inputs and
    its result with more features, those of keys for all heads. Of a hybrid it is a block with a delta net, which
    most blocks have and which keeps more than attention.

    An MLP keeps its input, gate, up and their product. A mixture keeps gate, up and the outputs of a token's experts,
    with their numbers and weights and the router's probabilities, but not its input. A shared expert is an MLP, whose
    output and gate are kept, too.
    """
    mixture, mlp = shape.mixture, HALF * (shape.hidden + 3 * shape.intermediate)
    if mixture:
        mlp = HALF * (2 * shape.intermediate + mixture.chosen * shape.hidden)
        mlp += 4 * mixture.experts + (8 + 4 + 4) * mixture.chosen + 4
        mlp += HALF * (2 * shape.hidden + 3 * mixture.shared + 1) if mixture.shared else 0
    if shape.nets:
        return HALF * 3 * shape.hidden + net_kept_bytes(shape.nets) + 2 * 4 + mlp
    attention = 3 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width
    if mixture and mixture.biased:
        attention = 3 * shape.hidden + shape.query_width + 4 * (shape.query_width + shape.heads * SINK_FEATURES)
    return HALF * attention + 4 * shape.heads + 2 * 4 + mlp


def net_kept_bytes(nets: DeltaNets) -> int:
    """Bytes per token that a delta net keeps, without its input.

    They were counted in `qerl.models.delta_net`, whose chunks have 64 tokens. For each value head it keeps matrices of
    a chunk, decayed queries and keys, what the chunk's system gives, and the state before it, all in float32. Queries,
    keys and their products are kept for each key head. The rest are the 16-bit row of the convolution and the norm.
    """
    value_head = 12 * nets.key_dim + 24 * nets.value_dim + nets.key_dim * nets.value_dim // 16 + 1054
    key_head = 28 * nets.key_dim + 520
    return nets.value * value_head + nets.key * key_head


# The memory model: bytes of a GRPO step on one GPU, by a model's shape, a run's settings and the GPU's memory.
#
# It reads shapes alone and loads no weights. The choices that depend on free memory, the size of the KV cache and the
# recomputed blocks, come from the functions and constants that make them in a run.

Verdict = Literal["fits", "tight", "doesn't fit"]
#: Bytes of CUDA's context, which PyTorch's allocator doesn't count.
CONTEXT = 500_000_000
#: Bytes of workspaces of libraries, as on an H200. From the second step on they exist before the cache is made.
WORKSPACE = 300_000_000
#: Weights of an 8-bit optimizer's block, which share a float32 scale for each of the two states (bitsandbytes).
_OPTIMIZER_BLOCK = 256
#: Bytes of the tables of an 8-bit optimizer's two codes, which each tensor has.
_OPTIMIZER_TABLES = 2 * 256 * 4
#: Numbers of the smallest tensor whose moments an 8-bit optimizer has in 8 bits; smaller tensors have float32 moments.
_LEAST_IN_8_BITS = 4096


@dataclass(frozen=True)
class StepSettings:
    """The settings of a run that decide its memory; defaults are those of `RunSettings`."""

    weights: str
    rank: int
    prompts: int
    group: int
    prompt_tokens: int
    max_tokens: int
    recompute: bool | Literal["auto"]
    micro_batch_tokens: int = RunSettings.model_fields["micro_batch_tokens"].default
    kv_cache_gib: float | None = NativeSettings.model_fields["kv_cache_gib"].default
    kv_cache_dtype: KvCacheDtype = NativeSettings.model_fields["kv_cache_dtype"].default
    sleep: bool = NativeSettings.model_fields["sleep"].default
    optimizer: str = OptimizerSettings.model_fields["name"].default
    experts: bool = False
    """Whether the experts of a mixture have adapters, on gate, up and down."""
    runs: int = 1
    """Runs side by side on the base, which update one after another."""

    @property
    def sequences(self) -> int:
        """The sequences that a rollout decodes together."""
        return self.runs * self.prompts * self.group


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of a step; all but `context` are PyTorch's."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    adapter_copies: int
    """The sampler's copies of the adapter in bfloat16."""
    kv_cache: int
    kv_cache_wanted: int
    """The KV cache with which no sequence waits."""
    kv_cache_least: int
    """The KV cache of one sequence of the greatest length."""
    released: bool
    """Whether cache and CUDA graphs are released before the update."""
    graphs: int
    """The memory that is reserved for CUDA graphs."""
    prefill: int
    """The rollout's activations of prompts; a sequence that waited for pages counts as a prompt."""
    activations: int
    """The update's activations, logits and unpacked weights at their peak."""
    activations_least: int
    """The same, if `auto` recomputed every block."""
    recomputed: int
    """Blocks that the update recomputes."""
    capacity: float
    context: int = CONTEXT

    @property
    def resident(self) -> int:
        """Bytes that exist in every part of a step."""
        return self.weights + self.adapter + self.gradients + self.optimizer + self.adapter_copies

    @property
    def rollout_peak(self) -> int:
        """The peak of a rollout."""
        return self.resident + self.kv_cache + self.graphs + self.prefill + WORKSPACE

    @property
    def update_peak(self) -> int:
        """The peak of an update."""
        return self.resident + self._kept + self.activations

    @property
    def _kept(self) -> int:
        return 0 if self.released else self.kv_cache + self.graphs

    @property
    def peak(self) -> int:
        """The peak of the step."""
        return max(self.rollout_peak, self.update_peak)

    @property
    def least(self) -> int:
        """The peak of the step, if `auto` recomputed every block."""
        return max(self.rollout_peak, self.resident + self._kept + self.activations_least)

    @property
    def verdict(self) -> Verdict:
        """Whether the step fits, with a cache for at least one sequence.

        It is tight where it needs the share of the memory that `USABLE` leaves to fragmentation.
        """
        if self.least > self.capacity - self.context or self.kv_cache < self.kv_cache_least:
            return "doesn't fit"
        return "fits" if self.least <= USABLE * (self.capacity - self.context) else "tight"


def step_memory(shape: ModelShape, settings: StepSettings, capacity: float) -> PredictedMemory:
    """The memory of a step on a GPU that has `capacity` bytes for this process, with its context."""
    adapter = 4 * (shape.adapter_numbers(settings.rank) + _expert_numbers(shape, settings))
    parts = {
        "weights": weight_bytes(shape, settings.weights),
        "adapter": settings.runs * adapter,
        "gradients": settings.runs * adapter,
        "optimizer": settings.runs * _optimizer_bytes(shape, settings),
        "adapter_copies": settings.runs * _copied_bytes(shape, settings),
    }
    free = capacity - CONTEXT - sum(parts.values()) - WORKSPACE
    alone, wanted = cache_bytes(shape, settings)
    most = max(FREE_SHARE * free, 0) if settings.kv_cache_gib is None else settings.kv_cache_gib * 2**30
    cache, graphs = int(min(wanted, most)), graph_bytes(shape, settings)
    # An update starts without gradients, and without a cache that had all the memory it may use.
    released = settings.sleep or (cache < wanted and settings.kv_cache_gib is None)
    usable = USABLE * (free + adapter - (0 if released else cache + graphs))
    activations, recomputed = _activations(shape, settings, usable)
    forced = replace(settings, recompute=True) if settings.recompute == "auto" else settings
    return PredictedMemory(
        **parts,
        kv_cache=cache,
        kv_cache_wanted=wanted,
        kv_cache_least=alone,
        released=released,
        graphs=graphs,
        prefill=prefill_bytes(shape, settings, cache < wanted),
        activations=activations,
        activations_least=_activations(shape, forced, usable)[0],
        recomputed=recomputed,
        capacity=capacity,
    )


def that_fit(shape: ModelShape, settings: StepSettings, capacity: float) -> StepSettings | None:
    """The settings, or the next slower ones with which the step fits; None if it fits with none.

    Micro-batches are halved first, then the cache is released before updates, and then it is made smaller.
    """
    micro, longest = [settings.micro_batch_tokens], settings.prompt_tokens + settings.max_tokens
    while micro[-1] // 2 >= longest:
        micro.append(micro[-1] // 2)
    quarters = range(int(4 * cache_bytes(shape, settings)[1] / 2**30), 0, -1)
    caches: list[dict[str, Any]] = [{}, {"sleep": True}, *({"sleep": True, "kv_cache_gib": n / 4} for n in quarters)]
    for cache, tokens in itertools.product(caches, micro):
        slower = replace(settings, micro_batch_tokens=tokens, **cache)
        if step_memory(shape, slower, capacity).verdict == "fits":
            return slower
    return None


def runs_that_fit(shape: ModelShape, settings: StepSettings, capacity: float) -> int:
    """The most runs side by side, up to those of `settings`, whose step fits; 0 if one alone doesn't."""
    counts = range(settings.runs, 0, -1)
    return next((n for n in counts if step_memory(shape, replace(settings, runs=n), capacity).verdict == "fits"), 0)


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """Bytes of a base on the GPU: projections in `weights`, the rest in bfloat16, the blocks' norms in float32.

    Packed experts have whole blocks of columns, and biases in float32 too; a router and a shared expert's gate are
    dense.
    """
    projections = stored_bytes(shape.attention_format(weights), shape.packable) + stored_bytes("bf16", shape.dense)
    embeddings = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden * HALF
    block = (shape.query_width + 2 * shape.kv_width) * HALF * shape.biased + 2 * shape.hidden * 4
    if mixture := shape.mixture:
        columns_of = 1 if weights == "bf16" else BLOCK_COLUMNS
        linears = [(rows, -(-columns // columns_of) * columns_of) for rows, columns in shape.expert_linears]
        biases = sum(rows for rows, _ in linears) * (HALF + 4) * mixture.biased
        block += mixture.experts * (stored_bytes(weights, linears) + biases + 4 * shape.hidden)
        block += HALF * shape.hidden if mixture.shared else 0
    return shape.layers * block + projections + embeddings


def _expert_numbers(shape: ModelShape, settings: StepSettings) -> int:
    """Numbers of all experts' adapters."""
    if shape.mixture is None or not settings.experts:
        return 0
    return shape.layers * shape.mixture.experts * settings.rank * sum(map(sum, shape.adapted_of_experts))


def _copied_bytes(shape: ModelShape, settings: StepSettings) -> int:
    """Bytes of the sampler's copies of the adapters, in which B of gate and up is block-diagonal."""
    attention = shape.adapter_numbers(-(-settings.rank // 16) * 16)
    zeros = 0
    if shape.mixture is not None and settings.experts and len(shape.adapted_of_experts) == 3:
        zeros = 2 * shape.layers * shape.mixture.experts * settings.rank * shape.mixture.intermediate
    return HALF * (attention + _expert_numbers(shape, settings) + zeros)


def _optimizer_bytes(shape: ModelShape, settings: StepSettings) -> int:
    """Bytes of the two moments of every trained number."""

    def moments(numbers: int) -> int:
        """Bytes of the moments of a tensor with so many numbers, in 8 bits."""
        if numbers < _LEAST_IN_8_BITS:
            return 2 * 4 * numbers
        return 2 * numbers + 2 * 4 * -(-numbers // _OPTIMIZER_BLOCK) + _OPTIMIZER_TABLES

    if settings.optimizer == "adamw":
        return 2 * 4 * (shape.adapter_numbers(settings.rank) + _expert_numbers(shape, settings))
    linears = [*shape.packable, *shape.dense]
    if settings.experts and shape.mixture is not None:  # all experts' A are one tensor, and all B
        stacked = [
            (shape.mixture.experts * rows, shape.mixture.experts * width) for rows, width in shape.adapted_of_experts
        ]
        linears += stacked * shape.layers
    return sum(moments(settings.rank * width) for linear in linears for width in linear)


def cache_bytes(shape: ModelShape, settings: StepSettings) -> tuple[int, int]:
    """Bytes of the KV cache of one sequence, and of the cache with which no sequence waits.

    Both have the states of delta nets, with two rows that no sequence has (`qerl.kernels.state`).
    """
    state, sequences = shape.nets.state_bytes if shape.nets else 0, settings.sequences
    dim, dtype = shape.query_width // shape.heads, FP8 if settings.kv_cache_dtype == "fp8" else torch.bfloat16
    page = shape.attentions * page_bytes(shape.kv_width // dim, dim, dtype)
    alone, wanted = pages_for(settings.prompt_tokens + settings.max_tokens, sequences)
    return alone * page + 3 * state, wanted * page + (sequences + 2) * state


def graph_bytes(shape: ModelShape, settings: StepSettings) -> int:
    """Bytes of the tensors of the largest decode graph and of the largest graph of prompts.

    All graphs share one pool, which nothing else can use (`qerl.host.gpus.allocatable_bytes`).
    """
    rows = bucket_of(settings.sequences)
    prompts = min(PROMPT_BUCKETS[-1], settings.runs * settings.prompts * settings.prompt_tokens)
    return _block_bytes(shape, settings, rows + prompts) + rows * shape.vocabulary * HALF


def prefill_bytes(shape: ModelShape, settings: StepSettings, interrupts: bool) -> int:
    """Bytes of a block's tensors in prefill. Interrupted sequences are computed again, in the largest batches."""
    prompts = settings.runs * settings.prompts * settings.prompt_tokens
    tokens = PREFILL_TOKENS if interrupts else min(PREFILL_TOKENS, prompts)
    return _block_bytes(shape, settings, tokens)


def _block_bytes(shape: ModelShape, settings: StepSettings, tokens: int) -> int:
    """Bytes of the tensors of a block that the engine computes, including a mixture's."""
    widths = 2 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + shape.intermediate
    widths += _shrunk_width(shape, settings)
    if shape.mixture:
        widths += shape.mixture.chosen * shape.hidden + 2 * shape.hidden
    if shape.mixture and shape.mixture.shared:
        widths += shape.mixture.shared + shape.hidden
    if shape.nets:  # its layers' outputs, and in float32 the convolution's and the recurrence's
        nets = shape.nets
        widths += 3 * nets.channels + 4 * nets.value_width
    return HALF * tokens * widths


def _shrunk_width(shape: ModelShape, settings: StepSettings) -> int:
    """Outputs of A of a token's experts."""
    if shape.mixture is None or not settings.experts:
        return 0
    return len(shape.adapted_of_experts) * settings.rank * shape.mixture.chosen


def kept_of_experts(shape: ModelShape, settings: StepSettings) -> int:
    """Bytes per token that a block's adapters of experts keep: the inputs of both products, and of B."""
    if shape.mixture is None or not settings.experts:
        return 0
    return HALF * (shape.hidden + shape.intermediate + _shrunk_width(shape, settings))


def _passes_of_experts(shape: ModelShape, settings: StepSettings) -> int:
    """Bytes of a pass over a block's experts: A and B of gate and up as they multiply, and their float32 gradients."""
    if shape.mixture is None or not settings.experts:
        return 0
    widths, layers = shape.hidden + 2 * shape.mixture.intermediate, len(shape.adapted_of_experts) - 1
    return (HALF + 4) * shape.mixture.experts * layers * settings.rank * widths


def longest_row(settings: StepSettings) -> int:
    """Tokens of the largest micro-batch, if every completion has the greatest length."""
    completion = Completion([0] * settings.max_tokens, [], False)
    groups = ([number] * settings.prompt_tokens for number in range(settings.prompts))
    samples = [Sample(prompt, completion, 0.0, 0.0) for prompt in groups for _ in range(settings.group)]
    return max(row_tokens(samples, row) for row in split(samples, settings.micro_batch_tokens))


def _activations(shape: ModelShape, settings: StepSettings, usable: float) -> tuple[int, int]:
    """Bytes of an update's activations at their peak, and the number of blocks that it recomputes.

    `usable` bytes decide both for `auto`, as in `qerl.rl.passes.Recomputation`.
    """
    tokens = longest_row(settings)
    # Inputs of the adapters' second products: of q, k, v, o, gate, up and down.
    layers = max(len(shape.linears), len(shape.linears[4:] + shape.net_linears))
    kept = tokens * (kept_bytes(shape) + HALF * layers * settings.rank + kept_of_experts(shape, settings))
    of_input = tokens * HALF * shape.hidden
    logits, tile = tokens * shape.vocabulary * HALF, ROWS * COLUMNS * HALF

    def needed(free: float) -> int:
        return recomputed_blocks(shape.layers, free, kept, of_input)

    unpacked, keeps_logits = 0, False
    count = shape.layers if settings.recompute is True else 0
    if settings.recompute == "auto":
        # Experts are never unpacked.
        dense = stored_bytes("bf16", shape.packable) if shape.attention_format(settings.weights) != "bf16" else 0
        unpacked = dense if needed(usable - logits - dense) == 0 else 0
        count = needed(usable - USABLE * unpacked)
        keeps_logits = count == 0 and needed(usable - USABLE * unpacked - logits) == 0
    # A backward pass has the gradients of gate, up and its block's input beside what is saved. A mixture has those of
    # its experts' inner features, and those of gate and up in two layouts, beside copies of both; before and after
    # these, it has those of its experts' outputs or inputs. With all blocks recomputed, one has its activations too.
    inner, widths = shape.intermediate, shape.hidden
    if shape.mixture is None:
        widths += 2 * inner
    else:
        widths += max(7 * inner, shape.mixture.chosen * shape.hidden + 3 * inner) + 2 * shape.mixture.shared
    running = tokens * HALF * (widths + _shrunk_width(shape, settings))
    running += _passes_of_experts(shape, settings) + (kept if count == shape.layers else 0)
    saved = (shape.layers - count) * kept + count * of_input
    return unpacked + saved + max(running + tile, logits if keeps_logits else 0), count
