"""Files of an adapter in PEFT's layout, experts' adapters in them, and the card that says how PEFT loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from huggingface_hub import ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.utils.constants import DUMMY_TARGET_MODULES
from pydantic import BaseModel, Field, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from qerl.checkpoints.files import ADAPTER, ADAPTER_CONFIG, CheckpointError, StockLoading, whole_model
from qerl.checkpoints.layouts import own_name
from qerl.host.console import visible
from qerl.models.experts import AdaptedExperts, Experts, adapted_experts
from qerl.models.linear import POLICY_ADAPTER
from qerl.models.loading import write_tensors
from qerl.models.structure import MISFITS, Structure
from qerl.settings.base import ConfigError, nearest
from qerl.settings.models import FORMATS
from qerl.settings.run import AdapterSettings

# Files of an adapter in PEFT's layout, by the names with which stock PEFT loads it on its base.
#
# In memory an adapter's tensors have the names of the text model. Stock classes have that within the whole where the
# base is a model of images and text (`qerl.checkpoints.layouts`).

#: The prefix of tensors' names in an adapter's file.
PREFIX = "base_model.model."
#: What PEFT's options must be for (alpha / r) B A to be all that an adapter adds.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "alora_invocation_tokens": (None,),
}

_Rank = Annotated[int, Field(ge=1, le=2**16)]
_Alpha = Annotated[float, Field(gt=-1e30, lt=1e30)]
_Names = list[str] | None


class _Values(BaseModel, strict=True):
    """What PEFT takes for granted in an adapter's configuration."""

    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    target_modules: _Names | str = None
    exclude_modules: _Names | str = None
    layers_pattern: _Names | str = None
    modules_to_save: _Names = None
    target_parameters: _Names = None
    init_lora_weights: bool | Literal["gaussian"] = True  # by others PEFT changes the base's weights
    # By these PEFT computes more than LoRA, or imports a module that they name.
    arrow_config: None = None
    layer_replication: None = None
    megatron_config: None = None


def adapter_config(folder: Path) -> LoraConfig:
    """PEFT's configuration of a stored adapter. Raises `CheckpointError` as `adapter_values` does."""
    adapter_values(folder)
    try:
        return cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    except MISFITS as error:
        raise misfit(folder, error) from None


def adapter_values(folder: Path) -> dict[str, Any]:
    """The values of a stored adapter's configuration.

    Raises `CheckpointError` for values that PEFT fails on, and for ranks above the ranks of the file's matrices.
    """
    path = folder / ADAPTER_CONFIG
    values = {"r": 8, "lora_alpha": 8, **json.loads(path.read_text(encoding="utf-8"))}  # PEFT's defaults
    try:
        checked = _Values.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise CheckpointError(
            f"{path} has {key}={str(values[key])[:80]}, which isn't supported; save the adapter again, or take one of "
            "plain LoRA"
        ) from None
    with safe_open(folder / ADAPTER, "pt") as file:
        names = [name for name in file.offset_keys() if ".lora_A" in name or ".lora_embedding_A" in name]
        rows = [file.get_slice(name).get_shape()[0] for name in names]
    for rank in (checked.r, *(checked.rank_pattern or {}).values()):
        if rows and rank > (most := max(rows)):
            raise CheckpointError(
                f"{path} has the rank {rank}, and the matrices of {ADAPTER} have at most {most}; save the adapter again"
            )
    return values


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


@dataclass(frozen=True)
class Base:
    """The checkpoint of an adapter: a folder, or a repository of the hub with its commit."""

    name: str
    revision: str | None = None


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by the text model's names."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / ADAPTER).items()}
    return {own_name(name) or name: tensor for name, tensor in tensors.items()}


