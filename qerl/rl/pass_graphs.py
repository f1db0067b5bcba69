"""Forward and backward passes of small policies as CUDA graphs.

A pass of a small policy launches some thousand kernels of a few microseconds each. The host takes 25 times as long to
launch them as the GPU to run them (docs/lab/updates.md). A graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.graphs import capture
from qerl.layers.dropout import dropouts
from qerl.layers.mlp import GatedMLP
from qerl.layers.packed_attention import PackedAttention
from qerl.layers.packed_linear import PackedLinear
from qerl.policy.policy import Policy
from qerl.rl.activation_checkpointing import Recomputation, blocks, kept_bytes
from qerl.rl.fixed_rows import FixedRow, RowSize
from qerl.rl.sequence_packing import MicroBatch, head_logprobs, token_states
from qerl.settings.run import RunSettings

#: The most bytes of activations of a pass as a graph, whose memory is held between updates. Larger passes keep a GPU
#: busy without a graph.
MOST_BYTES = 2**31

Work = Callable[[], None]
#: Makes a function that repeats work on the same tensors, from work that has run before. It may run it once more.
Capture = Callable[[Work], Work]


class _Pass:
    """The hidden states of rows of one size, and with `gradients` the gradients of the trained tensors."""

    def __init__(self, policy: Policy, first: MicroBatch, gradients: bool, capture: Capture) -> None:
        self._policy = policy
        self._gradients = gradients
        self.states: Tensor
        self.row = FixedRow(RowSize.of(first), policy.device)
        self.row.fill(first)  # attention sets no output of an empty row, and zero times such a number may be NaN
        self._run()  # compiles kernels, and casts the adapters for all passes (`SharedCasts`)
        self.of_states = torch.zeros_like(self.states)
        if gradients:
            self._run_back()
        # Nodes of autograd belong to a stream. While one lives, later passes use it, and capture has another stream.
        del self.states
        self.run = capture(self._run)
        self.run_back = capture(self._run_back) if gradients else None
        self.states = self.states.detach()

    def _run(self) -> None:
        with torch.set_grad_enabled(self._gradients):
            self.states = token_states(self._policy, self.row)

    def _run_back(self) -> None:
        self.states.backward(self.of_states)


class _Replay(torch.autograd.Function):
    """The first `count` states of a pass. The backward pass adds to the gradients of the trained tensors."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, of_row: _Pass, count: int) -> Tensor:
        ctx.of_row = of_row
        of_row.run()
        return of_row.states[:count].detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        of_row: _Pass = ctx.of_row
        assert of_row.run_back is not None
        of_row.of_states[: len(grad)].copy_(grad)
        of_row.of_states[len(grad) :] = 0
        of_row.run_back()
        return None, None, None


class PassGraphs:
    """Passes of a policy over micro-batches, each size captured at its first use. Outputs are those of other passes.

    A backward pass must follow its forward pass, with no other pass between them: all share their memory.
    """

    def __init__(
        self, policy: Policy, recomputation: Recomputation | None = None, capture: Capture | None = None
    ) -> None:
        self._policy = policy
        self._recomputation = recomputation
        self._passes: dict[tuple[RowSize, bool], _Pass] = {}
        self._trained = [parameter for _, parameter in policy.trainable()]
        self._joint = torch.zeros((), device=policy.device, requires_grad=True)
        self._capture = capture or partial(_captured, torch.cuda.graph_pool_handle())

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

    def logprobs_and_entropy(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """See `qerl.rl.sequence_packing.logprobs_and_entropy`; with gradients only after `use_gradients`."""
        key = RowSize.of(batch), torch.is_grad_enabled()
        if key not in self._passes:
            if self._recomputation is not None:
                self._recomputation.choose(1)  # none: a graph recomputes nothing
            self._passes[key] = _Pass(self._policy, batch, torch.is_grad_enabled(), self._capture)
        of_row = self._passes[key]
        of_row.row.fill(batch)
        states: Tensor = _Replay.apply(self._joint, of_row, len(batch.targets_M))
        values = head_logprobs(self._policy, states, batch, temperature, keep_logits=True)
        return batch.unpacked(values[0]), batch.unpacked(values[1])


def _captured(memory: Any, work: Work) -> Work:
    return capture(work, memory)


def pass_graphs(policy: Policy, settings: RunSettings, recomputation: Recomputation | None) -> PassGraphs | None:
    """The graphs of a policy whose passes read nothing but tensors in place; None for others, and for PPO."""
    lm = policy.lm
    if policy.device.type != "cuda" or policy.root is not None or policy.peft is None or settings.loss.name == "ppo":
        return None
    modules = list(lm.modules())
    plain = all(len(blocks(lm)) == sum(isinstance(m, kind) for m in modules) for kind in (PackedAttention, GatedMLP))
    # Other formats unpack their weights by several operations, some of which wait for the GPU.
    fast = all(layer.tiles is not None for layer in modules if isinstance(layer, PackedLinear))
    if not plain or not fast or dropouts(lm) or lm.dtype == torch.float32 or settings.gradient_checkpointing is True:
        return None
    return PassGraphs(policy, recomputation)
