"""What this machine can do: its GPUs, what serves a model on them, memory, libraries and disk space.

The functions that choose at run time answer here too; nothing is loaded or downloaded except a config.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import PreTrainedConfig

from qerl.checkpoints.files import CheckpointError, differences, read_headers, weights_format_of
from qerl.checkpoints.shapes import SIZES, ModelShape, has_packed_experts_alone
from qerl.data.hub import hub_unreachable
from qerl.host.gpus import too_old, unsupported_accelerator
from qerl.host.imports import extras, requirements
from qerl.host.lease import LEAST_CAPABILITY, Gpu, devices
from qerl.host.provenance import cache_folder, installed_version
from qerl.kernels import operations_name
from qerl.memory_model import CONTEXT, PredictedMemory, StepSettings, runs_that_fit, step_memory, that_fit
from qerl.models.adapter_files import refused_expert_adapters
from qerl.models.linear import BitsandbytesLinear, PortableLinear, TorchLinear, W4Linear, product_class
from qerl.models.loading import checkpoint_structure, config_of, has_packed_delta_nets
from qerl.models.policy import DTYPES, refused_train_norms
from qerl.models.random import random_config
from qerl.models.structure import structure_of
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import native_class
from qerl.rollout.sampler import refused_by_engine, refused_by_vllm, refused_fp8_cache
from qerl.settings.run import RunSettings
from qerl.workflow.bases import HUB_MODEL, MAIN_BRANCH, fetch_config

#: The memory of common GPUs in gigabytes (10^9 bytes).
COMMON_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)
_SAMPLERS = {EngineSampler: "engine with CUDA graphs", EagerSampler: "eager sampler, for small models"}
#: The products of the eager sampler on a GPU.
_EAGER = "weights unpacked once a rollout"
#: The shape that stands for a model if none is named.
_TYPICAL = "7B"


@dataclass(frozen=True)
class Serving:
    """What serves each part of a run on a GPU, or on the CPU."""

    device: str
    capability: str
    memory_gb: float | None
    free_gb: float | None
    products: str
    attention: str
    sampler: str
    dtype: str
    unsupported: str | None


@dataclass(frozen=True)
class Library:
    """A required library whose installed version is missing or outside of its range."""

    library: str
    wanted: str
    installed: str | None
    extra: str
    """The extra that requires it; none for the package itself."""

    def __str__(self) -> str:
        name = "the package" if not self.extra else f"the extra `{self.extra}`"
        have = "isn't installed" if self.installed is None else f"is {self.installed}"
        package = f"qerl[{self.extra}]" if self.extra else "qerl"
        return f"{self.library} {have}, and {name} needs {self.wanted or 'it'}; install {package} again"


@dataclass(frozen=True)
class Place:
    """A folder that a run fills, with the free bytes of its disk."""

    what: str
    path: str
    free_gb: float


@dataclass(frozen=True)
class Candidate:
    """The model that a user asks about; `repo` is its name on the hub, if it must be downloaded.

    `differences` tells how a published checkpoint is used otherwise than it states.
    """

    shape: ModelShape
    weights: str
    repo: str | None
    config: PreTrainedConfig
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """All that `qerl doctor` prints. With a problem, the machine can't do what is asked."""

    devices: Sequence[Serving]
    memory: PredictedMemory | None
    libraries: Sequence[Library]
    places: Sequence[Place]
    problems: Sequence[str]
    notes: Sequence[str]


def candidate(model: str, weights: str | None, packed_nets: bool = False) -> Candidate:
    """The shape and weights of a size such as 7B or mistral-7b, of a folder or of a model of the hub.

    `weights` None takes those of a packed checkpoint, otherwise those of a run's default. Delta nets count as packed
    where `packed_nets` asks for that, or where the folder has them packed. Raises `CheckpointError` for
    a model whose structure isn't handled.
    """
    default = weights or RunSettings.model_fields["weights"].default
    if model in SIZES:
        used = weights or ("mxfp4" if has_packed_experts_alone(model) else default)
        found = _of_size(model, used)
        _check_nets(model, found.shape, used, packed_nets)
        return replace(found, shape=found.shape.with_packed_nets(packed_nets))
    local = Path(model).is_dir()
    folder = Path(model) if local else _config_of_hub(model)
    stored = weights_format_of(folder)
    checkpoint_structure(folder)  # before its shape, whose keys other structures lack
    shape = ModelShape.of((config := config_of(folder)).to_dict())
    headers = read_headers(folder) if any(folder.glob("*.safetensors")) else {}
    used = weights or (default if stored == "bf16" else stored)
    _check_nets(model, shape, used, packed_nets)
    return Candidate(
        shape.with_packed_nets(packed_nets or has_packed_delta_nets(folder)),
        used,
        None if local else model,
        config,
        tuple(differences(folder, headers)),
    )


