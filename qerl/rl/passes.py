"""Passes of updates: how little is recomputed to save memory, and CUDA graphs of small policies' passes.

Three things can be recomputed: activations of blocks in the backward pass (gradient checkpointing), logits tile by
tile, and unpacked weights in each pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.host.gpus import allocatable_bytes
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import GraphBySize, capture
from qerl.models.blocks import PackedAttention, token_hidden
from qerl.models.experts import GatedMLP
from qerl.models.linear import PackedLinear, dense_weights, unpacked_bytes
from qerl.models.lora import dropouts, set_keys
from qerl.models.policy import Policy
from qerl.rl.packing import MicroBatch, PaddedMicroBatch, PaddedSize, head_logprobs, token_states
from qerl.settings.run import RunSettings

#: Share of the free memory that may be used; the rest is for fragmentation, unpacked weights and tiles of logits.
USABLE = 0.85
#: Activations are measured on rows of this many and of twice as many tokens.
MEASURED_TOKENS = 64


@dataclass
class Saved:
    """The bytes saved for the backward pass in a `with` block, counted while it runs."""

    bytes: int = 0


@contextmanager
def saved_for_backward(model: torch.nn.Module) -> Iterator[Saved]:
    """Count the bytes of all storages saved for the backward pass, each once, without `model`'s weights."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = Saved()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            saved.bytes += storage.nbytes()
        return tensor.detach()  # an operation that holds its own output would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def blocks(lm: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The transformer blocks, in order."""
    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def kept_bytes(policy: Policy) -> float:
    """Bytes per token that a block keeps for its backward pass, measured on two short rows."""
    _recompute_first(blocks(policy.lm), 0)
    # The difference of two rows leaves out what doesn't grow with tokens.
    grown = _row_bytes(policy, 2 * MEASURED_TOKENS) - _row_bytes(policy, MEASURED_TOKENS)
    return grown / MEASURED_TOKENS / len(blocks(policy.lm))


def _row_bytes(policy: Policy, tokens: int) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.long, device=policy.device)
    positions = torch.arange(tokens, device=policy.device)[None]
    set_keys(dropouts(policy.lm), [(0,)], [tokens])
    with policy.autocast(), saved_for_backward(policy.lm) as saved:
        # The result keeps all counted storages alive: the address of a freed one could be reused and not be counted.
        _ = token_hidden(policy.lm, ids, positions, Packing.of([tokens], [None], policy.device))
    return saved.bytes


# Recomputation is by block, chosen by measured bytes; logits and unpacked weights are kept if room is left. Not the
# default, because a run's peak memory then depends on what else is on the GPU.
def recomputed_blocks(count: int, free: float, kept: float, recomputed: float) -> int:
    """The number of blocks, of `count`, that must recompute their activations so that all fit into `free` bytes.

    A block needs `kept` bytes if it keeps its activations, and `recomputed` bytes if it keeps only its input. The block
    whose backward pass runs needs its activations and about as much for their gradients in either case.
    """
    missing = count * kept - (free - 2 * kept)
    return min(count, max(0, math.ceil(missing / (kept - recomputed))))


def _recompute_first(blocks: list[GradientCheckpointingLayer], count: int) -> None:
    """Recompute the first blocks, since the backward pass reaches them after the others' activations are freed."""
    for place, block in enumerate(blocks):
        block.gradient_checkpointing = place < count


def free_bytes() -> float:
    """Bytes of memory that activations may use."""
    return USABLE * allocatable_bytes()


class Recomputation:
    """Chooses what to recompute for each update and micro-batch, by the memory that is free just before it.

    Recomputed blocks and unpacked weights have the same bits. Logits that are kept don't: other products compute them.
    So `qerl.rl.update` asks once a run up to how many tokens they are kept.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._blocks = blocks(policy.lm)  # a walk over a mixture's modules takes as long as some blocks' launches
        #: The most blocks that were recomputed for a forward pass.
        self.most = 0

    def choose(self, tokens: int, keep_logits: bool = False) -> int:
        """Choose the blocks to recompute for a forward pass over `tokens`, and return their number."""
        # Asked anew for each micro-batch, because recomputed blocks have the same bits: memory that others take or give
        # back meanwhile changes no run.
        count = self._needed(tokens, free_bytes() - keep_logits * tokens * self._token_logits)
        _recompute_first(self._blocks, count)
        self.most = max(self.most, count)
        return count

    def fitting_tokens(self, with_logits: bool) -> int:
        """The most tokens whose activations, and logits, now fit into memory with no recomputation."""
        # Two more blocks than there are: the activations of the one whose backward pass runs, and their gradients.
        token = (len(self._blocks) + 2) * self._kept + with_logits * self._token_logits
        return int(free_bytes() / token)

    def weights(self, tokens: int) -> AbstractContextManager[None]:
        """A context that keeps packed weights unpacked, for an update of micro-batches of up to `tokens`.

        They are kept only if they fit beside activations and logits, whose recomputation takes longer.
        """
        lm = self.policy.lm
        free = free_bytes() - tokens * self._token_logits - unpacked_bytes(lm, lm.dtype)
        return dense_weights(lm, lm.dtype) if self._needed(tokens, free) == 0 else nullcontext()

    @property
    def _token_logits(self) -> int:
        """Bytes of a token's logits."""
        return self.policy.lm.config.vocab_size * self.policy.lm.dtype.itemsize

    @cached_property
    def _kept(self) -> float:
        return kept_bytes(self.policy)

    def _needed(self, tokens: int, free: float) -> int:
        lm = self.policy.lm
        of_input = lm.config.hidden_size * lm.dtype.itemsize
        return recomputed_blocks(len(self._blocks), free, tokens * self._kept, tokens * of_input)


