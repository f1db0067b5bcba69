"""The table of families: what serves which models, by the functions that decide it in a run.

A small configuration stands for each family. Tests make a model of it and compare each cell with other libraries.
`python -m tests.families` draws the tables of docs/models.md and README.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
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
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Family:
    """A family of the hub: its name, a word on it, and `values` of config.json that make a small model of it.

    `formats` are those of its weights.
    """

    name: str
    values: dict[str, Any]
    about: str = ""
    formats: str = ", ".join(name.upper() for name in ("bf16", *PACKED_FORMATS))

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration of a small model, with `changes` of its values. Those that are `LEFT_OUT` are not in it."""
        values = {**SHAPE, **self.values, **changes}
        return AutoConfig.for_model(**{key: value for key, value in values.items() if value != LEFT_OUT})


_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["families"]
FAMILIES: dict[str, Family] = {name: Family(**values) for name, values in _READ.items()}


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
    return "\n".join([*lines, f"| {refused} | refused at the start | |"])


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
