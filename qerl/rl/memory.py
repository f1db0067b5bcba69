"""Recomputation in an update, which saves memory; as little is recomputed as memory allows.

Three things can be recomputed: activations of blocks in the backward pass (gradient checkpointing), logits tile by
tile, and unpacked weights in each pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.host.gpus import allocatable_bytes
from qerl.kernels.packed_sequences import Packing
from qerl.models.blocks import token_hidden
from qerl.models.linear import dense_weights, unpacked_bytes
from qerl.models.lora import dropouts, set_keys
from qerl.models.policy import Policy

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
    """Count the bytes of all storages saved for the backward pass, each once, without those of `model`'s weights."""
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
