"""The card (README.md) of a trained adapter's folder, which describes the adapter and how PEFT loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

CARD = "README.md"
#: What the hub's metadata says of every adapter.
ABOUT_ADAPTERS: dict[str, Any] = {
    "library_name": "peft",
    "pipeline_tag": "text-generation",
    "tags": ["lora", "qerl", "reinforcement-learning"],
}

#: The argument that makes transformers unpack a base for whose packed layers PEFT has no adapter.
_UNPACKED = "CompressedTensorsConfig(dequantize=True)"
#: By weight format: how stock libraries deviate from the policy as it was trained.
_NOTES = {
    "bf16": "",
    "nvfp4": "PEFT has no adapter for layers packed so: they are unpacked, and transformers rounds them to bfloat16.",
    "mxfp4": "PEFT has no adapter for layers packed so: they are unpacked, which is exact.",
    "nf4": "The base's own settings load it by bitsandbytes, which multiplies by its weights in bfloat16.",
}
_NORMS = "With `dtype=torch.bfloat16`, transformers keeps norms in 16 bits, which rounds those that were trained."


@dataclass(frozen=True)
class Base:
    """The checkpoint of an adapter: a folder, or a repository of the hub with its commit."""

    name: str
    revision: str | None = None


def write_card(folder: Path, base: Base, weights: str, norms: bool, loader: str) -> None:
    """Write the card of the adapter in `folder`, which was trained on `base` in the weight format `weights`.

    transformers' class `loader` makes the base's model.
    """
    about = ModelCardData(base_model=base.name, **ABOUT_ADAPTERS)
    (folder / CARD).write_text(
        f"---\n{about.to_yaml()}\n---\n{_text(folder.resolve(), base, weights, norms, loader)}", encoding="utf-8"
    )


def _text(folder: Path, base: Base, weights: str, norms: bool, loader: str) -> str:
    at = f" at {base.revision}" if base.revision else ""
    trained = "and the two norms of each block, in float32" if norms else "in float32"
    return f"""
# A policy trained by qerl

A LoRA adapter {trained}, trained by reinforcement learning on `{base.name}`{at},
whose linear weights are {weights}. `adapter_config.json` has rank, alpha and targets.

With transformers and PEFT:

```python
{loading_code(str(folder), base, weights, loader)}
```

{loading_notes(weights, norms)}

With qerl, of a run of `qerl train` in the folder RUN: `qerl sample RUN PROMPT`. For vLLM: `qerl export RUN OUT` writes
a base and an adapter that it loads.
"""


def loading_notes(weights: str, norms: bool) -> str:
    """What differs from the policy as it was trained when `loading_code` loads it."""
    return "\n".join(filter(None, (_NOTES[weights], _NORMS if norms else "")))


def loading_code(adapter: str, base: Base, weights: str, loader: str) -> str:
    """Python that loads `adapter`, a folder or a repository, with stock transformers and PEFT."""
    unpacked = weights in ("nvfp4", "mxfp4")
    classes = [loader, "AutoTokenizer", *(["CompressedTensorsConfig"] if unpacked else [])]
    revision = f', revision="{base.revision}"' if base.revision else ""
    quantization = f", quantization_config={_UNPACKED}" if unpacked else ""
    return f"""import torch
from peft import PeftModel
from transformers import {", ".join(classes)}

base = {base.name!r}
tokenizer = AutoTokenizer.from_pretrained(base{revision})
model = {loader}.from_pretrained(base{revision}, dtype=torch.float32{quantization})
model = PeftModel.from_pretrained(model{".float()" if unpacked else ""}, {adapter!r}).eval()"""