# Stock PEFT makes the class of images and text from the same folder, with a longer prefix and vision layers of the same
# names; so names are changed on disk and `exclude_modules` added, and PEFT's key_mapping names them back.
def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], checkpoint: Path) -> None:
    """Write an adapter of the base `checkpoint`, whose `tensors` have the text model's names."""
    folder.mkdir(parents=True, exist_ok=True)
    model = whole_model(checkpoint)
    if model is not None:
        tensors = {model.adapter_name(name): tensor for name, tensor in tensors.items()}
        config = config | ({"exclude_modules": model.excluded} if model.excluded else {})
    named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
    write_tensors(named, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def save_adapter(peft: PeftModel, name: str, folder: Path, base: Base, checkpoint: Path) -> None:
    """Write one of a model's adapters with which stock PEFT makes the policy on `checkpoint`; it refers to `base`."""
    config = peft.peft_config[name]
    config.base_model_name_or_path, config.revision = base.name, base.revision
    # PEFT keeps targets as a set, whose order in a file would follow the process's hash seed.
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    # Embeddings are never trained, so PEFT needn't query the hub for changes to them.
    tensors = get_peft_model_state_dict(peft, adapter_name=name, save_embedding_layers=False)
    experts = adapted_experts(peft) if name == POLICY_ADAPTER else {}
    ours = tuple(f"{path}.lora_" for path in experts)
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items() if not key.startswith(ours)}
    for path, module in experts.items():
        tensors |= {key: view.detach().flatten(1).contiguous() for key, view in _stored(path, module)}
    named = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    write_adapter(folder, named, values | {"inference_mode": True}, checkpoint)


# Adapters of experts in the layouts that stock PEFT loads, and in its configuration.
#
# Files have plain LoRA on each expert's layers, which stock PEFT 0.21 reads for Qwen3-MoE; in PEFT's stacks gate and up
# would share one A, so a conversion back could not keep each rank. gpt-oss has stacks in its files, too, and its
# adapters are PEFT's of such stacks (`target_parameters`). vLLM's sources read both; it was not run.

#: Values of `model_type` with which adapters of experts are tested in stock PEFT.
_SERVED = ("qwen3_moe", "gpt_oss")
#: The fused layer of an expert that gate and up are parts of.
_FUSED = "gate_up_proj"
_PARTS = {"gate_proj", "up_proj"}


def refused_expert_adapters(kind: str) -> str | None:
    """A sentence that says why experts of models of this `model_type` have no adapters; None if they may have."""
    if kind in _SERVED:
        return None
    return f"stock PEFT is tested to load adapters of experts of {', '.join(_SERVED)}, not of {kind!r}"


def projections_of(adapter: AdapterSettings, structure: Structure) -> list[str]:
    """The layers of each expert that get an adapter by the settings, such as "up_proj", in their order there.

    Raises `ConfigError` if the experts lack one.
    """
    layers, targets = structure.expert_layers, set(adapter.of_experts)
    if _FUSED in layers and targets & _PARTS:
        targets = targets - _PARTS | {_FUSED}
    if unknown := sorted(targets - set(layers)):
        names = [f"experts.{name}" for name in layers]
        raise ConfigError(
            f"adapter.targets has experts.{unknown[0]}, and the experts of the model have {', '.join(names)}"
            f"{nearest(f'experts.{unknown[0]}', names)}"
        )
    return [name for name in layers if name in targets]


def adapt_experts(peft: PeftModel, projections: Sequence[str], structure: Structure) -> None:
    """Give the experts of all blocks an adapter of the policy's rank on `projections`, if there are some.

    The targets of its configuration, with which it is stored, get their names.
    """
    config = peft.peft_config[POLICY_ADAPTER]
    assert isinstance(config, LoraConfig)
    if not projections:
        return
    for name, module in list(peft.named_modules()):
        if isinstance(module, Experts):
            peft.set_submodule(name, AdaptedExperts(module, projections, config.r, config.lora_alpha))
    others = set() if config.target_modules == DUMMY_TARGET_MODULES else {*(config.target_modules or ())}
    if _FUSED in structure.expert_layers:
        config.target_parameters = [f"experts.{name}" for name in projections]
    else:
        others |= {*projections}
    config.target_modules = sorted(others)


