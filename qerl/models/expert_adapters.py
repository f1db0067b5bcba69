"""LoRA on the experts of a mixture: the adapters themselves, and the layouts in which stock PEFT loads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from qerl.checkpoints.files import ADAPTER, ADAPTER_CONFIG, CheckpointError
from qerl.checkpoints.tensors import write_tensors
from qerl.models.adapter_files import check_plain
from qerl.models.experts import ExpertLora, Experts, Layer
from qerl.models.linear import POLICY_ADAPTER, Lora, device_of
from qerl.models.structure import Structure
from qerl.settings.base import ConfigError, nearest
from qerl.settings.run import AdapterSettings

# LoRA on the experts of a mixture: each expert has an adapter of its own for each projection.
#
# The adapters of a projection are one tensor A [experts, r, in] and one B [experts, out, r]: with two matrices for each
# layer, Qwen3-30B-A3B would have 36,864 matrices more for optimizer, norm and copies.
#
# Files have plain LoRA on each expert's layers, which stock PEFT 0.21 reads for Qwen3-MoE; in PEFT's stacks gate and up
# would share one A, so a conversion back could not keep each rank. gpt-oss has PEFT's layout of stacks. vLLM's sources
# read both; it was not run.


class AdaptedExperts(nn.Module, BaseTunerLayer):
    """Frozen `Experts` with the policy's adapter on `projections`, such as "up_proj"; B is 0.

    PEFT enables, disables and freezes it with the adapters of other layers.
    """

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: Experts, projections: Sequence[str], rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        self.projections = tuple(projections)
        self.scale = alpha / rank
        downs, ups = nn.ParameterDict(), nn.ParameterDict()
        for name in projections:  # A as PEFT draws it for a linear layer, both float32
            layer: Layer = base[0].get_submodule(name)  # type: ignore[assignment]
            down = torch.empty(len(base) * rank, layer.in_features, device=device_of(layer))
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            downs[name] = nn.Parameter(down.view(len(base), rank, -1))
            ups[name] = nn.Parameter(torch.zeros(len(base), layer.out_features, rank, device=down.device))
        self.lora_A = nn.ModuleDict({POLICY_ADAPTER: downs})
        self.lora_B = nn.ModuleDict({POLICY_ADAPTER: ups})

    @property
    def lora(self) -> ExpertLora:
        """The adapter, even while it is disabled."""
        both = ("gate_up_proj",) if self.in_stacks else ("gate_proj", "up_proj")
        return ExpertLora(self._loras(*both), self._loras("down_proj"))

    @property
    def in_stacks(self) -> bool:
        """Whether each expert has one layer for gate and up, as in gpt-oss, whose files have stacks of experts."""
        return hasattr(self.base_layer[0], "gate_up_proj")

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `Experts.forward`."""
        enabled = not self.disable_adapters and POLICY_ADAPTER in self.active_adapters
        out: Tensor = self.base_layer(hidden, chosen, weights, self.lora if enabled else None)
        return out

    def adapter(self, side: str, projection: str) -> nn.Parameter:
        """A ("A") [experts, r, in] or B ("B") [experts, out, r] of a projection."""
        return self.get_parameter(f"lora_{side}.{POLICY_ADAPTER}.{projection}")

    def _loras(self, *projections: str) -> list[Lora]:
        """The adapters of projections that read the same input: all of them have one, or none."""
        named = [name for name in projections if name in self.projections]
        return [Lora(self.adapter("A", name), self.adapter("B", name), self.scale) for name in named]


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
    others = () if config.target_modules == DUMMY_TARGET_MODULES else config.target_modules or ()
    if _in_stacks(structure):
        config.target_parameters = [f"experts.{name}" for name in projections]
        config.target_modules = sorted(others)
    else:
        config.target_modules = sorted({*others, *projections})


