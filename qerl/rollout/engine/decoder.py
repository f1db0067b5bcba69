"""A policy's blocks for prefill and decode steps: fused products on its own weights, with a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from qerl.checkpoints.context import context_length
from qerl.kernels.decode_state import DecodeState, SamplingState
from qerl.kernels.geometry import Heads
from qerl.kernels.graphs import captured
from qerl.kernels.operations import operations
from qerl.kernels.prompts import PromptRow
from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.grouped_linear import GroupedLinear
from qerl.layers.noisy_norm import NoisyRMSNorm
from qerl.layers.packed_linear import packed_format
from qerl.layers.structure import epsilon_of, offset_of, structure_of
from qerl.layers.w4_linear import W4Linear
from qerl.policy.policy import Policy
from qerl.rollout.engine.mlps import Mlp, mlp_of, projections
from qerl.rollout.served import activation_of, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.rollout import Kernels


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    noise: Tensor | None
    eps: float
    offset: float


@dataclass(frozen=True)
class _Block:
    heads: Heads
    #: The kind of the block's attention, where rotary positions differ by it.
    kind: str | None
    input_norm: _Norm
    qkv: FusedLinear
    out: FusedLinear
    #: The norms of what attention and MLP add to the hidden states, as Gemma has them.
    after_attention: _Norm | None
    mlp_norm: _Norm
    mlp: Mlp
    after_mlp: _Norm | None


class Decoder:
    """The policy's blocks, head and token sampling. Norms and noise are read in place, adapters at each `sync`."""

    def __init__(self, policy: Policy, kernels: Kernels = "auto") -> None:
        config = policy.lm.config
        if refusal := refused_by_engine(config, packed_format(policy.lm)):
            raise ConfigError(f"{refusal}; the eager sampler serves it")
        self.dtype = policy.lm.dtype
        self.device = policy.device
        self.operations = operations(policy.device)
        self._model: Any = policy.lm.model
        embedding: Any = policy.lm.get_input_embeddings()
        self._embedding: Any = embedding.weight
        scale: Tensor | None = getattr(embedding, "embed_scale", None)
        self._embedding_scale = None if scale is None else scale.to(self.dtype)
        geglu = None if activation_of(config) == "silu" else self.operations.geglu
        self._blocks = [
            _block(layer, number, config, mlp_of(layer.mlp, geglu, self.dtype, kernels), self.dtype, kernels)
            for number, layer in enumerate(self._model.layers)
        ]
        self._norm = _norm(self._model.norm)
        self._vocabulary = config.vocab_size
        self._head = fuse([policy.lm.get_output_embeddings()], self.dtype)
        #: The tokens of the longest sequence; None if positions of longer ones are as those of short ones.
        self.longest = context_length(config.to_dict()) if _changes(config) else None
        self._ropes = self._rope_tables(1)
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
    def linears(self) -> list[FusedLinear | GroupedLinear]:
        """All matrix products of a step."""
        return [linear for b in self._blocks for linear in (b.qkv, b.out, *b.mlp.linears)] + [self._head]

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
        """Extend the rotary tables to sequences of `tokens`, at most `longest`. If they grow, graphs that were captured
        before are invalid.
        """
        if tokens > len(self._ropes[self._blocks[0].kind][0]):
            self._ropes = self._rope_tables(tokens)

    def _rope_tables(self, tokens: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines [tokens, R / 2] of the R elements of a head that rotate, for each kind of attention.

        They are those of the model's rotary module, rounded to the model's dtype as there.
        """
        # With more positions than `longest`, the module would change the angles of all.
        positions = torch.arange(min(tokens, self.longest or tokens), device=self.device)[None]
        tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        for kind in dict.fromkeys(block.kind for block in self._blocks):
            rotary, of_kind = self._model.rotary_emb, {} if kind is None else {"layer_type": kind}
            cos, sin = rotary(self._embedding[:1, None], positions, **of_kind)
            half = len(getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq"))  # most models have both
            tables[kind] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        return tables

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
        x = self._embedded(state.token[rows])
        x = self._through_blocks(
            x,
            cache,
            lambda qkv, cached, heads, rope: ops.attend(qkv, cached, state, rows, rope, heads, splits, drafted),
        )
        ops.draw(self.logits(x), rows, state, sampling, truncated, replayed)

    def last_hidden(self, row: PromptRow, cache: Tensor) -> Tensor:
        """Hidden states [prompts, H] after the last block, at each prompt's last token.

        `cache` then holds the keys and values of all tokens.
        """
        ops = self.operations
        x = self._embedded(row.ids)
        return self._through_blocks(
            x,
            cache,
            lambda qkv, cached, heads, rope: ops.attend_prompts(qkv, cached, row, rope, heads),
            row.last,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden states [B, H] after the last block."""
        logits = hidden.new_empty(len(hidden), self._vocabulary)
        self._head(self._normed(hidden, self._norm), logits)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._embedding[ids]
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _through_blocks(
        self,
        x: Tensor,
        cache: Tensor,
        attend: Callable[[Tensor, Tensor, Heads, tuple[Tensor, Tensor]], Tensor],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last block, for the rows `wanted` of x [B, H] or for all. Overwrites x.

        `attend` takes q, k and v [B, (Hq + 2 Hkv) * D], a block's cache, its heads and its rotary table.
        """
        for block, layer_cache in zip(self._blocks, cache, strict=True):
            normed = self._normed(x, block.input_norm)
            qkv = x.new_empty(len(x), (block.heads.query + 2 * block.heads.kv) * block.heads.dim)
            block.qkv(normed, qkv)
            attended = attend(qkv, layer_cache, block.heads, self._ropes[block.kind])
            if wanted is not None and block is self._blocks[-1]:
                # After the last attention nothing reads the other rows.
                x, attended = x[wanted], attended[wanted]
            self._add(x, block.out, attended, block.after_attention)
            self._add(x, block.mlp, self._normed(x, block.mlp_norm), block.after_mlp)
        return x

    def _add(self, to: Tensor, linear: FusedLinear | Mlp, x: Tensor, norm: _Norm | None) -> None:
        """Add a product or an MLP, with a norm its normalised output, to the hidden states `to` [B, H] in place."""
        if norm is None:
            linear(x, to, residual=True)
        else:
            out = torch.empty_like(to)
            linear(x, out)
            self._normed(out, norm, to)

    def _normed(self, x: Tensor, norm: _Norm, to: Tensor | None = None) -> Tensor:
        return self.operations.rms_norm(x, norm.weight, norm.noise, norm.eps, norm.offset, to)


def _changes(config: Any) -> bool:
    """Whether rotary positions change for all tokens of a text that passes a length."""
    return config.rope_parameters.get("rope_type") == "longrope"


def _block(layer: Any, number: int, config: Any, mlp: Mlp, dtype: torch.dtype, kernels: Kernels) -> _Block:
    attention = layer.self_attn
    # Norms after attention and MLP, too; the one after attention then has the name of others' norm before the MLP.
    around = hasattr(layer, "pre_feedforward_layernorm")
    return _Block(
        heads=_heads(attention, config, structure_of(config).windows[number]),
        kind=config.layer_types[number] if "full_attention" in config.rope_parameters else None,
        input_norm=_norm(layer.input_layernorm),
        qkv=fuse(projections(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"), dtype, kernels=kernels),
        out=fuse([attention.o_proj], dtype, kernels=kernels),
        after_attention=_norm(layer.post_attention_layernorm) if around else None,
        mlp_norm=_norm(layer.pre_feedforward_layernorm if around else layer.post_attention_layernorm),
        mlp=mlp,
        after_mlp=_norm(layer.post_feedforward_layernorm) if around else None,
    )


def _heads(attention: Any, config: Any, window: int | None) -> Heads:
    heads = Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        attention.scaling,
        window=window,
        sinks=getattr(attention, "sinks", None),
    )
    if not hasattr(attention, "q_norm"):
        return heads
    q_norm, k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
    return replace(heads, q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps, norm_offset=q_norm.offset)


def _norm(norm: Any) -> _Norm:
    """A norm with its noise; PEFT's trained copy if there is one."""
    if isinstance(norm, ModulesToSaveWrapper):
        norm = norm.modules_to_save[POLICY_ADAPTER]
    offset = norm.offset if isinstance(norm, NoisyRMSNorm) else offset_of(norm)
    return _Norm(norm.weight, getattr(norm, "noise", None), epsilon_of(norm), offset or 0.0)