def take_experts(config: LoraConfig, structure: Structure, folder: Path) -> list[str]:
    """Take the experts' layers out of the targets of a stored adapter, and return them.

    Stock PEFT has no linear layers in experts, so a name that a shared expert's layer has too means that layer.

    Raises `CheckpointError` for an adapter of stacks where the adapters of each expert are read, and for more than
    plain LoRA. It also does for experts that are adapted without their layers' names among the targets.
    """
    path, layers = folder / ADAPTER_CONFIG, structure.expert_layers
    names, stacks = config.target_modules or (), config.target_parameters
    if not layers:
        return []
    if shared := {name.rpartition(".")[2]: name for name in structure.targets if "." in name}:
        if stacks or isinstance(names, str):
            key = "target_parameters" if stacks else f"target_modules={names!r}"
            raise CheckpointError(
                f"{path} has {key}, and experts beside a shared one have no adapters here; take an adapter whose "
                "target_modules list linear layers"
            )
        config.target_modules = sorted({shared.get(name, name) for name in names})
        return []
    if stacks and _FUSED not in layers:
        raise CheckpointError(
            f"{path} has target_parameters, and experts of this model have adapters of their own layers here; take an "
            "adapter that names these in target_modules"
        )
    adapted = {name.rpartition(".")[2] for name in stacks} if stacks else set(names) & set(layers)
    if adapted:
        check_plain(folder, config.to_dict(), "experts have plain LoRA of one rank here; take such an adapter")
        config.target_parameters = None
        config.target_modules = sorted(set(names) - adapted) or DUMMY_TARGET_MODULES
    else:  # by a regular expression PEFT would adapt each expert's layers, whose adapters grouped products don't read
        with safe_open(folder / ADAPTER, "pt") as file:
            _check_experts(file.keys(), folder)
    return [name for name in layers if name in adapted]


def _check_experts(keys: Iterable[str], folder: Path) -> None:
    """Raise `CheckpointError` if one of the keys that are left is of an expert."""
    if extra := sorted(key for key in keys if ".experts." in key):
        raise CheckpointError(
            f"{folder / ADAPTER} holds {extra[0]}, which target_modules in {ADAPTER_CONFIG} doesn't name; list the "
            "last parts of the layers' names there, such as up_proj"
        )


@torch.no_grad()
def fill_experts(model: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copy the adapters of experts out of the tensors of an adapter's folder, and return the other tensors.

    Raises `CheckpointError` if one is missing, is left or has another shape.
    """
    others = dict(stored)
    for name, experts in adapted_experts(model).items():
        for key, view in _stored(name, experts):
            shape, matrix = [len(view), view[0].numel()], others.pop(key, None)
            if matrix is None or list(matrix.shape) != shape:
                stored_as = "lacks it" if matrix is None else f"has {list(matrix.shape)}"
                raise CheckpointError(
                    f"the adapter needs {key} {shape}, and {folder / ADAPTER} {stored_as}; take the adapter of this "
                    "model, with one for every expert"
                )
            view.copy_(matrix.view(view.shape))
    _check_experts(others, folder)
    return others


def _stored(name: str, experts: AdaptedExperts) -> Iterator[tuple[str, Tensor]]:
    """The key of each matrix in a file, and a view of its values, with further dimensions flattened there."""
    for place, projection in enumerate(reversed(experts.projections)):
        for side in "AB":
            matrices = experts.adapter(side, projection)
            if experts.in_stacks:  # PEFT wraps the stack of down around the stack of gate and up
                key = f"{name}{'.base_layer' * place}.lora_{side}.weight"
                yield key, matrices.flatten(0, 1) if side == "A" else matrices.permute(1, 2, 0)
                continue
            yield from ((f"{name}.{n}.{projection}.lora_{side}.weight", matrix) for n, matrix in enumerate(matrices))


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
NORMS = "With `dtype=torch.bfloat16`, transformers keeps norms in 16 bits, which rounds those that were trained."


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
    return "\n".join(filter(None, (note, NORMS if norms else "")))


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
