"""Files of an adapter in PEFT's layout, and the card (README.md) that describes it and how PEFT loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from qerl.checkpoints.files import ADAPTER, ADAPTER_CONFIG, CheckpointError, StockLoading, whole_model
from qerl.checkpoints.layouts import own_name
from qerl.checkpoints.tensors import write_tensors
from qerl.host.console import visible
from qerl.models.structure import MISFITS
from qerl.settings.models import FORMATS

# Files of an adapter in PEFT's layout, by the names with which stock PEFT loads it on its base.
#
# In memory an adapter's tensors have the names of the text model. Stock classes have that within the whole where the
# base is a model of images and text (`qerl.checkpoints.layouts`).

#: The prefix of tensors' names in an adapter's file.
PREFIX = "base_model.model."
#: The highest rank of an adapter without matrices, and the bound of a scale.
_MOST_RANK = 2**16
_MOST_ALPHA = 1e30


#: Keys of an adapter's configuration by which PEFT computes more than LoRA, or imports a module that they name.
_REFUSED = ("arrow_config", "layer_replication", "megatron_config")


#: What PEFT's options must be for (alpha / r) B A to be all that an adapter adds.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights
}


def adapter_config(folder: Path) -> LoraConfig:
    """PEFT's configuration of a stored adapter. Raises `CheckpointError` as `adapter_values` does."""
    adapter_values(folder)
    try:
        return cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    except MISFITS as error:
        raise misfit(folder, error) from None