def _check_nets(model: str, shape: ModelShape, weights: str, packed_nets: bool) -> None:
    if packed_nets and (shape.nets is None or weights == "bf16"):
        reason = f"{model} has none" if shape.nets is None else "weights of bf16 are not packed"
        raise CheckpointError(f"--pack-delta-nets packs delta nets, and {reason}; leave the option out")


def _of_size(size: str, weights: str) -> Candidate:
    config = random_config(size)
    return Candidate(ModelShape.of(config.to_dict()), weights, None, config)


def _config_of_hub(model: str) -> Path:
    """The folder of the hub's cache with the config.json of org/name or org/name@revision."""
    named = HUB_MODEL.fullmatch(model)
    if named is None:
        raise CheckpointError(
            f"--model {model} is neither a size ({', '.join(SIZES)}), nor a folder, nor org/name of the hub"
        )
    return fetch_config(named["repo"], named["revision"] or MAIN_BRANCH, None, hub_unreachable())


def serving(gpu: Gpu | None, model: Candidate) -> Serving:
    """What serves a model on a GPU, or with None on the CPU."""
    shape, weights = model.shape, model.weights
    capability = None if gpu is None else gpu.capability
    dtype = RunSettings.model_fields["dtype"].default
    sampler = native_class(gpu is not None, model.config, weights)
    operations = operations_name(gpu is not None)
    by_engine = gpu is None or issubclass(sampler, EngineSampler)
    return Serving(
        device="CPU" if gpu is None else gpu.name,
        capability="" if capability is None else ".".join(map(str, capability)),
        memory_gb=None if gpu is None else gpu.total / 1e9,
        free_gb=None if gpu is None else gpu.free / 1e9,
        products=_products(capability, shape, weights, DTYPES[dtype]) if by_engine else f"{weights}: {_EAGER}",
        attention=f"{operations}, in {'rollouts and updates' if by_engine else 'updates; PyTorch in rollouts'}",
        sampler=_SAMPLERS[sampler],
        dtype=dtype,
        unsupported=None if gpu is None else unsupported_accelerator() or too_old(gpu.name, gpu.capability),
    )


def _products(capability: tuple[int, int] | None, shape: ModelShape, weights: str, dtype: torch.dtype) -> str:
    """The products of a block's fused layers: q, k and v; o; gate and up; down. A mixture's experts have their own."""
    linears = shape.linears
    parts = [part for part in (linears[:3], linears[3:4], linears[4:6], linears[6:]) if part]
    packed_nets = shape.nets is not None and shape.nets.packed
    parts += [shape.net_linears[:2], shape.net_linears[2:3]] if packed_nets else []
    attention = shape.attention_format(weights)
    kinds = {product_class(capability, attention, part, dtype) for part in parts}
    plain = "dense" if attention == "bf16" else "weights unpacked in each product"
    texts = {
        W4Linear: "packed",
        PortableLinear: "packed, portable kernels",
        BitsandbytesLinear: "bitsandbytes' for few rows",
        TorchLinear: plain,
    }
    names = [f"{texts[kind]} ({kind.__name__})" for kind in sorted(kinds, key=texts.__getitem__)]
    if shape.mixture and capability is not None:
        names.append(f"grouped products of {'dense' if weights == 'bf16' else 'packed'} experts")
    if shape.nets and weights != "bf16":
        narrow = "narrow " if packed_nets else ""
        names.append(f"{narrow}dense layers of delta nets ({TorchLinear.__name__})")
    return f"{weights}: " + " and ".join(names)