# Forward and backward passes of small policies as CUDA graphs.
#
# A pass of a small policy launches some thousand kernels of a few microseconds each. The host takes 25 times as long to
# launch them as the GPU to run them (docs/lab/updates.md). A graph launches them all at once.

#: The most bytes of activations of a pass as a graph, whose memory is held between updates. Larger passes keep a GPU
#: busy without a graph.
MOST_BYTES = 2**31

Work = Callable[[], None]
#: Makes a function that repeats work on the same tensors, from work that has run before. It may run it once more.
Recorder = Callable[[Work], Work]


class _Pass:
    """The hidden states of rows of one size, and with `gradients` the gradients of the trained tensors."""

    def __init__(self, policy: Policy, first: MicroBatch, gradients: bool, record: Recorder) -> None:
        self._policy = policy
        self._gradients = gradients
        self.states: Tensor
        self.padded = PaddedMicroBatch(PaddedSize.of(first), policy.device)
        # Attention sets no output of an empty row, and zero times such a number may be NaN.
        self.padded.fill(first)
        self._run()  # compiles kernels, and casts the adapters for all passes (`SharedCasts`)
        self.grad_states = torch.zeros_like(self.states)
        if gradients:
            self._run_back()
        # Nodes of autograd belong to a stream. While one lives, later passes use it, and capture has another stream.
        del self.states
        self.run = record(self._run)
        self.run_back = record(self._run_back) if gradients else None
        self.states = self.states.detach()

    def _run(self) -> None:
        with torch.set_grad_enabled(self._gradients):
            self.states = token_states(self._policy, self.padded)

    def _run_back(self) -> None:
        self.states.backward(self.grad_states)


class _Replay(torch.autograd.Function):
    """The first `count` states of a pass. The backward pass adds to the gradients of the trained tensors."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, captured: _Pass, count: int) -> Tensor:
        ctx.captured = captured
        captured.run()
        return captured.states[:count].detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        captured: _Pass = ctx.captured
        assert captured.run_back is not None
        captured.grad_states[: len(grad)].copy_(grad)
        # States of padding have no gradient, whatever the row before left here.
        captured.grad_states[len(grad) :] = 0
        captured.run_back()
        return None, None, None


class PassGraphs:
    """Passes of a policy over micro-batches, each size captured at its first use. Outputs are those of other passes.

    A backward pass must follow its forward pass, with no other pass between them: all share their memory.
    """

    def __init__(
        self, policy: Policy, recomputation: Recomputation | None = None, record: Recorder | None = None
    ) -> None:
        self._policy = policy
        self._recomputation = recomputation
        self._trained = [parameter for _, parameter in policy.trainable()]
        self._joint = torch.zeros((), device=policy.device, requires_grad=True)
        self._passes: GraphBySize[_Pass] = GraphBySize(None if record else torch.cuda.graph_pool_handle())
        self._record = record or partial(capture, memory=self._passes.memory)

    def fitting_tokens(self) -> int:
        """The most tokens of a row that can be a graph, by the memory that is free now."""
        most = int(MOST_BYTES / self._token_bytes)
        return most if self._recomputation is None else min(most, self._recomputation.fitting_tokens(False))

    @cached_property
    def _token_bytes(self) -> float:
        """Bytes that a pass keeps per token: the activations of all blocks, and the logits."""
        lm = self._policy.lm
        return kept_bytes(self._policy) * len(blocks(lm)) + lm.config.vocab_size * lm.dtype.itemsize

    @cached_property
    def _gradients(self) -> list[Tensor]:
        return [torch.zeros_like(parameter) for parameter in self._trained]

    def use_gradients(self) -> None:
        """Give the trained tensors gradients of zero, to which backward passes add."""
        torch._foreach_zero_(self._gradients)
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient

    def _new_pass(self, batch: MicroBatch) -> _Pass:
        if self._recomputation is not None:
            self._recomputation.choose(1)  # none: a graph recomputes nothing
        return _Pass(self._policy, batch, torch.is_grad_enabled(), self._record)

    def logprobs_and_entropy(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """See `qerl.rl.packing.logprobs_and_entropy`; with gradients only after `use_gradients`."""
        # With and without gradients apart: a pass without them keeps no activations.
        captured = self._passes.at((PaddedSize.of(batch), torch.is_grad_enabled()), partial(self._new_pass, batch))
        captured.padded.fill(batch)
        states: Tensor = _Replay.apply(self._joint, captured, len(batch.targets_M))
        values = head_logprobs(self._policy, states, batch, temperature, keep_logits=True)
        return batch.unpacked(values[0]), batch.unpacked(values[1])


def pass_graphs(policy: Policy, settings: RunSettings, recomputation: Recomputation | None) -> PassGraphs | None:
    """The graphs of a policy whose passes read nothing but tensors in place; None for others, and for PPO."""
    lm = policy.lm
    # Passes of a policy that is trained in full read gathered weights; only such a policy may be sharded.
    if policy.device.type != "cuda" or policy.peft is None or settings.loss.name == "ppo":
        return None
    modules = list(lm.modules())
    plain = all(len(blocks(lm)) == sum(isinstance(m, kind) for m in modules) for kind in (PackedAttention, GatedMLP))
    # Other formats unpack their weights by several operations, and some operations wait for the GPU.
    fast = all(layer.tiles is not None for layer in modules if isinstance(layer, PackedLinear))
    if not plain or not fast or dropouts(lm) or lm.dtype == torch.float32 or settings.gradient_checkpointing is True:
        return None
    return PassGraphs(policy, recomputation)