def adapter_values(folder: Path) -> dict[str, Any]:
    """The values of a stored adapter's configuration.

    Raises `CheckpointError` for values that PEFT fails on, and for ranks beyond those of the file's matrices.
    """
    path = folder / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    if refused := [key for key in _REFUSED if values.get(key)]:
        raise CheckpointError(f"{path} has {refused[0]}, which isn't supported; take an adapter of plain LoRA")
    patterns = [values.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise CheckpointError(f"{path} has a rank_pattern or alpha_pattern that is no mapping; save the adapter again")
    ranks, alphas = patterns
    shapes = _shapes(folder)
    rows = [shape[0] for name, shape in shapes.items() if ".lora_A" in name or ".lora_embedding_A" in name]
    for rank in (values.get("r", 8), *ranks.values()):
        if type(rank) is not int or not 1 <= rank <= max(rows, default=_MOST_RANK):
            raise CheckpointError(
                f"{path} has the rank {str(rank)[:40]}, and the matrices of {ADAPTER} have at most "
                f"{max(rows, default=_MOST_RANK)}; save the adapter again"
            )
    for alpha in (values.get("lora_alpha", 8), *alphas.values()):
        if type(alpha) not in (int, float) or not abs(alpha) < _MOST_ALPHA:
            raise CheckpointError(f"{path} has lora_alpha={str(alpha)[:40]}, which is no finite number; correct it")
    for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_pattern"):
        names = values.get(key)
        many = isinstance(names, list) and all(isinstance(name, str) for name in names)
        one = isinstance(names, str) and key not in ("modules_to_save", "target_parameters")
        if not (names is None or many or one):
            raise CheckpointError(f"{path} has {key}={str(names)[:80]!r}, which lists no names; correct it")
    return {"r": 8, "lora_alpha": 8, **values}  # PEFT's defaults


def misfit(folder: Path, error: Exception) -> CheckpointError:
    """The refusal of an adapter that PEFT raised `error` for."""
    return CheckpointError(
        f"{folder} holds an adapter that doesn't fit the model ({' '.join(str(error).split())[:300]}); give the model "
        "that it was trained on"
    )


def check_taken(model: PeftModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `CheckpointError` if PEFT took another set of matrices into the model than a folder's `tensors`.

    Adapters of experts are none of these, whose names are the model's.
    """
    taken = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name for name in taken if ".experts.lora_" not in name and ".experts.base_layer." not in name}
    if missing := sorted(expected - tensors.keys()):
        name = missing[0].removeprefix(PREFIX)
        raise CheckpointError(f"{folder / ADAPTER} lacks {name}, which {ADAPTER_CONFIG} calls for; save it again")
    if extra := sorted(name for name in tensors.keys() - expected if ".lora_" in name):
        raise CheckpointError(
            f"{folder / ADAPTER} holds {extra[0].removeprefix(PREFIX)}, which {ADAPTER_CONFIG} doesn't name or the "
            "model lacks; give the adapter's own model, or save it again"
        )


def check_plain(folder: Path, values: Mapping[str, Any], needed: str) -> None:
    """Raise `CheckpointError` if PEFT adds anything but (alpha / r) B A by the values of an adapter's configuration."""
    for option, plain in _PLAIN.items():
        if values.get(option) is not None and values[option] not in plain:
            raise CheckpointError(f"{folder / ADAPTER_CONFIG} has {option}={values[option]!r}, and {needed}")


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor of an adapter by its name in the file."""
    with safe_open(folder / ADAPTER, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.offset_keys()}


def _own(name: str) -> str:
    name = name.removeprefix(PREFIX)
    return own_name(name) or name


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by the text model's names."""
    return {_own(name): tensor for name, tensor in load_file(folder / ADAPTER).items()}


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], checkpoint: Path) -> None:
    """Write an adapter of the base `checkpoint`, whose `tensors` have the text model's names."""
    folder.mkdir(exist_ok=True)
    model = whole_model(checkpoint)
    if model is not None:
        tensors = {model.adapter_name(name): tensor for name, tensor in tensors.items()}
        config = config | ({"exclude_modules": model.excluded} if model.excluded else {})
    named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
    write_tensors(named, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


# Stock PEFT makes the class of images and text from the same folder, with a longer prefix and vision layers of the same
# names; so names are changed on disk and `exclude_modules` added, and PEFT's key_mapping names them back.
def name_for_stock(folder: Path, checkpoint: Path) -> None:
    """Give the tensors that PEFT has saved in `folder` the names in which it loads them on `checkpoint`."""
    if whole_model(checkpoint) is not None:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        write_adapter(folder, read_adapter(folder), config, checkpoint)


# The card (README.md) of a trained adapter's folder, which describes the adapter and how PEFT loads it.

CARD = "README.md"
#: What the hub's metadata says of every adapter.
ABOUT_ADAPTERS: dict[str, Any] = {
    "library_name": "peft",
    "pipeline_tag": "text-generation",
    "tags": ["lora", "qerl", "reinforcement-learning"],
}

#: How stock libraries deviate from a policy of packed experts that they don't read.
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
    at = f" at {base.revision}" if base.revision else ""
    trained = "and the two norms of each block, in float32" if norms else "in float32"
    text = f"""---
{about.to_yaml()}
---

# A policy trained by qerl

A LoRA adapter {trained}, trained by reinforcement learning on {code_span(base.name)}{at},
whose linear weights are {weights}. `adapter_config.json` has rank, alpha and targets.

With transformers and PEFT:

```python
{loading_code(str(folder.resolve()), base, stock)}
```

{loading_notes(weights, norms, stock)}

With qerl, of a run of `qerl train` in the folder RUN: `qerl sample RUN PROMPT`. For vLLM: `qerl export RUN OUT` writes
a base and an adapter that it loads.
"""
    (folder / CARD).write_text(text, encoding="utf-8")


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
    note = _EXPERTS if stock.unpacked_by == "qerl" else "" if weights == "bf16" else FORMATS[weights].note
    return "\n".join(filter(None, (note, _NORMS if norms else "")))


def loading_code(adapter: str, base: Base, stock: StockLoading) -> str:
    """Python that loads `adapter`, a folder or a repository, with stock transformers and PEFT.

    Where this package unpacks the base, it first writes the base with unpacked experts, which transformers reads.
    """
    revision = f', revision="{base.revision}"' if base.revision else ""
    if stock.unpacked_by == "qerl":
        head = f"""from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from qerl.models.export import write_dense
from transformers import {stock.loader}, AutoTokenizer

base, unpacked = {base.name!r}, Path("unpacked-base")
if not unpacked.exists():
    packed = base if Path(base).is_dir() else snapshot_download(base{revision})
    write_dense(Path(packed), unpacked, torch.float32)"""
        source, options, cast = "unpacked", "", ""
    else:
        classes = [stock.loader, "AutoTokenizer", *filter(None, [stock.unpacked_by])]
        head = f"""import torch
from peft import PeftModel
from transformers import {", ".join(classes)}

base = {base.name!r}"""
        unpacking = f", quantization_config={stock.unpacked_by}(dequantize=True)" if stock.unpacked_by else ""
        source, options, cast = f"base{revision}", unpacking, ".float()" if stock.unpacked_by else ""
    return f"""{head}
tokenizer = AutoTokenizer.from_pretrained({source})
model = {stock.loader}.from_pretrained({source}, dtype=torch.float32{options})
model = PeftModel.from_pretrained(model{cast}, {adapter!r}).eval()"""
