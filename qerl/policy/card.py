"""The card (README.md) of a trained adapter's folder, which describes the adapter and how PEFT loads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from qerl.checkpoints.stock import StockLoading
from qerl.host.screen import visible

CARD = "README.md"
#: What the hub's metadata says of every adapter.
ABOUT_ADAPTERS: dict[str, Any] = {
    "library_name": "peft",
    "pipeline_tag": "text-generation",
    "tags": ["lora", "qerl", "reinforcement-learning"],
}

#: By weight format: how stock libraries deviate from the policy as it was trained.
_NOTES = {
    "bf16": "",
    "nvfp4": "PEFT has no adapter for layers packed so: they are unpacked, and transformers rounds them to bfloat16.",
    "mxfp4": "PEFT has no adapter for layers packed so: they are unpacked, which is exact.",
    "nf4": "The base's own settings load it by bitsandbytes, which multiplies by its weights in bfloat16.",
}
#: The same of mixtures in NVFP4 and NF4.
_EXPERTS = "Stock transformers doesn't read experts that are packed so. qerl writes them unpacked, in float32."
_NORMS = "With `dtype=torch.bfloat16`, transformers keeps norms in 16 bits, which rounds those that were trained."


@dataclass(frozen=True)
class Base:
    """The checkpoint of an adapter: a folder, or a repository of the hub with its commit."""

    name: str
    revision: str | None = None


def write_card(folder: Path, base: Base, weights: str, norms: bool, stock: StockLoading) -> None:
    """Write the card of the adapter in `folder`, which was trained on `base` in the weight format `weights`.

    `stock` says how transformers loads the base.
    """
    about = ModelCardData(base_model=base.name, **ABOUT_ADAPTERS)
    (folder / CARD).write_text(
        f"---\n{about.to_yaml()}\n---\n{_text(folder.resolve(), base, weights, norms, stock)}", encoding="utf-8"
    )


def _text(folder: Path, base: Base, weights: str, norms: bool, stock: StockLoading) -> str:
    at = f" at {base.revision}" if base.revision else ""
    trained = "and the two norms of each block, in float32" if norms else "in float32"
    return f"""
# A policy trained by qerl

A LoRA adapter {trained}, trained by reinforcement learning on {code_span(base.name)}{at},
whose linear weights are {weights}. `adapter_config.json` has rank, alpha and targets.

With transformers and PEFT:

```python
{loading_code(str(folder), base, stock)}
```

{loading_notes(weights, norms, stock)}

With qerl, of a run of `qerl train` in the folder RUN: `qerl sample RUN PROMPT`. For vLLM: `qerl export RUN OUT` writes
a base and an adapter that it loads.
"""


def plain(text: str) -> str:
    """A name for Markdown, in which none of its characters begins markup, a cell or a line."""
    return re.sub(r"([\\`*\[\]<>|&~$]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(visible(text).split()))


def code_span(text: str) -> str:
    """A name as code in Markdown, within a longer fence if it has backticks itself."""
    shown = " ".join(visible(text).split())
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def loading_notes(weights: str, norms: bool, stock: StockLoading) -> str:
    """What to know about a base of such weights, and about trained norms, beside `loading_code`."""
    note = _EXPERTS if stock.unpacked_by == "qerl" else _NOTES[weights]
    return "\n".join(filter(None, (note, _NORMS if norms else "")))


def loading_code(adapter: str, base: Base, stock: StockLoading) -> str:
    """Python that loads `adapter`, a folder or a repository, with stock transformers and PEFT."""
    if stock.unpacked_by == "qerl":
        return _code_of_experts(adapter, base, stock.loader)
    classes = [stock.loader, "AutoTokenizer", *filter(None, [stock.unpacked_by])]
    revision = f', revision="{base.revision}"' if base.revision else ""
    quantization = f", quantization_config={stock.unpacked_by}(dequantize=True)" if stock.unpacked_by else ""
    return f"""import torch
from peft import PeftModel
from transformers import {", ".join(classes)}

base = {base.name!r}
tokenizer = AutoTokenizer.from_pretrained(base{revision})
model = {stock.loader}.from_pretrained(base{revision}, dtype=torch.float32{quantization})
model = PeftModel.from_pretrained(model{".float()" if stock.unpacked_by else ""}, {adapter!r}).eval()"""


def _code_of_experts(adapter: str, base: Base, loader: str) -> str:
    """Python that first writes the base with unpacked experts, which transformers reads."""
    revision = f', revision="{base.revision}"' if base.revision else ""
    return f"""from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from qerl.policy.export import write_dense
from transformers import {loader}, AutoTokenizer

base, unpacked = {base.name!r}, Path("unpacked-base")
if not unpacked.exists():
    packed = base if Path(base).is_dir() else snapshot_download(base{revision})
    write_dense(Path(packed), unpacked, torch.float32)
tokenizer = AutoTokenizer.from_pretrained(unpacked)
model = {loader}.from_pretrained(unpacked, dtype=torch.float32)
model = PeftModel.from_pretrained(model, {adapter!r}).eval()"""