def unfit_libraries(extra: str = "") -> list[Library]:
    """The libraries that the package or one of its extras requires, if they are missing, too old or too new."""
    unfit = []
    for wanted in requirements(extra):
        version = installed_version(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            unfit.append(Library(wanted.name, str(wanted.specifier), version, extra))
    return unfit


def places() -> list[Place]:
    """The folders that runs fill: results, the hub's cache, and the caches of kernels."""
    folders = {
        "results, runs": Path.cwd(),
        "hub's cache": Path(constants.HF_HUB_CACHE),
        "kernels' cache": cache_folder("kernels"),
    }
    found = []
    for what, path in folders.items():
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        found.append(Place(what, str(path), shutil.disk_usage(existing).free / 1e9))
    return found


def diagnose(model: Candidate | None, settings: StepSettings | None, memory_gb: float | None = None) -> Diagnosis:
    """The state of this machine, and with a model whether it can train it by `settings`.

    With `memory_gb` (10^9 bytes) it is about a GPU of this memory with the capability of the largest GPU here, or the
    least that is supported.
    """
    gpus = [*devices().values()]
    served = model or _of_size(_TYPICAL, RunSettings.model_fields["weights"].default)
    if memory_gb:
        largest = max(gpus, key=lambda gpu: gpu.total, default=None)
        capability = max(largest.capability, LEAST_CAPABILITY) if largest else LEAST_CAPABILITY
        other = Gpu("", f"a GPU of {memory_gb:g} GB", capability, 0, 0)
        # The accelerator of this machine says nothing of another.
        servings = [replace(serving(other, served), memory_gb=memory_gb, free_gb=None, unsupported=None)]
    else:
        servings = [serving(gpu, served) for gpu in gpus] or [serving(None, served)]
    needed = ["", *(["gpu"] if gpus else [])]
    unfit = [library for extra in needed for library in unfit_libraries(extra)]
    optional = [library for extra in extras() if extra not in (*needed, "dev") for library in unfit_libraries(extra)]
    problems = [*map(str, unfit)]
    notes = [one.unsupported for one in servings if one.unsupported]
    if gpus and len(notes) == len(servings):
        problems, notes = [*problems, *notes], []
    if memory_gb:
        here = ", ".join(f"{gpu.name} of {gpu.total / 1e9:.1f} GB" for gpu in gpus) or "no GPU"
        notes.append(f"the GPU above is the one that --memory-gb asks about; this machine has {here}")
    notes += model.differences if model else ()
    if not gpus and (reason := unsupported_accelerator()):
        notes.append(reason)
    if gpus and not torch.cuda.is_available():
        problems.append(
            f"the driver shows a GPU, and PyTorch {torch.__version__} can't use it; install a CUDA build of PyTorch "
            "that fits the driver, or a newer driver"
        )
    if refusal := refused_by_engine(served.config, served.weights):
        notes.append(f"{refusal}; the eager sampler draws completions on a GPU too, in more time and memory")
    if refusal := refused_by_vllm(served.config):
        notes.append(refusal)
    elif find_spec("vllm") is None:
        notes.append("vLLM isn't installed, which only engine=vllm needs (README, One GPU)")
    if model and (refusal := refused_train_norms(structure_of(served.config))):
        notes.append(f"{refusal}, and leave noise.schedule off")
    if settings and settings.kv_cache_dtype == "fp8":
        problems += [f"{gpu.name}: {refusal}" for gpu in gpus if (refusal := refused_fp8_cache(gpu.capability))]
    if model and settings and settings.experts and (refusal := refused_expert_adapters(model.config.model_type)):
        problems.append(f"{refusal}; leave --experts out")
    memory, structure = None, structure_of(served.config)
    if model and model.shape.block_weights != structure.block_weights:
        notes.append("the memory isn't predicted, because the model's blocks have other layers than known shapes")
    elif model and not structure.takes_packed_rows:
        notes.append("the memory isn't predicted, because updates of this model compute padded batches")
    elif model and settings:
        capacity = memory_gb * 1e9 if memory_gb else max((gpu.total for gpu in gpus), default=0)
        memory, sentences = _memory(model, settings, capacity)
        tight = bool(capacity) and memory is not None and memory.verdict == "tight"
        (notes if tight else problems).extend(sentences)
    return Diagnosis(servings, memory, [*unfit, *optional], places(), problems, notes)


def _memory(model: Candidate, settings: StepSettings, capacity: float) -> tuple[PredictedMemory | None, list[str]]:
    """The memory of a step, and sentences on what doesn't fit or is tight, with what makes it fit."""
    if not capacity:
        sizes = (step_memory(model.shape, settings, size * 1e9) for size in COMMON_GB)
        smallest = next((memory for memory in sizes if memory.verdict == "fits"), None)
        largest = f"more than the {COMMON_GB[-1]} GB of the largest common GPU"
        on = f"a GPU of {smallest.capacity / 1e9:.0f} GB" if smallest else largest
        return smallest, [f"this machine has no GPU; the step needs {on} (--memory-gb asks about another)"]
    memory = step_memory(model.shape, settings, capacity)
    if memory.verdict == "fits":
        return memory, []
    lower = "lower --prompts, --max-tokens or --rank, or take a smaller model"
    if (fitting := runs_that_fit(model.shape, settings, capacity)) and settings.runs > 1:
        lower = f"{fitting} of the {settings.runs} runs fit side by side"
    elif slower := that_fit(model.shape, settings, capacity):
        cache = "" if slower.kv_cache_gib is None else f" --kv-cache-gib {slower.kv_cache_gib:g}"
        sleep = " --sleep" if slower.sleep else ""
        lower = f"it fits, at a lower speed, with --micro-batch-tokens {slower.micro_batch_tokens}{cache}{sleep}"
    needs, has = (memory.least + CONTEXT) / 1e9, capacity / 1e9
    if memory.verdict == "tight":
        return memory, [
            f"tight: the step needs {needs:.1f} of {has:.1f} GB, and fragmentation may take the rest; {lower}"
        ]
    return memory, [f"the step needs {needs:.1f} GB, and the GPU has {has:.1f}; {lower}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The content of `qerl doctor --json`."""
    memory = diagnosis.memory
    if memory is None:
        return asdict(diagnosis)
    peaks = {name: getattr(memory, name) for name in ("rollout_peak", "update_peak", "peak", "least", "verdict")}
    return {**asdict(diagnosis), "memory": {**asdict(memory), **peaks}}
