"""All code that uses vLLM's internals. It runs only in vLLM's worker.

vLLM loads `WorkerExtension` by its name (`worker_extension_cls`) in the worker's process. Importing this module there
registers `Float32RMSNorm` instead of vLLM's RMSNorm (`CustomOp.register_oot`), and likewise Gemma's norm, before the
model is built. They change only engines with `ADDITIONAL_CONFIG`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.v1.sample.sampler import Sampler

from qerl.settings.base import ConfigError

#: Releases of vLLM with which these hooks were tested.
TESTED = ("0.24", "0.31", "0.32", "0.33")
_FLOAT32_NORMS = "qerl_float32_norms"
ADDITIONAL_CONFIG = {_FLOAT32_NORMS: True}
#: The one adapter of the engine.
ADAPTER_ID = 1

if ".".join(vllm.__version__.split(".")[:2]) not in TESTED:
    raise ConfigError(
        f"engine=vllm needs vLLM {' or '.join(TESTED)}, but vLLM {vllm.__version__} is installed; install a "
        "tested release, or use rollout.engine=native"
    )


# Noise of 5e-4 on a weight near 1 is under half of bfloat16's spacing there. vLLM's fused kernel needs weight and
# input of one dtype; for mixed dtypes its operator falls back to its definition in PyTorch, which the compiler fuses.
@RMSNorm.register_oot(name="RMSNorm")
class Float32RMSNorm(RMSNorm):
    """RMSNorm with a float32 weight for any dtype of the model. vLLM normalises and multiplies in float32 and rounds
    once, as `NoisyRMSNorm` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _has_float32_norms():
            kwargs["dtype"] = torch.float32
        super().__init__(*args, **kwargs)


