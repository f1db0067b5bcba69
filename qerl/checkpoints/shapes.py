"""Shapes of known models: widths, counts and values of config.json.

The workflow reads them on every call, so this module imports no large library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Widths and counts of a model, from which its memory and the floor of its steps follow.

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
    """Whether a weight format packs their layers except b and a. Otherwise they are bfloat16."""

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
    """The experts that stand in place of gate, up and down; `intermediate` is then the width of a token's experts."""
    nets: DeltaNets | None = None
    """The delta nets that stand in place of attention in some blocks; queries of the others then have gates."""
    windowed: int = 0
    """Blocks whose attention reads the last `window` tokens alone, where others read all."""
    window: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape by the values of transformers' configuration, which has what a config.json leaves out."""
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
            windowed=(config.get("layer_types") or []).count("sliding_attention"),
            window=config.get("sliding_window") or 0,
        )

    def with_packed_nets(self, packed: bool = True) -> ModelShape:
        """The shape with delta nets that a weight format packs or doesn't; a model without them stays as it is."""
        return replace(self, nets=replace(self.nets, packed=packed)) if self.nets else self

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a block's projections: q, k, v, o, gate, up, down. A mixture's shared expert has the last three.

        In a hybrid these belong to a block with attention.
        """
        hidden, query, kv = self.hidden, self.query_width, self.kv_width
        wide = self.mixture.shared if self.mixture else self.intermediate
        attention = (2 * query if self.nets else query, hidden), (kv, hidden), (kv, hidden), (hidden, query)
        return (*attention, (wide, hidden), (wide, hidden), (hidden, wide)) if wide else attention

    @property
    def net_linears(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a delta net's layers; the last two are narrow, and a weight format packs the three before."""
        if self.nets is None:
            return ()
        channels, values, narrow = self.nets.channels, self.nets.value_width, (self.nets.value, self.hidden)
        return (channels, self.hidden), (values, self.hidden), (self.hidden, values), narrow, narrow

    @property
    def attentions(self) -> int:
        """Blocks with attention."""
        return self.layers - (self.nets.count if self.nets else 0)

    @property
    def packable(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the projections of all blocks that a weight format packs, without experts."""
        nets = self.layers - self.attentions
        of_nets = self.net_linears[:3] * nets if self.nets and self.nets.packed else ()
        return (*self.linears * self.attentions, *self.linears[4:] * nets, *of_nets)

    @property
    def dense(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of the layers of all delta nets that are bfloat16 in each format."""
        each = self.net_linears[3:] if self.nets and self.nets.packed else self.net_linears
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
        """Elements of the weights of all blocks' layers, all experts included."""
        return self._weights(self.mixture.experts if self.mixture else 0)

    def _weights(self, experts: int) -> int:
        """Elements of the weights of all blocks' layers, with so many experts of each block."""
        of_experts = self.expert_linears * (experts * self.layers)
        return sum(math.prod(linear) for linear in (*self.packable, *self.dense, *of_experts))

    def adapter_numbers(self, rank: int) -> int:
        """Elements of A and B of adapters on all layers outside of experts."""
        return rank * sum(map(sum, (*self.packable, *self.dense)))

    @property
    def adapted_of_experts(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of each expert's layers that can have adapters; gpt-oss has gate and up in one."""
        if self.mixture is None or not self.mixture.biased:
            return self.expert_linears
        hidden, wide = self.hidden, self.mixture.intermediate
        return (2 * wide, hidden), (hidden, wide)

    def attention_format(self, weights: str) -> str:
        """The format of q, k, v and o in a base of `weights`."""
        return "bf16" if self.mixture and self.mixture.biased else weights


# Shapes of published models as values of config.json, for benches on random weights.


def _rope(base: float, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **others}


def _shape(
    kind: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        **others,
    }


def _every(last: str, others: str, period: int, layers: int) -> list[str]:
    """Kinds of blocks; the last of each `period` is another."""
    return [last if layer % period == period - 1 else others for layer in range(layers)]


def _qwen(
    hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int = 151936, tied: bool = True
) -> dict[str, Any]:
    """Values of Qwen2.5, with the ids of its tokens."""
    return _shape(
        "qwen2", hidden, layers, heads, kv, intermediate, vocabulary, tie_word_embeddings=tied,
        bos_token_id=151643, eos_token_id=151645, max_position_embeddings=32768, rope_parameters=_rope(1e6),
    )  # fmt: skip


#: Values of config.json of Qwen2.5 by size. 8B has the widths of Qwen3-8B, whose norms of q and k it lacks.
QWEN: dict[str, dict[str, Any]] = {
    "tiny": _qwen(64, 2, 2, 1, 128),
    "small": _qwen(512, 4, 4, 2, 1024),
    "1.5B": _qwen(1536, 28, 12, 2, 8960),
    "3B": _qwen(2048, 36, 16, 2, 11008),
    "7B": _qwen(3584, 28, 28, 4, 18944, 152064, tied=False),
    "8B": _qwen(4096, 36, 32, 8, 12288, tied=False),
    "14B": _qwen(5120, 48, 40, 8, 13824, 152064, tied=False),
    "32B": _qwen(5120, 64, 40, 8, 27648, 152064, tied=False),
}
#: Values of config.json by name. Of models with images they are the text model's.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral-7b": _shape("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096, head_dim=128),
    "gemma-3-12b": _shape(
        "gemma3_text", 3840, 48, 16, 8, 15360, 262208, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        layer_types=_every("full_attention", "sliding_attention", 6, 48), tie_word_embeddings=True,
        rope_parameters={
            "sliding_attention": _rope(1e4), "full_attention": {**_rope(1e6), "rope_type": "linear", "factor": 8.0},
        },
    ),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, rope_parameters=_rope(1e6),
    ),
    # The published files have MXFP4 experts, and the rest in bfloat16.
    "gpt-oss-20b": _shape(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, max_position_embeddings=131072, attention_bias=True,
        layer_types=_every("full_attention", "sliding_attention", 2, 24),
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    ),
    # Qwen3.6-27B has this shape, too.
    "qwen3.5-27b": _shape(
        "qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        max_position_embeddings=262144, layer_types=_every("full_attention", "linear_attention", 4, 64),
        rope_parameters=_rope(
            1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True,
        ),
    ),
}  # fmt: skip
#: Kinds of models whose published files have packed experts alone, in MXFP4.
EXPERTS_ALONE = ("gpt_oss",)
#: The sizes that benches know, Qwen2.5's first.
SIZES = (*QWEN, *PUBLISHED)


def config_of(size: str) -> dict[str, Any]:
    """Values of config.json of a size of Qwen2.5 or of a published model."""
    return PUBLISHED[size] if size in PUBLISHED else QWEN[size]


def vocabulary(size: str) -> int:
    """The number of tokens that a size knows."""
    return int(config_of(size)["vocab_size"])


def has_packed_experts_alone(size: str) -> bool:
    """Whether the published files of a size have experts in MXFP4, and all else in bfloat16."""
    return size in PUBLISHED and PUBLISHED[size]["model_type"] in EXPERTS_ALONE


def prompt_id_range(tokens: int) -> tuple[int, int]:
    """The least id of a random prompt and the one behind the largest, for a vocabulary of so many tokens; none of them
    is special.
    """
    return min(1000, tokens // 2), min(100000, tokens)


def shape_of(size: str) -> ModelShape:
    """The shape of a size of Qwen2.5 or of a published model."""
    return ModelShape.of(config_of(size))
