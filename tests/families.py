"""The table of families: what serves which models, by the functions that decide it in a run.

A small configuration stands for each family. Tests make a model of it and compare each cell with other libraries.
`python -m tests.families` draws the tables of docs/models.md and README.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.adapter_files import refused_expert_adapters
from qerl.models.quantize import refused_by_awq
from qerl.models.structure import StructureError, structure_of
from qerl.rollout.sampler import refused_by_engine, refused_by_vllm
from qerl.settings.run import EXPERT_LAYERS

ROOT = Path(__file__).parents[1]
#: What the small models of all families have; the vocabulary is that of `tests.tiny.tiny_tokenizer`.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 102,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
#: For a key of `SHAPE` that configurations of a family don't have.
LEFT_OUT = object()
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}

_QWEN_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

#: A block of each kind, of Qwen3.5.
_HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.06,
    "pad_token_id": None,  # whose embedding would be zero, so that padding would leave no trace anyway
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": _QWEN_ROPE,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}

#: The original length is so short that the queries of a short text grow.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 8,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """A family of the hub: its name, a word on it, and `values` of config.json that make a small model of it.

    `formats` are those of its weights.
    """

    name: str
    about: str
    values: dict[str, Any]
    formats: str = ", ".join(name.upper() for name in ("bf16", *PACKED_FORMATS))

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of a small model, with `changes` of its values. Those that are `LEFT_OUT` are not in it."""
        values = {**SHAPE, **self.values, **changes}
        return AutoConfig.for_model(**{key: value for key, value in values.items() if value is not LEFT_OUT})


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2, Qwen2.5", "", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": Family("Qwen3 (dense)", "", {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}),
    "llama": Family("Llama 3", "", {"model_type": "llama", "rope_parameters": LLAMA_ROPE}),
    "mistral": Family(
        "Mistral (7B from v0.2, Nemo; text of Small 3.1, 3.2)",
        "",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    ),
    "mistral-sliding": Family(
        "Mistral 7B v0.1", "sliding window", {"model_type": "mistral", "head_dim": 16, "sliding_window": 8}
    ),
    "ministral3": Family(
        "Ministral 3 (text)",
        "queries grow with their position",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _MINISTRAL_ROPE, "initializer_range": 0.1},
    ),
    "phi3": Family(
        "Phi-3, Phi-4",
        "fused q, k, v and gate, up; part of a head rotates in Phi-4-mini",
        {
            "model_type": "phi3",
            "sliding_window": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": _PHI_ROPE,
        },
    ),
    "gemma3": Family(
        "Gemma 3 (270M, 1B; text of 4B, 12B, 27B)",
        "norms 1 + w before and after, norms of q and k, sliding windows, scaled embedding",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _GEMMA_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        "packed experts as grouped products",
        {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True},
    ),
    "qwen2_moe": Family(
        "Qwen2-MoE (Qwen1.5-MoE-A2.7B)",
        "experts beside a shared one with a gate",
        {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 128},
    ),
    "mixtral": Family(
        "Mixtral",
        "experts as wide as an MLP",
        {"model_type": "mixtral", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": Family(
        "OLMoE",
        "norms of all queries and of all keys",
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.6, GLM-4.7",
        "experts chosen by sigmoids and corrections, beside a shared one; first blocks without",
        {
            "model_type": "glm4_moe",
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_5": Family(
        "Qwen3.5, Qwen3.6 (dense, text)",
        "gated delta nets, whose layers stay BF16 unless packed by option; attention with a gate; norms 1 + w",
        {"model_type": "qwen3_5_text", **_HYBRID},
    ),
    "qwen3_5_moe": Family(
        "Qwen3.5, Qwen3.6 with experts",
        "gated delta nets, whose layers stay BF16 unless packed by option; experts beside a shared one with a gate",
        {
            "model_type": "qwen3_5_moe_text",
            **_HYBRID,
            **_EXPERTS,
            "intermediate_size": LEFT_OUT,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "qwen3_next": Family(
        "Qwen3-Next",
        "delta nets whose layers are fused, experts beside a shared one",
        {"model_type": "qwen3_next", "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 64},
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "attention sinks, sliding windows, experts with biases",
        {
            "model_type": "gpt_oss",
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": _YARN,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "MXFP4 as published",
    ),
}


@dataclass(frozen=True)
class Row:
    """A family's row of the table; `refusal` is the sentence that refuses all of it.

    `refused` has those that refuse parts: AWQ, adapters of experts, engine and vLLM.
    """

    name: str
    about: str
    formats: str
    refused: dict[str, str] = field(default_factory=dict)
    lora: str = ""
    norms: str = ""
    refusal: str | None = None

    def has(self, part: str) -> bool:
        """Whether a part is served: "AWQ", which equalises weights, or a sampler, "engine" or "vLLM"."""
        return self.refusal is None and part not in self.refused

    @property
    def sampler(self) -> str:
        """The samplers on a GPU, short."""
        return ("the engine" if self.has("engine") else "the eager sampler") + ", vLLM" * self.has("vLLM")


def row(family: Family) -> Row:
    """What the code does with a family's models."""
    config = family.config()
    try:
        structure = structure_of(config)
    except StructureError as error:
        return Row(family.name, family.about, family.formats, refusal=str(error))
    asked = {
        "AWQ": refused_by_awq(structure),
        "LoRA on experts": refused_expert_adapters(config.model_type) if structure.experts else None,
        "engine": refused_by_engine(config),
        "vLLM": refused_by_vllm(config),
    }
    refused = {part: sentence for part, sentence in asked.items() if sentence}
    lora = ", ".join(f"`{target}`" for target in structure.targets)
    if structure.experts and "LoRA on experts" not in refused:
        lora += f"; if named {', '.join(f'`{target}`' for target in EXPERT_LAYERS)}"
    norms = ", ".join(f"`{name}`" for name in structure.norms.values()) + ", of the form 1 + w" * bool(structure.offset)
    return Row(family.name, family.about, family.formats, refused, lora, norms)


def long_table() -> str:
    """The table of docs/models.md."""
    head = ["family", "weights", "LoRA", "trained norms, noise", "eager sampler", "engine", "vLLM", "evaluation"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for one in (row(family) for family in FAMILIES.values()):
        label = f"{one.name}: {one.about}" if one.about else one.name
        if one.refusal:
            cells = [label, "refused", *["–"] * 6]
        else:
            weights = f"{one.formats}; {'AWQ' if one.has('AWQ') else 'no AWQ'}"
            samplers = ["✓" if one.has(sampler) else "–" for sampler in ("engine", "vLLM")]
            cells = [label, weights, one.lora, one.norms, "✓", *samplers, "✓"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def refusals() -> str:
    """The sentences that refuse families and parts of them, for docs/models.md: families of equal ones in one row.

    Sentences that differ only in what the model is or has end with "…" there.
    """
    rows = [row(family) for family in FAMILIES.values()]
    found = [(one.name, {"all": one.refusal} if one.refusal else one.refused) for one in rows]
    families: dict[tuple[str, str], list[str]] = {}
    for name, refused in found:
        for part, sentence in refused.items():
            begin = re.sub(r"(, not (?:of )?|, and the model has ).*", r"\1…", sentence)
            families.setdefault((part, begin), []).append(name)
    return "\n".join(f"| {part} | {begin} | {' · '.join(names)} |" for (part, begin), names in families.items())


def short_table() -> str:
    """The table of README.md: families with the same samplers in one row."""
    rows = [row(family) for family in FAMILIES.values()]
    lines = ["| model | weights that train, sample and are evaluated | sampler on a GPU |", "| --- | --- | --- |"]
    for sampler, formats in dict.fromkeys((one.sampler, one.formats) for one in rows if not one.refusal):
        names = [one.name for one in rows if (one.sampler, one.formats) == (sampler, formats) and not one.refusal]
        lines.append(f"| {'; '.join(names)} | {formats} | {sampler} |")
    lines.append(f"| other decoders of linear layers and attention, untested | {Family.formats} | the eager sampler |")
    refused = "; ".join([*(one.name for one in rows if one.refusal), "other structures"])
    return "\n".join([*lines, f"| {refused} | refused by a sentence before anything starts | |"])


def pages() -> dict[Path, str]:
    """The pages with their tables as the code has them."""
    models, readme = ROOT / "docs/models.md", ROOT / "README.md"
    text = models.read_text()
    for name, table in (("families", long_table()), ("refusals", refusals())):
        text = re.sub(
            rf"<!-- {name} -->\n.*?<!-- end -->", f"<!-- {name} -->\n{table}\n<!-- end -->", text, flags=re.DOTALL
        )
    table = re.sub(r"\| model \| .*?\n\n", f"{short_table()}\n\n", readme.read_text(), count=1, flags=re.DOTALL)
    return {models: text, readme: table}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
