"""Policies: a frozen base (dense or packed) with its trained tensors and its tokenizer, whole or sharded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.checkpoints.files import (
    ADAPTER_CONFIG,
    CONFIG,
    CheckpointError,
    check_adapter,
    read_headers,
    stock_loading,
    weights_format_of,
)
from qerl.checkpoints.layouts import names_in_files
from qerl.host.console import log
from qerl.host.gpus import too_old, unsupported_accelerator
from qerl.host.provenance import share
from qerl.models.adapter_files import (
    PREFIX,
    Base,
    adapt_experts,
    adapter_config,
    check_taken,
    fill_experts,
    misfit,
    projections_of,
    read_adapter,
    refused_expert_adapters,
    save_adapter,
    take_experts,
    write_card,
)
from qerl.models.blocks import fuse_attentions, make_noisy
from qerl.models.experts import Experts, Float32Router, fuse_mlps
from qerl.models.linear import POLICY_ADAPTER, PackedLinear
from qerl.models.loading import load_model, load_tokenizer, write_tensors
from qerl.models.lora import key_dropout, register_lora
from qerl.models.structure import MISFITS, Structure, structure_of
from qerl.settings.base import ConfigError, nearest
from qerl.settings.run import LAYERS, AdapterSettings

# Float32 copies of a policy's 16-bit weights, which the optimizer updates while passes compute with the weights.


class Masters:
    """The master of each 16-bit weight of `lm`, with the values that `exact` has under its name.

    Each gradient of such a weight is added to its master's gradient, in float32, and not kept.
    """

    def __init__(self, lm: nn.Module, exact: nn.Module) -> None:
        values = dict(exact.named_parameters())
        self._weights = {name: w for name, w in lm.named_parameters() if w.dtype != torch.float32}
        self._masters = {
            name: nn.Parameter(values[name].detach().to(weight.device, torch.float32, copy=True))
            for name, weight in self._weights.items()
        }

        def move_gradient(master: nn.Parameter, weight: torch.Tensor) -> None:
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        for name, weight in self._weights.items():
            weight.register_post_accumulate_grad_hook(partial(move_gradient, self._masters[name]))

    def of(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters, with a master in place of each weight that has one."""
        for name, parameter in parameters:
            yield name, self._masters.get(name, parameter)

    @torch.no_grad()
    def round(self) -> None:
        """Set each weight to its master's value, rounded."""
        for name, weight in self._weights.items():
            weight.copy_(self._masters[name])


# Sharding of a policy that is trained in full: each process has a part of every weight (torch's FSDP2).
#
# Gradients and the optimizer's state have the weights' shards. A forward or backward pass gathers the weights of one
# block at a time.

T = TypeVar("T")


