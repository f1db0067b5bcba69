"""A policy's blocks for prefill and decode steps: fused products on its own weights, with a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from qerl.kernels.decode_state import DecodeState, SamplingState
from qerl.kernels.geometry import Heads
from qerl.kernels.graphs import captured
from qerl.kernels.operations import operations
from qerl.kernels.prompts import PromptRow
from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.w4_linear import W4Linear
from qerl.policy.policy import Policy
from qerl.rollout.served import refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.rollout import Kernels


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    noise: Tensor | None
    eps: float


@dataclass(frozen=True)
class _Block:
    heads: Heads
    input_norm: _Norm
    qkv: FusedLinear
    out: FusedLinear
    mlp_norm: _Norm
    gate_up: FusedLinear
    down: FusedLinear


class Decoder:
    """The policy's blocks, head and token sampling. Norms and noise are read in place, adapters at each `sync`."""

    def __init__(self, policy: Policy, kernels: Kernels = "auto") -> None:
        config = policy.lm.config
        if refusal := refused_by_engine(config):
            raise ConfigError(f"{refusal}; the eager sampler serves it")
        self.dtype = policy.lm.dtype
        self.device = policy.device
        self.operations = operations(policy.device)
        self._model: Any = policy.lm.model
        self._embedding: Any = policy.lm.get_input_embeddings().weight
        self._blocks = [_block(layer, config, self.dtype, kernels) for layer in self._model.layers]
        self._norm = _norm(self._model.norm)
        self._intermediate, self._vocabulary = config.intermediate_size, config.vocab_size
        self._head = fuse([policy.lm.get_output_embeddings()], self.dtype)
        self._rope = self._rope_table(1)
        self._adapted = policy.peft is not None
        self._parameters = list(policy.lm.parameters())
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._sync: Callable[[], None] | None = None
        self._copies: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def width(self) -> int:
        """Number of features of a hidden state."""
        return int(self._embedding.shape[1])

    @property
    def linears(self) -> list[FusedLinear]:
        """All matrix products of a step."""
        return [linear for b in self._blocks for linear in (b.qkv, b.out, b.gate_up, b.down)] + [self._head]

    @property
    def heads(self) -> Heads:
        """Attention heads of a block; they are the same in all blocks."""
        return self._blocks[0].heads

    def new_cache(self, pages: int, size: int) -> Tensor:
        """A KV cache [layers, pages, 2, Hkv, size, D] in the model's dtype. It is zeroed, because attention multiplies
        masked tokens by 0.
        """
        shape = (len(self._blocks), pages, 2, self.heads.kv, size, self.heads.dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the policy's present adapters and biases. Raises RuntimeError if the policy's tensors were moved."""
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            raise RuntimeError("the policy's weights were moved or cast after its sampler was made; make a new sampler")
        if self._sync is None:
            # Without adapters there may be nothing to capture.
            in_graph = self.device.type == "cuda" and self._adapted
            self._sync = captured(self._sync_all) if in_graph else self._sync_all
        self._sync()

    def _sync_all(self) -> None:
        pairs = [pair for linear in self.linears if isinstance(linear, W4Linear) for pair in linear.copies()]
        alike = [(to, from_) for to, from_ in pairs if to.is_contiguous() and from_.dtype == torch.float32]
        if len(alike) < len(pairs) or not pairs:
            for linear in self.linears:
                linear.sync()
            return
        if self._copies is None:
            from qerl.kernels.copies import Copies

            self._copies = Copies(*zip(*pairs, strict=True))
        self._copies()
        for linear in self.linears:
            if not isinstance(linear, W4Linear):
                linear.sync()

    def reach(self, tokens: int) -> None:
        """Extend the rotary table to sequences of `tokens`. If it grows, graphs that were captured before are
        invalid.
        """
        if tokens > len(self._rope[0]):
            self._rope = self._rope_table(tokens)

    def _rope_table(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, D / 2] from the model's rotary module, rounded to the model's dtype as there."""
        positions = torch.arange(tokens, device=self.device)[None]
        cos, sin = self._model.rotary_emb(self._embedding[:1, None], positions)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def step(
        self,
        rows: Tensor,
        state: DecodeState,
        cache: Tensor,
        sampling: SamplingState,
        splits: int,
        truncated: bool,
        replayed: bool,
        drafted: bool = False,
    ) -> None:
        """Feed the last token of the slots `rows` [B] int32 and draw the next one; idle slots don't change.

        `drafted`: slots may share pages that they write to, each at a position of its own.
        """
        ops = self.operations
        x = self._embedding[state.token[rows]]
        x = self._through_blocks(
            x,
            cache,
            lambda qkv, cached, heads: ops.attend(qkv, cached, state, rows, self._rope, heads, splits, drafted),
        )
        ops.draw(self.logits(x), rows, state, sampling, truncated, replayed)

    def last_hidden(self, row: PromptRow, cache: Tensor) -> Tensor:
        """Hidden states [prompts, H] after the last block, at each prompt's last token.

        `cache` then holds the keys and values of all tokens.
        """
        ops = self.operations
        x = self._embedding[row.ids]
        return self._through_blocks(
            x,
            cache,
            lambda qkv, cached, heads: ops.attend_prompts(qkv, cached, row, self._rope, heads),
            row.last,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden states [B, H] after the last block."""
        logits = hidden.new_empty(len(hidden), self._vocabulary)
        self._head(self._normed(hidden, self._norm), logits)
        return logits

    def _through_blocks(
        self,
        x: Tensor,
        cache: Tensor,
        attend: Callable[[Tensor, Tensor, Heads], Tensor],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last block, for the rows `wanted` of x [B, H] or for all. Overwrites x.

        `attend` takes q, k and v [B, (Hq + 2 Hkv) * D], a block's cache and its heads.
        """
        for block, layer_cache in zip(self._blocks, cache, strict=True):
            normed = self._normed(x, block.input_norm)
            qkv = x.new_empty(len(x), (block.heads.query + 2 * block.heads.kv) * block.heads.dim)
            block.qkv(normed, qkv)
            attended = attend(qkv, layer_cache, block.heads)
            if wanted is not None and block is self._blocks[-1]:
                # After the last attention nothing reads the other rows.
                x, attended = x[wanted], attended[wanted]
            block.out(attended, x, residual=True)
            normed = self._normed(x, block.mlp_norm)
            gated = x.new_empty(len(x), self._intermediate)
            block.gate_up(normed, gated, silu=True)
            block.down(gated, x, residual=True)
        return x

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        return self.operations.rms_norm(x, norm.weight, norm.noise, norm.eps)


def _block(layer: Any, config: Any, dtype: torch.dtype, kernels: Kernels) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    return _Block(
        heads=_heads(attention, config),
        input_norm=_norm(layer.input_layernorm),
        qkv=fuse([attention.q_proj, attention.k_proj, attention.v_proj], dtype, kernels=kernels),
        out=fuse([attention.o_proj], dtype, kernels=kernels),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=fuse([mlp.gate_proj, mlp.up_proj], dtype, gated=True, kernels=kernels),
        down=fuse([mlp.down_proj], dtype, kernels=kernels),
    )


def _heads(attention: Any, config: Any) -> Heads:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling)
    if not hasattr(attention, "q_norm"):
        return heads
    q_norm, k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
    return Heads(heads.query, heads.kv, heads.dim, heads.scale, q_norm.weight, k_norm.weight, q_norm.eps)


def _norm(norm: Any) -> _Norm:
    """A norm with its noise; PEFT's trained copy if there is one."""
    if isinstance(norm, ModulesToSaveWrapper):
        norm = norm.modules_to_save[POLICY_ADAPTER]
    return _Norm(norm.weight, getattr(norm, "noise", None), norm.variance_epsilon)
