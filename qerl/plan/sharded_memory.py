"""The memory model of sharded full fine-tuning: bytes of a GRPO step on each of several GPUs, and how many it needs.

No run on several GPUs was measured, so the numbers are the formulas of docs/scaling.md alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.checkpoints.folder import read_config
from qerl.checkpoints.model_shape import ModelShape
from qerl.plan.memory_model import (
    CONTEXT,
    WORKSPACE,
    StepSettings,
    Verdict,
    activation_bytes,
    cache_bytes,
    graph_bytes,
    prefill_bytes,
    weight_bytes,
)
from qerl.random_models.checkpoint import model_config
from qerl.rl.activation_checkpointing import USABLE
from qerl.rollout.engine.engine import FREE_SHARE
from qerl.settings.models import HubModel, LocalModel
from qerl.settings.run import RunSettings

#: Bytes of a weight and of its gradient, both float32.
WEIGHT, GRADIENT = 4, 4
#: Bytes of a weight's two moments: float32, or codes with scales (`qerl.rl.sharded_optimizer`).
MOMENTS = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256}
#: Prompts of unknown length count as this many tokens, the paper's (Tables 5 to 8).
PROMPT_TOKENS = 256
#: The numbers of GPUs that are tried: one, and those that a node of eight, and several nodes, divide into.
NUMBERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ShardedMemory:
    """Bytes of a step on each GPU."""

    shards: int
    """Shards of weights and moments."""
    gradients: int
    """Shards of gradients, which exist in updates alone."""
    whole: int
    """The whole weights, from which the rollout samples."""
    kept: int
    """What an update keeps of them and of the cache: nothing with `rollout.native.sleep`."""
    rollout: int
    """The KV cache, prompts and workspaces of a rollout."""
    activations: int
    gathered: int
    """Weights and gradients of the blocks and of the embeddings that are whole at a time."""
    ending: int
    """The end of a backward pass, which has no activations: the gradients of the embeddings, to be reduced."""

    @property
    def peak(self) -> int:
        """The peak of a step, with CUDA's context."""
        update = self.kept + self.gradients + max(self.activations + self.gathered, self.ending)
        return CONTEXT + self.shards + max(self.whole + self.rollout, update)

    def verdict(self, capacity: float) -> Verdict:
        """Whether the step fits into `capacity` bytes, as in `qerl.plan.memory_model`."""
        if self.peak > capacity:
            return "doesn't fit"
        return "fits" if self.peak - CONTEXT <= USABLE * (capacity - CONTEXT) else "tight"


def sharded_memory(shape: ModelShape, run: RunSettings, gpus: int, capacity: float) -> ShardedMemory:
    """The memory of a run's step on each of `gpus` GPUs that have `capacity` bytes; prompts have `PROMPT_TOKENS`."""
    wide = 2 if run.dtype == "float32" else 1  # twice the bytes of bfloat16, for which the shared formulas are
    settings = StepSettings(
        weights="bf16",
        rank=0,
        prompts=-(-run.rollout.prompts // gpus),
        group=run.rollout.group_size,
        prompt_tokens=run.rollout.max_prompt_tokens or PROMPT_TOKENS,
        max_tokens=run.rollout.sampling.max_tokens,
        recompute=run.gradient_checkpointing,
        micro_batch_tokens=run.micro_batch_tokens,
        kv_cache_dtype=run.rollout.native.kv_cache_dtype,
    )
    numbers = weight_numbers(shape)
    block = _block_numbers(shape)
    outside = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    shards = int((WEIGHT + MOMENTS[run.optimizer.name]) * numbers / gpus)
    whole = wide * weight_bytes(shape, "bf16")
    free = max(capacity - CONTEXT - shards - whole - WORKSPACE, 0)
    wanted = (wide if settings.kv_cache_dtype == "auto" else 1) * cache_bytes(shape, settings)[1]
    cache = min(wanted, int(FREE_SHARE * free))
    half = 2 * wide
    return ShardedMemory(
        shards=shards,
        gradients=GRADIENT * numbers // gpus,
        whole=whole,
        kept=0 if run.rollout.native.sleep else whole + (cache if cache == wanted else 0),
        rollout=cache + wide * (prefill_bytes(shape, settings, True) + graph_bytes(shape, settings)) + WORKSPACE,
        activations=wide * activation_bytes(shape, settings),
        # Of this block and the next one, with the gradients of one, which are reduced as float32.
        gathered=(2 * half + half + GRADIENT) * block + 2 * half * outside,
        ending=(2 * half + GRADIENT) * outside,
    )


def weight_numbers(shape: ModelShape) -> int:
    """The number of trained weights, without final norm and those of queries and keys, which are few."""
    biases = shape.biased * (shape.query_width + 2 * shape.kv_width)
    outside = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    experts = shape.projections[len(shape.linears) :] * shape.layers
    return _numbers((*shape.packable, *shape.dense, *experts)) + shape.layers * (2 * shape.hidden + biases) + outside


def _block_numbers(shape: ModelShape) -> int:
    """The number of weights of a block's projections, of the largest block in a hybrid."""
    return _numbers(shape.projections) + max(_numbers(shape.net_linears) - _numbers(shape.linears[:4]), 0)


def _numbers(linears: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in linears)


def least_gpus(shape: ModelShape, run: RunSettings, capacity: float) -> int | None:
    """The least of `NUMBERS` GPUs with `capacity` bytes each on which a run's step fits; None if none suffices."""
    verdicts = ((gpus, sharded_memory(shape, run, gpus, capacity).verdict(capacity)) for gpus in NUMBERS[1:])
    return next((gpus for gpus, verdict in verdicts if verdict == "fits"), None)


def shape_of(model: Any) -> ModelShape | None:
    """The shape of a configuration's model, if it is known without a download: a folder, or a Qwen2.5 of the hub."""
    if isinstance(model, LocalModel):
        return ModelShape.of(read_config(model.path))
    named = re.search(r"Qwen2\.5-(\d+(?:\.\d+)?B)", model.repo) if isinstance(model, HubModel) else None
    return ModelShape.of(model_config(named[1], "bf16")) if named and named[1] in ARCHITECTURES else None