class ShardedRoot(nn.Module):
    """The module whose call gathers the weights outside of blocks: embeddings, final norm and head."""

    def __init__(self, lm: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.lm = lm
        #: The dtype in which passes compute, and in which samplers get the weights.
        self.dtype = dtype

    def forward(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, which reads the weights of `lm`."""
        return compute()

    @staticmethod
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor, though each process may have a shard or an addend of it."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole: torch.Tensor = tensor.full_tensor()
        return whole


def shard(lm: PreTrainedModel, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> ShardedRoot:
    """Shard the weights of `lm` in place, as float32, over the processes of `mesh`, by default all.

    Passes compute in `dtype`, and gradients add up over the processes in float32. The default process group must
    exist. Each process holds the whole `lm` before, in its present dtype.
    """
    mesh = mesh or init_device_mesh(lm.device.type, (torch.distributed.get_world_size(),))
    root = ShardedRoot(lm, dtype)
    reduced = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**reduced, cast_forward_inputs=False)
    for block in [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # a sum, because losses are shares of the whole batch's
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root.float()


def gathered(lm: nn.Module, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole tensor of each weight, in its dtype of `dtypes`; all processes must iterate alike."""
    for name, parameter in lm.named_parameters():
        yield name, ShardedRoot.whole(parameter.detach().to(dtypes[name]))


# Policies: a frozen base (dense or packed) with its trained tensors and its tokenizer.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Fused layers with the projections that they have as parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: The name of the value function's adapter in PEFT, and of the folder in which it is saved.
VALUE_ADAPTER = "value"
#: The name of the value function's head among the trained tensors, and of its file.
VALUE_HEAD = "value_head"


@contextmanager
def same_requires_grad(model: nn.Module) -> Iterator[None]:
    """A context after which every parameter has the `requires_grad` that it had before.

    PEFT makes the adapter to which it switches trainable, and freezes all others.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@dataclass
class Policy:
    """A policy. `lm` is the Hugging Face causal LM with adapters injected; `peft` wraps it if there are adapters.

    It is in evaluation mode; only updates use training mode (LoRA dropout).
    """

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    peft: PeftModel | None = None
    #: Head of the value function, from hidden states with the adapter "value" (`qerl.rl.value`); only with PPO.
    value_head: nn.Linear | None = None
    #: Gathers the weights for a computation, if they are sharded over the processes of a run.
    root: ShardedRoot | None = None
    #: Float32 copies of 16-bit weights that are trained.
    masters: Masters | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.lm.device

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end a completion, from the generation config, or else the tokenizer's end of text."""
        declared = self.lm.generation_config.eos_token_id if self.lm.generation_config else None
        stops = declared if declared is not None else self.tokenizer.eos_token_id
        return list(stops) if isinstance(stops, (list, tuple)) else [stops]

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters that the optimizer updates. `use_trained` then makes passes compute with them."""
        trained = ((name, p) for name, p in (self.peft or self.lm).named_parameters() if p.requires_grad)
        yield from trained if self.masters is None else self.masters.of(trained)
        if self.value_head is not None:
            yield from self.value_head.named_parameters(VALUE_HEAD)

    def use_trained(self) -> None:
        """Set the weights of passes to the trained parameters, where these are copies in float32."""
        if self.masters is not None:
            self.masters.round()

    def reading(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, which reads the model; sharded weights are gathered for it and its backward pass.

        All processes of a sharded policy must call this equally often.
        """
        return compute() if self.root is None else self.root(compute)

    def autocast(self) -> AbstractContextManager:
        """A context with products in the base's 16-bit dtype, while trained tensors stay float32."""
        dtype = self.lm.dtype
        return torch.autocast(self.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """A context that disables the trained tensors, which makes the base the reference policy."""
        if self.peft is None:
            raise ValueError("full fine-tuning keeps no reference policy; use method=lora with loss.kl")
        with same_requires_grad(self.peft), self.peft.disable_adapter():
            yield

    def save(self, folder: Path, base: Base | None = None) -> None:
        """Write the trained tensors: an adapter in PEFT's layout, or the whole model in the hub's layout.

        An adapter refers to `base`, by default the checkpoint's folder, and has a card that says how to load it. A
        whole model's matrices are rounded to bfloat16; norms and biases stay float32, as an adapter's do. A value
        function is saved to the subfolder `value`: its adapter in the same layout, and its head.
        """
        if self.peft is not None:
            checkpoint = Path(str(self.lm.name_or_path)).resolve()
            base = base or Base(str(checkpoint))
            for name in self.peft.peft_config:
                save_adapter(self.peft, name, folder if name == POLICY_ADAPTER else folder / name, base, checkpoint)
            norms = bool(getattr(self.peft.peft_config[POLICY_ADAPTER], "modules_to_save", None))
            write_card(folder, base, weights_format_of(checkpoint), norms, stock_loading(checkpoint))
            if self.value_head is not None:
                head = {name: tensor.contiguous() for name, tensor in self.value_head.state_dict().items()}
                write_tensors(head, folder / VALUE_ADAPTER / f"{VALUE_HEAD}.safetensors")
        else:
            trained = dict(self.trainable())
            for name, parameter in self.lm.named_parameters():
                parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else trained.get(name, parameter).data
            read = Path(str(self.lm.name_or_path))  # whose files' names the weights get
            named = names_in_files(read_headers(read)) if (read / CONFIG).is_file() else str
            weights = {named(name): tensor for name, tensor in self.lm.state_dict().items()}
            self.lm.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            share(folder)


def choose_device() -> torch.device:
    """This process's GPU, or the CPU without one; with an index, because safetensors reads "cuda" as the first GPU.

    Raises `ConfigError` for a GPU that isn't supported.
    """
    reason = unsupported_accelerator()
    if not torch.cuda.is_available():
        if reason:
            log.warning("%s", reason)
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason is None:
        reason = too_old(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if reason:
        raise ConfigError(reason)
    return device


# There is no hook in transformers for the MLP's activation and the rotation of packed queries and keys. MLP and
# attention replace only classes whose code is known to be plain; on a CPU both compute what transformers computes, bit
# for bit.
def use_own_modules(lm: PreTrainedModel) -> None:
    """Replace norms, MLPs and attentions of a loaded model by this project's; names of weights stay."""
    make_noisy(lm, structure_of(lm.config))
    fuse_mlps(lm)
    fuse_attentions(lm)


def _base(checkpoint: Path, dtype: str, device: torch.device | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Norms are float32, since 16 bits would round noise away, and PEFT's copies for trained norms have the same dtype.
    lm = load_model(checkpoint, DTYPES[dtype], device or choose_device(), float32_norms=True)
    use_own_modules(lm)
    tokenizer = load_tokenizer(checkpoint)
    return lm.requires_grad_(False), tokenizer


def refused_train_norms(structure: Structure) -> str | None:
    """A sentence that says why a model has no norms to train, with the remedy; None if it has."""
    if structure.noisy_norms():
        return None
    return (
        "adapter.train_norms needs an RMSNorm whose output projections read, which the blocks of this model don't "
        "have; set adapter.train_norms=false"
    )


def lora_config(adapter: AdapterSettings, structure: Structure) -> tuple[LoraConfig, list[str]]:
    """PEFT's configuration of the adapter, and the layers of each expert that get one, which PEFT doesn't know.

    The norms that feed projections are in it if they are trained. Raises `ConfigError` if the model lacks a target or
    has no norms to train, for experts without adapters, and for dropout of padded batches.
    """
    if adapter.of_experts and (refusal := refused_expert_adapters(structure.kind)):
        raise ConfigError(f"adapter.targets has experts.{adapter.of_experts[0]}, and {refusal}; leave experts out")
    if adapter.train_norms and (refusal := refused_train_norms(structure)):
        raise ConfigError(refusal)
    if adapter.dropout and not structure.takes_packed_rows:
        raise ConfigError(
            "adapter.dropout needs attention that takes packed rows, which this model's doesn't; set adapter.dropout=0"
        )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=_lora_targets(adapter, structure) or DUMMY_TARGET_MODULES,
        modules_to_save=list(structure.norms.values()) if adapter.train_norms else None,
    )
    return register_lora(config), projections_of(adapter, structure)


def _lora_targets(adapter: AdapterSettings, structure: Structure) -> list[str]:
    """The linear layers outside of experts that get an adapter, by the ends of their names.

    The seven targets of the default together mean all linear layers of the blocks. Others mean the layers whose names
    end so, or the fused layer that has all of its parts among them. Raises `ConfigError` if the model lacks a target.
    """
    targets, found = adapter.beside_experts, list[str]()
    if set(targets) == set(LAYERS) != set(structure.targets):
        return list(structure.targets)
    for target in targets:
        fused = [name for name, parts in _FUSED.items() if target in parts and name in structure.targets]
        if any(_ends(name, target) for name in structure.linears):
            # The end of a name that experts' layers have too is longer, so that PEFT adapts these layers alone.
            found += [name for name in structure.targets if _ends(name, target)] or [target]
        elif fused:
            parts = _FUSED[fused[0]]
            if missing := [part for part in parts if part not in targets]:
                raise ConfigError(
                    f"adapter.targets has {target} without {missing[0]}, and the model has both in {fused[0]}; "
                    f"name all of {', '.join(parts)}, or none"
                )
            found += fused
        else:
            experts_have_it = any(_ends(name, target) for name in structure.experts)
            hint = (
                f"; experts.{target} means that of experts" if experts_have_it else nearest(target, structure.targets)
            )
            raise ConfigError(
                f"adapter.targets has {target}, and the blocks of the model have {', '.join(structure.targets)}; leave "
                f"adapter.targets out to adapt all of them{hint}"
            )
    return list(dict.fromkeys(found))


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def with_adapter(
    checkpoint: Path, adapter: AdapterSettings, dtype: str, seed: int, device: torch.device | None = None
) -> Policy:
    """A policy with a fresh LoRA adapter (B = 0) on a frozen base; adapter and norms are float32.

    The layers are those that the settings name, experts' too. Raises `ConfigError` as `lora_config` does.
    """
    [policy] = with_adapters(checkpoint, [(adapter, seed)], dtype, device)
    return policy


def with_adapters(
    checkpoint: Path,
    adapters: Sequence[tuple[AdapterSettings, int]],
    dtype: str,
    device: torch.device | None = None,
) -> Iterator[Policy]:
    """Policies of several runs on one frozen base, each as `with_adapter` makes it of adapter and seed.

    They share the base's layers, and each has its own adapter, norms and noise. Each is made when it is taken, so that
    what draws random numbers next goes on with its seed.
    """
    lm, tokenizer = _base(checkpoint, dtype, device)
    models = [lm, *(on_same_layers(lm) for _ in adapters[1:])]
    return (_adapted(one, tokenizer, *adapter) for one, adapter in zip(models, adapters, strict=True))


def on_same_layers(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy of a frozen model's structure, which shares the model's layers and weights."""
    shared = [m for m in lm.modules() if isinstance(m, (nn.Linear, PackedLinear, nn.Embedding, Experts, Float32Router))]
    return deepcopy(lm, {id(one): one for one in (*shared, *lm.parameters())})


def _adapted(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: AdapterSettings, seed: int) -> Policy:
    torch.manual_seed(seed)
    structure = structure_of(lm.config)
    config, projections = lora_config(adapter, structure)
    peft: PeftModel = get_peft_model(lm, config)
    adapt_experts(peft, projections, structure)
    key_dropout(peft, POLICY_ADAPTER)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return Policy(lm.eval(), tokenizer, peft)


def trained_in_full(checkpoint: Path, dtype: str, device: torch.device | None = None) -> Policy:
    """A policy with every weight trainable, in float32. Passes compute in `dtype`."""
    lm, tokenizer = _base(checkpoint, dtype, device)
    if dtype == "float32":
        return Policy(lm.requires_grad_(True), tokenizer)
    exact = lm if _is_stored_as_bfloat16(checkpoint) else _base(checkpoint, "float32", device)[0]
    return Policy(lm.requires_grad_(True), tokenizer, masters=Masters(lm, exact))


def _is_stored_as_bfloat16(checkpoint: Path) -> bool:
    return {info.dtype for info in read_headers(checkpoint).values()} == {"BF16"}


def trained_in_shards(checkpoint: Path, dtype: str, device: torch.device | None = None) -> Policy:
    """A policy with every weight trainable, in float32. This process keeps a shard of each weight.

    The checkpoint's weights are loaded whole before, in bfloat16 if they are stored so. Passes compute in `dtype`.
    """

    lm, tokenizer = _base(checkpoint, "bfloat16" if _is_stored_as_bfloat16(checkpoint) else "float32", device)
    root = shard(lm.requires_grad_(True), DTYPES[dtype])
    return Policy(lm, tokenizer, root=root)


def load_policy(checkpoint: Path, trained: Path | None, dtype: str, device: torch.device | None = None) -> Policy:
    """A policy for sampling: the base, or the base with a run's trained tensors (adapter or full weights)."""
    if trained is None or not (trained / ADAPTER_CONFIG).is_file():
        return Policy(*_base(trained or checkpoint, dtype, device))
    check_adapter(trained)
    lm, tokenizer = _base(checkpoint, dtype, device)
    return Policy(lm, tokenizer, _stored_adapter(lm, trained))


def _stored_adapter(lm: PreTrainedModel, trained: Path) -> PeftModel:
    """A model with the adapter of a folder, frozen."""
    config = register_lora(adapter_config(trained))
    structure = structure_of(lm.config)
    projections = take_experts(config, structure, trained)
    config.inference_mode, config.base_model_name_or_path = True, None
    try:
        peft: PeftModel = get_peft_model(lm, config)
        adapt_experts(peft, projections, structure)
        # PEFT's own loading would stack the experts' adapters, as transformers stacks experts.
        stored = {f"{PREFIX}{name}": tensor for name, tensor in read_adapter(trained).items()}
        others = fill_experts(peft, stored, trained)
        set_peft_model_state_dict(peft, others)
    except CheckpointError:
        raise
    except (*MISFITS, re.error) as error:  # PEFT takes regular expressions
        raise misfit(trained, error) from None
    check_taken(peft, others, trained)
    return peft.eval().requires_grad_(False)


def weight_bytes(*policies: Policy) -> int:
    """Bytes of all weights in memory, adapters and packed buffers included; what policies share counts once."""
    tensors: dict[int, torch.Tensor] = {}
    for policy in policies:
        head = policy.value_head.parameters() if policy.value_head is not None else ()
        tensors |= {id(t): t for t in (*policy.lm.parameters(), *policy.lm.buffers(), *head)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