@GemmaRMSNorm.register_oot(name="GemmaRMSNorm")
class Float32GemmaRMSNorm(GemmaRMSNorm):
    """The norm of Gemma with a float32 weight. vLLM computes it in float32 for any dtype of the weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _has_float32_norms():
            self.weight.data = self.weight.data.float()


def _has_float32_norms() -> bool:
    return bool(get_current_vllm_config().additional_config.get(_FLOAT32_NORMS))


# vLLM's log-probabilities are at temperature 1, or renormalised over what top-k and top-p kept. Ours are at the
# sampling temperature and untruncated, as the trainer's. vLLM's second model runner has a sampler of its own and is
# disabled.
class UntruncatedSampler(Sampler):
    """vLLM's sampler with log-probabilities at the sampling temperature, before truncation by top-k and top-p."""

    def sample(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Sample as vLLM, whose own "processed" log-probabilities are renormalised over the kept tokens."""
        truncated = sampling_metadata.top_k is not None or sampling_metadata.top_p is not None
        if not truncated or sampling_metadata.all_greedy or sampling_metadata.max_num_logprobs is None:
            return super().sample(logits, sampling_metadata, *args, **kwargs)
        scaled = self.apply_temperature(logits.clone(), sampling_metadata.temperature, sampling_metadata.all_random)
        sampled, _ = super().sample(logits, sampling_metadata, *args, **kwargs)
        return sampled, self.compute_logprobs(scaled)


def checksum(tensors: dict[str, Tensor]) -> dict[str, int]:
    """A 64-bit sum of each tensor's elements as integers, weighted by position; equal tensors have equal sums."""
    alike: dict[tuple, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        alike[tensor.shape, tensor.dtype].append(name)
    # Tensors of one shape are stacked, since a model has hundreds, and each kernel launch takes time.
    sums = torch.cat([_bit_sums(torch.stack([tensors[name] for name in names])) for names in alike.values()])
    order = (name for names in alike.values() for name in names)
    return dict(zip(order, sums.tolist(), strict=True))


def _bit_sums(stacked: Tensor) -> Tensor:
    """Checksums [N] int64, modulo 2^64, of a tensor [N, ...] with a dtype of 2 or 4 bytes."""
    width = torch.int32 if stacked.element_size() == 4 else torch.int16
    bits = stacked.detach().flatten(1).view(width).long()
    return (bits * (2 * torch.arange(bits.shape[1], device=bits.device) + 1)).sum(1)


class WorkerExtension:
    """Methods that vLLM adds to its worker, called through `LLM.collective_rpc`."""

    model_runner: Any
    device: torch.device

    def qerl_prepare(self) -> str:
        """Install the sampler; returns the name of the kernel that computes the blocks' products."""
        stock = self.model_runner.sampler
        self.model_runner.sampler = UntruncatedSampler(stock.logprobs_mode, stock.use_fp64_gumbel)
        blocks: Any = self._qerl_model().model
        return _kernel(blocks.layers[0].self_attn.qkv_proj)

    def qerl_lora_dtype(self) -> torch.dtype:
        """The dtype of adapters in the engine."""
        return self.model_runner.lora_manager.lora_config.lora_dtype

    def qerl_push(self, lora: dict[str, Tensor], rank: int, targets: list[str], norms: dict[str, Tensor]) -> dict:
        """Replace the adapter by `lora` (PEFT's names, B already scaled) and the norms' weights by `norms`, by name.

        Returns the checksums of the engine's tensors afterwards, under the same names. With several ranks, each has a
        part of the adapter: the checksum is then taken over the whole tensor in `lora`, or -1 if this rank's part
        differs from it.
        """
        with torch.no_grad():
            for name, tensor in norms.items():
                self._qerl_model().get_parameter(name).copy_(tensor)
            if lora:
                self._qerl_replace_adapter(lora, rank, targets)
            parts = self._qerl_parts(lora) if lora else {}
            parameters = {name: self._qerl_model().get_parameter(name) for name in norms}
            sums = checksum(parameters | {name: place for name, (_, place) in parts.items()})
            if all(part is lora[name] for name, (part, _) in parts.items()):
                return sums
            full, here = checksum(norms | lora), checksum(norms | {name: part for name, (part, _) in parts.items()})
            return {name: full[name] if sums[name] == here[name] else -1 for name in sums}

    def _qerl_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def _qerl_replace_adapter(self, lora: dict[str, Tensor], rank: int, targets: list[str]) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        # Scaling 1, since B is already scaled: vLLM would multiply B in place, even if it is the caller's tensor.
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=targets)
        dtype = self.qerl_lora_dtype()
        model = LoRAModel.from_lora_tensors(ADAPTER_ID, lora, helper, device=str(self.device), dtype=dtype)
        manager.remove_all_adapters()
        manager.add_adapter(model)
        manager.activate_adapter(ADAPTER_ID)

    def _qerl_parts(self, lora: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """By the names of `lora`: this rank's part of each tensor, and the view that the engine's kernels read."""
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        layers = {}
        for layer, module in manager.modules.items():
            names = manager.packed_modules.get(layer, [layer])
            for matrix in ("lora_A", "lora_B"):
                keys = [f"base_model.model.{name}.{matrix}.weight" for name in names]
                stacked = module.lora_a_stacked if matrix == "lora_A" else module.lora_b_stacked
                parts = _cut(module, matrix, [lora.get(key) for key in keys])
                for key, part, place in zip(keys, parts, stacked, strict=True):
                    if part is not None:
                        layers[key] = (part, place[slot, 0, : part.shape[0], : part.shape[1]])
        return layers


def _cut(module: Any, matrix: str, tensors: list[Tensor | None]) -> list[Tensor | None]:
    """This rank's part of a layer's matrices (several in a packed layer), cut by vLLM's rule for the layer."""
    if module.tp_size == 1 or not any(tensor is not None for tensor in tensors):
        return tensors
    cut = module.slice_lora_a if matrix == "lora_A" else module.slice_lora_b
    return cut(tensors) if module.n_slices > 1 else [cut(tensors[0])]


def _kernel(layer: nn.Module) -> str:
    """Names of the quantization method, scheme and kernel of a linear layer, as far as the engine has them."""
    base = getattr(layer, "base_layer", layer)
    scheme = getattr(base, "scheme", None)
    parts: Iterable[Any] = (base.quant_method, scheme, getattr(scheme, "kernel", None))
    return "/".join(type(part).__name__ for part in parts if part is not None)
