"""Forward and backward passes of small policies as CUDA graphs, over packed rows of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.kernels.state import GraphBySize, capture
from qerl.models.blocks import PackedAttention
from qerl.models.experts import GatedMLP
from qerl.models.linear import PackedLinear
from qerl.models.lora import dropouts
from qerl.models.policy import Policy
from qerl.rl.memory import Recomputation, blocks, kept_bytes
from qerl.rl.packing import MicroBatch, PaddedMicroBatch, PaddedSize, head_logprobs, token_states
from qerl.settings.run import RunSettings

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
    # Passes of a policy that is trained in full, of which alone some are sharded, read gathered weights.
    if policy.device.type != "cuda" or policy.peft is None or settings.loss.name == "ppo":
        return None
    modules = list(lm.modules())
    plain = all(len(blocks(lm)) == sum(isinstance(m, kind) for m in modules) for kind in (PackedAttention, GatedMLP))
    # Other formats unpack their weights by several operations, some of which wait for the GPU.
    fast = all(layer.tiles is not None for layer in modules if isinstance(layer, PackedLinear))
    if not plain or not fast or dropouts(lm) or lm.dtype == torch.float32 or settings.gradient_checkpointing is True:
        return None
    return PassGraphs(policy, recomputation)