def adapted_experts(model: nn.Module) -> dict[str, AdaptedExperts]:
    """The experts with adapters, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedExperts)}


# Adapters of experts in the layouts that stock PEFT loads, and in its configuration.
#
# The hub's checkpoints of Qwen3-MoE have layers for each expert, and so have its adapters: plain LoRA, which PEFT
# stacks where transformers stacks the experts. gpt-oss has stacks in its files, too, and its adapters are PEFT's of
# such stacks (`target_parameters`).

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
    layers, targets = _layers(structure), set(adapter.of_experts)
    if _in_stacks(structure) and targets & _PARTS:
        targets = targets - _PARTS | {_FUSED}
    if unknown := sorted(targets - set(layers)):
        names = [f"experts.{name}" for name in layers]
        raise ConfigError(
            f"adapter.targets has experts.{unknown[0]}, and the experts of the model have {', '.join(names)}"
            f"{nearest(f'experts.{unknown[0]}', names)}"
        )
    return [name for name in layers if name in targets]


def take_experts(config: LoraConfig, structure: Structure, folder: Path) -> list[str]:
    """Take the experts' layers out of the targets of a stored adapter, and return them.

    Stock PEFT has no linear layers in experts, so a name that a shared expert's layer has too means that layer.

    Raises `CheckpointError` for an adapter of stacks where the adapters of each expert are read, and for more than
    plain LoRA. It also does for experts that are adapted without their layers' names among the targets.
    """
    layers = _layers(structure)
    if not layers:
        return []
    if shared := {name.rpartition(".")[2]: name for name in structure.targets if "." in name}:
        return _take_none(config, shared, folder)
    named, stacks = set(config.target_modules or ()), config.target_parameters or ()
    if stacks and not _in_stacks(structure):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} has target_parameters, and experts of this model have adapters of their own "
            "layers here; take an adapter that names these in target_modules"
        )
    adapted = {name.rpartition(".")[2] for name in stacks} if stacks else named & set(layers)
    if adapted:
        check_plain(folder, config.to_dict(), "experts have plain LoRA of one rank here; take such an adapter")
        config.target_parameters = None
        config.target_modules = sorted(named - adapted) or DUMMY_TARGET_MODULES
    else:
        with safe_open(folder / ADAPTER, "pt") as file:
            _check_taken(file.keys(), folder)
    return [name for name in layers if name in adapted]


def _take_none(config: LoraConfig, shared: Mapping[str, str], folder: Path) -> list[str]:
    """Name the layers of a shared expert as they are here, by their last parts, in an adapter without experts'."""
    names = config.target_modules or ()
    if config.target_parameters or isinstance(names, str):
        key = "target_parameters" if config.target_parameters else f"target_modules={names!r}"
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} has {key}, and experts beside a shared one have no adapters here; take an "
            "adapter whose target_modules list linear layers"
        )
    config.target_modules = sorted({shared.get(name, name) for name in names})
    return []


def _check_taken(keys: Iterable[str], folder: Path) -> None:
    """Raise `CheckpointError` if one of the keys that are left is of an expert."""
    if extra := sorted(key for key in keys if ".experts." in key):
        raise CheckpointError(
            f"{folder / ADAPTER} holds {extra[0]}, which target_modules in {ADAPTER_CONFIG} doesn't name; list the "
            "last parts of the layers' names there, such as up_proj"
        )


def store_experts(model: nn.Module, folder: Path) -> None:
    """Replace the adapters of experts, which PEFT wrote to `folder` by their names here; nothing without any."""
    adapters = adapted_experts(model)
    if not adapters:
        return
    ours = tuple(f"{name}.lora_" for name in adapters)
    tensors = {key: tensor for key, tensor in load_file(folder / ADAPTER).items() if not key.startswith(ours)}
    for name, experts in adapters.items():
        for key, view in _stored(name, experts):
            tensors[key] = view.detach().flatten(1).contiguous()
    write_tensors(tensors, folder / ADAPTER)


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
    _check_taken(others, folder)
    return others


def _stored(name: str, experts: AdaptedExperts) -> Iterator[tuple[str, Tensor]]:
    """The key of each matrix in a file, and a view of its values; those of more dimensions than two are flattened."""
    for place, projection in enumerate(reversed(experts.projections)):
        for side in "AB":
            matrices = experts.adapter(side, projection)
            if experts.in_stacks:  # PEFT wraps the stack of down around that of gate and up
                key = f"{name}{'.base_layer' * place}.lora_{side}.weight"
                yield key, matrices.flatten(0, 1) if side == "A" else matrices.permute(1, 2, 0)
                continue
            yield from ((f"{name}.{n}.{projection}.lora_{side}.weight", matrix) for n, matrix in enumerate(matrices))


def _layers(structure: Structure) -> list[str]:
    """Last parts of the names of each expert's layers, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in structure.experts))


def _in_stacks(structure: Structure) -> bool:
    return _FUSED in _layers(structure)
