"""Widths and counts of a model, from which its memory and the floor of its steps follow.

The workflow reads them on every call, so this module imports no large library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

#: Bytes of an activation, a dense weight or a cached key: bfloat16.
HALF = 2


@dataclass(frozen=True)
class Mixture:
    """The experts of each block, and its router."""

    experts: int
    chosen: int
    """Experts of a token."""
    intermediate: int
    biased: bool = False
    """Whether experts have biases, as gpt-oss's. They alone are packed then, and attention has sinks."""
    shared: int = 0
    """Inner features of the expert that all tokens have beside theirs, behind a gate; 0 without one."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Mixture | None:
        """The experts in the content of a config.json; None of a dense model and of a mixture with other keys."""
        experts = config.get("num_experts") or config.get("num_local_experts")  # of the hub, or by transformers
        if config["model_type"] == "gpt_oss":
            return cls(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], True)
        chosen, wide = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
        wide = wide or config.get("intermediate_size")  # Mixtral and OLMoE have no MLP of another width
        if not experts or chosen is None or wide is None:
            return None
        return cls(experts, chosen, wide, shared=config.get("shared_expert_intermediate_size") or 0)


@dataclass(frozen=True)
class DeltaNets:
    """The gated delta nets that stand in place of attention in some blocks."""

    count: int
    """Blocks that have one."""
    key: int
    """Heads of queries and keys."""
    value: int
    key_dim: int
    value_dim: int
    taps: int
    packed: bool = False
    """Whether a weight format packs their layers, but for those of b and a. Otherwise they are bfloat16."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeltaNets | None:
        """The delta nets in the content of a config.json; None of a model without them."""
        count = (config.get("layer_types") or []).count("linear_attention")
        if not count:
            return None
        return cls(
            count=count,
            key=config["linear_num_key_heads"],
            value=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            taps=config["linear_conv_kernel_dim"],
        )

    @property
    def channels(self) -> int:
        """Inputs of the convolution."""
        return 2 * self.key * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Inputs of the output's product."""
        return self.value * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that the engine keeps of a sequence, in all blocks."""
        each = 4 * self.value * self.key_dim * self.value_dim + HALF * (self.taps - 1) * self.channels
        return self.count * each


@dataclass(frozen=True)
class ModelShape:
    """Widths and counts of a model, as its config.json states them."""

    hidden: int
    layers: int
    query_width: int
    """Outputs of the query projection, which are heads times their size."""
    kv_width: int
    heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    biased: bool
    """Whether q, k and v have biases."""
    mixture: Mixture | None = None
    """The experts that stand in place of gate, up and down; `intermediate` is then that of a token's experts."""
    nets: DeltaNets | None = None
    """The delta nets that stand in place of attention in some blocks; queries of the others then have gates."""
    windowed: int = 0
    """Blocks whose attention reads the last `window` tokens alone, where others read all."""
    window: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape in the content of a config.json, which `qerl.checkpoints.folder.read_config` has checked."""
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        mixture = Mixture.of(config)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            query_width=heads * size,
            kv_width=(config.get("num_key_value_heads") or heads) * size,
            heads=heads,
            intermediate=mixture.chosen * mixture.intermediate if mixture else config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            biased=config["model_type"] in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias")),
            mixture=mixture,
            nets=DeltaNets.of(config),
            windowed=_windowed(config),
            window=config.get("sliding_window") or 0,
        )

    def with_packed_nets(self, packed: bool = True) -> ModelShape:
        """The shape with delta nets that a weight format packs or doesn't; a model without them stays as it is."""
        return replace(self, nets=replace(self.nets, packed=packed)) if self.nets else self

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a block's projections: q, k, v, o, gate, up, down. A mixture's shared expert has the last three.

        In a hybrid these are those of a block with attention.
        """
        hidden, query, kv = self.hidden, self.query_width, self.kv_width
        wide = self.mixture.shared if self.mixture else self.intermediate
        attention = (2 * query if self.nets else query, hidden), (kv, hidden), (kv, hidden), (hidden, query)
        return (*attention, (wide, hidden), (wide, hidden), (hidden, wide)) if wide else attention

    @property
    def net_linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a delta net's layers."""
        return (*self.packable_of_net, *self._narrow_of_net)

    @property
    def packable_of_net(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a delta net's layers that are wide enough to be packed."""
        if self.nets is None:
            return ()
        channels, values = self.nets.channels, self.nets.value_width
        return (channels, self.hidden), (values, self.hidden), (self.hidden, values)

    @property
    def _narrow_of_net(self) -> tuple[tuple[int, int], ...]:
        return ((self.nets.value, self.hidden),) * 2 if self.nets else ()

    @property
    def attentions(self) -> int:
        """Blocks with attention."""
        return self.layers - (self.nets.count if self.nets else 0)

    @property
    def packable(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the projections of all blocks that a weight format packs, without experts."""
        nets = self.layers - self.attentions
        of_nets = self.packable_of_net * nets if self.nets and self.nets.packed else ()
        return (*self.linears * self.attentions, *self.linears[4:] * nets, *of_nets)

    @property
    def dense(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the layers of all delta nets that are bfloat16 in each format."""
        each = self._narrow_of_net if self.nets and self.nets.packed else self.net_linears
        return each * (self.layers - self.attentions)

    @property
    def expert_linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of each expert's gate, up and down."""
        if self.mixture is None:
            return ()
        hidden, wide = self.hidden, self.mixture.intermediate
        return (wide, hidden), (wide, hidden), (hidden, wide)

    @property
    def products(self) -> int:
        """Weights of the layers that a token takes, without embedding and head."""
        return self._weights(self.mixture.chosen if self.mixture else 0)

    @property
    def block_weights(self) -> int:
        """Elements of the weights of all blocks' layers, with those of all experts."""
        return self._weights(self.mixture.experts if self.mixture else 0)

    def _weights(self, experts: int) -> int:
        """Elements of the weights of all blocks' layers, with those of so many experts of each block."""
        of_experts = self.expert_linears * (experts * self.layers)
        return sum(math.prod(linear) for linear in (*self.packable, *self.dense, *of_experts))

    def adapter_numbers(self, rank: int) -> int:
        """Elements of A and B of adapters on all layers outside of experts."""
        return rank * sum(map(sum, (*self.packable, *self.dense)))

    @property
    def adapted_of_experts(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of each expert's layers that can have adapters; those of gpt-oss have gate and up in one."""
        if self.mixture is None or not self.mixture.biased:
            return self.expert_linears
        hidden, wide = self.hidden, self.mixture.intermediate
        return (2 * wide, hidden), (hidden, wide)

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of all projections of a block."""
        return (*self.linears, *self.expert_linears * (self.mixture.experts if self.mixture else 0))

    @property
    def dense_bytes(self) -> int:
        """Bytes of all packable projections in bfloat16, without those of experts, which are never unpacked."""
        return HALF * sum(rows * columns for rows, columns in self.packable)

    def attention_format(self, weights: str) -> str:
        """The format of q, k, v and o in a base of `weights`."""
        return "bf16" if self.mixture and self.mixture.biased else weights


def _windowed(config: Mapping[str, Any]) -> int:
    """Blocks with a sliding window. Gemma 3's first files name the number of blocks from one without to the next."""
    if config["model_type"] == "gemma3_text" and not config.get("layer_types"):
        layers: int = config["num_hidden_layers"]
        return layers - layers // (config.get("sliding_window_pattern") or 6)
    return int((config.get("layer_types") or []).count("sliding_attention"))
