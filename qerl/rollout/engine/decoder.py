"""A policy's blocks for prefill and decode steps: fused products on its own weights, with a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.checkpoints.context import context_length
from qerl.kernels.decode_state import DecodeState, SamplingState
from qerl.kernels.delta_state import DeltaStates, state_bytes
from qerl.kernels.geometry import Heads, Norm
from qerl.kernels.graphs import captured
from qerl.kernels.kv_cache import KVCache
from qerl.kernels.operations import operations
from qerl.kernels.prompts import PromptRow
from qerl.kernels.w4a16.product import compile_ahead
from qerl.layers.adapters import embedding_weight
from qerl.layers.delta_net import PackedDeltaNet
from qerl.layers.fused_linear import FusedLinear, fuse
from qerl.layers.packed_linear import packed_format
from qerl.layers.structure import structure_of
from qerl.layers.w4_linear import W4Linear
from qerl.policy.policy import Policy
from qerl.rollout.engine.mixers import (
    Attention,
    DeltaNet,
    PromptTokens,
    StepTokens,
    Tokens,
    attention_of,
    delta_net_of,
)
from qerl.rollout.engine.mlps import Mlp, Product, mlp_of
from qerl.rollout.engine.norms import norm_of
from qerl.rollout.served import activation_of, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.rollout import Kernels


@dataclass(frozen=True)
class _Block:
    mixer: Attention | DeltaNet
    input_norm: Norm
    #: The norms of what attention and MLP add to the hidden states, as Gemma has them.
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Norm | None


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
        self._embedding = embedding_weight(embedding)
        scale: Tensor | None = getattr(embedding, "embed_scale", None)
        self._embedding_scale = None if scale is None else scale.to(self.dtype)
        activation: Any = activation_of(config)
        self._blocks = [
            _block(layer, number, config, mlp_of(layer.mlp, activation, self.dtype, kernels), self.dtype, kernels)
            for number, layer in enumerate(self._model.layers)
        ]
        self._norm = norm_of(self._model.norm)
        self._attentions = [block.mixer for block in self._blocks if isinstance(block.mixer, Attention)]
        self._nets = [block.mixer for block in self._blocks if isinstance(block.mixer, DeltaNet)]
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
        """Number of blocks with attention, each of which has a part of the KV cache."""
        return len(self._attentions)

    @property
    def width(self) -> int:
        """Number of features of a hidden state."""
        return int(self._embedding.shape[1])

    @property
    def linears(self) -> list[Product]:
        """All matrix products of a step, with adapters that are apart."""
        return [linear for b in self._blocks for linear in (*b.mixer.linears, *b.mlp.linears)] + [self._head]

    @property
    def heads(self) -> Heads:
        """Attention heads of a block; they are the same in all blocks."""
        return self._attentions[0].heads

    @property
    def state_bytes(self) -> int:
        """Bytes of the delta nets' states of a sequence, 0 without delta nets."""
        return sum(state_bytes(net.heads, self.dtype) for net in self._nets)

    def new_states(self, slots: int) -> DeltaStates | None:
        """The delta nets' states for so many sequences, None without delta nets."""
        if not self._nets:
            return None
        return DeltaStates.empty(self._nets[0].heads, len(self._nets), slots, self.dtype, self.device)

    def new_cache(self, pages: int, dtype: torch.dtype) -> KVCache:
        """A KV cache of zeros with so many pages, in the model's dtype or FP8."""
        return KVCache.empty(len(self), pages, self.heads, dtype, self.device)

    def compile_ahead(self, sequences: int) -> None:
        """Compile the packed products of steps of up to so many sequences, several at a time."""
        compile_ahead([linear.operands for linear in self.linears if isinstance(linear, W4Linear)], sequences)

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
        if tokens > len(self._ropes[self._attentions[0].kind][0]):
            self._ropes = self._rope_tables(tokens)

    def _rope_tables(self, tokens: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines [tokens, R / 2] of the R elements of a head that rotate, for each kind of attention.

        They are those of the model's rotary module, rounded to the model's dtype as there.
        """
        # With more positions than `longest`, the module would change the angles of all.
        positions = torch.arange(min(tokens, self.longest or tokens), device=self.device)[None]
        tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        if hasattr(self._model.rotary_emb, "mrope_section"):
            positions = positions.expand(3, 1, -1)  # in time, height and width, which are the same in a text
        for kind in dict.fromkeys(attention.kind for attention in self._attentions):
            rotary, of_kind = self._model.rotary_emb, {} if kind is None else {"layer_type": kind}
            cos, sin = rotary(self._embedding[:1, None], positions, **of_kind)
            half = len(getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq"))  # most models have both
            tables[kind] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        return tables

    def step(
        self,
        rows: Tensor,
        state: DecodeState,
        cache: KVCache,
        sampling: SamplingState,
        splits: int,
        truncated: bool,
        replayed: bool,
        drafted: bool = False,
        states: DeltaStates | None = None,
    ) -> None:
        """Feed the last token of the slots `rows` [B] int32 and draw the next one; idle slots don't change.

        `drafted`: slots may share pages that they write to, each at a position of its own. `states` are those of
        `new_states`.
        """
        tokens = StepTokens(self.operations, state, rows, splits, drafted)
        x = self._through_blocks(self._embedded(state.token[rows]), cache, states, tokens)
        self.operations.draw(self.logits(x), rows, state, sampling, truncated, replayed)

    def last_hidden(self, row: PromptRow, cache: KVCache, states: DeltaStates | None = None) -> Tensor:
        """Hidden states [prompts, H] after the last norm, at each prompt's last token.

        `cache` then holds the keys and values of all tokens, and `states` those after the prompts.
        """
        tokens = PromptTokens(self.operations, row)
        return self._through_blocks(self._embedded(row.ids), cache, states, tokens, row.last)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden states [B, H] after the last norm."""
        logits = hidden.new_empty(len(hidden), self._vocabulary)
        self._head(hidden, logits)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._embedding[ids]
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _through_blocks(
        self,
        x: Tensor,
        cache: KVCache,
        states: DeltaStates | None,
        tokens: Tokens,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, for the rows `wanted` of x [B, H] or for all. Overwrites x."""
        pages, nets = cache.blocks(), iter(()) if states is None else states.nets()
        following = [*(block.input_norm for block in self._blocks[1:]), self._norm]
        normed = self.operations.rms_norm(x, self._blocks[0].input_norm)
        for block, then in zip(self._blocks, following, strict=True):
            kept: Any = next(nets if isinstance(block.mixer, DeltaNet) else pages)
            mixed = block.mixer(normed, tokens, kept, self._ropes)
            if wanted is not None and block is self._blocks[-1]:
                # After the last attention nothing reads the other rows.
                x, mixed = x[wanted], mixed[wanted]
            normed = self._add(x, block.mixer.out, mixed, block.after_attention, block.mlp_norm)
            normed = self._add(x, block.mlp, normed, block.after_mlp, then)
        return normed

    def _add(self, to: Tensor, linear: FusedLinear | Mlp, x: Tensor, norm: Norm | None, then: Norm) -> Tensor:
        """Add a product or an MLP, with `norm` its normalised output, to the hidden states `to` [B, H] in place.

        Returns the norm `then` of the sum.
        """
        if norm is None:
            linear(x, to, residual=True)
            return self.operations.rms_norm(to, then)
        out = torch.empty_like(to)
        linear(x, out)
        return self.operations.add_normed(to, out, norm, then)


def _changes(config: Any) -> bool:
    """Whether rotary positions change for all tokens of a text that passes a length."""
    return config.rope_parameters.get("rope_type") == "longrope"


def _block(layer: Any, number: int, config: Any, mlp: Mlp, dtype: torch.dtype, kernels: Kernels) -> _Block:
    # Norms after attention and MLP, too; the one after attention then has the name of others' norm before the MLP.
    around = hasattr(layer, "pre_feedforward_layernorm")
    return _Block(
        mixer=_mixer(layer, number, config, dtype, kernels),
        input_norm=norm_of(layer.input_layernorm),
        after_attention=norm_of(layer.post_attention_layernorm) if around else None,
        mlp_norm=norm_of(layer.pre_feedforward_layernorm if around else layer.post_attention_layernorm),
        mlp=mlp,
        after_mlp=norm_of(layer.post_feedforward_layernorm) if around else None,
    )


def _mixer(layer: Any, number: int, config: Any, dtype: torch.dtype, kernels: Kernels) -> Attention | DeltaNet:
    if isinstance(net := getattr(layer, "linear_attn", None), PackedDeltaNet):
        return delta_net_of(net, dtype, kernels)
    kind = config.layer_types[number] if "full_attention" in config.rope_parameters else None
    return attention_of(layer.self_attn, config, kind, structure_of(config).windows[number], dtype, kernels)
