"""Widths and counts of a model, from which its memory follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl.kernels.packed_sequences import SINK_FEATURES

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
        if experts is None or chosen is None or wide is None:
            return None
        return cls(experts, chosen, wide, shared=config.get("shared_expert_intermediate_size") or 0)


@dataclass(frozen=True)
class DeltaNets:
    """The gated delta nets that stand in place of attention in some blocks. Their layers are bfloat16."""

    count: int
    """Blocks that have one."""
    key: int
    """Heads of queries and keys."""
    value: int
    key_dim: int
    value_dim: int
    taps: int

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

    @property
    def kept_bytes(self) -> int:
        """Bytes per token that a net keeps for its backward pass, without its input.

        They were counted in transformers' rule for chunks of 64 tokens. It keeps float32 copies of queries, keys and
        values for each value head, matrices of a chunk, and the state before it.
        """
        head = 32 * self.key_dim + 30 * self.value_dim + self.key_dim * self.value_dim // 16 + 1314
        return self.value * head + 8 * self.key * self.key_dim


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
            biased=config["model_type"] == "qwen2" or bool(config.get("attention_bias")),
            mixture=mixture,
            nets=DeltaNets.of(config),
        )

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
        if self.nets is None:
            return ()
        widths = self.nets.channels, self.nets.value_width, self.nets.value, self.nets.value
        return (*((width, self.hidden) for width in widths), (self.hidden, self.nets.value_width))

    @property
    def attentions(self) -> int:
        """Blocks with attention."""
        return self.layers - (self.nets.count if self.nets else 0)

    @property
    def packable(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the projections of all blocks that a weight format packs, without experts."""
        return (*self.linears * self.attentions, *self.linears[4:] * (self.layers - self.attentions))

    @property
    def dense(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the layers of all delta nets."""
        return self.net_linears * (self.layers - self.attentions)

    @property
    def expert_linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of each expert's gate, up and down."""
        if self.mixture is None:
            return ()
        hidden, wide = self.hidden, self.mixture.intermediate
        return (wide, hidden), (wide, hidden), (hidden, wide)

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

    @property
    def kept_bytes(self) -> int:
        """Bytes per token that a block without adapters keeps for its backward pass on a GPU.

        These are the inputs of both norms and the first one's result, the rotated queries and keys, the values,
        attention's result and log-sum-exps, and what the MLP keeps. Attention with sinks keeps copies of its inputs and
        its result with more features, those of keys for all heads. Of a hybrid it is a block with a delta net, which
        most blocks have and which keeps more than attention.
        """
        if self.nets:
            return HALF * 3 * self.hidden + self.nets.kept_bytes + 2 * 4 + self._kept_of_mlp
        attention = 3 * self.hidden + 2 * self.query_width + 2 * self.kv_width
        if self.mixture and self.mixture.biased:
            attention = 3 * self.hidden + self.query_width + 4 * (self.query_width + self.heads * SINK_FEATURES)
        return HALF * attention + 4 * self.heads + 2 * 4 + self._kept_of_mlp

    @property
    def _kept_of_mlp(self) -> int:
        """Bytes per token that an MLP keeps: its input, gate, up and their product.

        A mixture keeps gate, up and the outputs of a token's experts, with their numbers and weights and the router's
        probabilities, but not its input. A shared expert is an MLP, whose output and gate are kept, too.
        """
        mixture = self.mixture
        if mixture is None:
            return HALF * (self.hidden + 3 * self.intermediate)
        routed = HALF * (2 * self.intermediate + mixture.chosen * self.hidden)
        choice = 4 * mixture.experts + (8 + 4 + 4) * mixture.chosen + 4
        shared = HALF * (2 * self.hidden + 3 * mixture.shared + 1) if mixture.shared else 0
        return routed + choice + shared
