"""PEFT's LoRA with a lean forward pass, on dense layers and on `PackedLinear`: parameters and files are PEFT's own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from qerl.quant.linear import PackedLinear


class LeanLoraLinear(LoraLinear):
    """LoRA whose forward pass keeps its input as it is for the backward pass, and writes no output of its own.

    PEFT's casts the input to the adapter's float32, which autocast casts back: each layer keeps a copy, where q, k and
    v could share theirs. And it makes B's output, scales it and adds it, three tensors as large as the layer's output;
    here A's output, `rank` wide, is scaled, and B's product is added in place, rounded once. Inputs that autocast
    doesn't bring to one dtype with the adapter take PEFT's way.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of the base's output."""
        mixed = x.dtype != torch.float32 and not torch.is_autocast_enabled(x.device.type)
        if mixed or self.disable_adapters or self.merged or self.lora_variant or args or kwargs:
            return super().forward(x, *args, **kwargs)
        rows = x.flatten(0, -2)
        result: Tensor = self.base_layer(rows)
        for name in self.active_adapters:
            if name in self.lora_A:
                shrunk: Tensor = self.lora_A[name](self.lora_dropout[name](rows)) * self.scaling[name]
                result.addmm_(shrunk, self.lora_B[name].get_parameter("weight").to(result.dtype).T)
        return result.unflatten(0, x.shape[:-1])


class PackedLoraLinear(LeanLoraLinear):
    """LoRA around a `PackedLinear`; A and B are trained in float32, the result has the dtype of the base's output."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA only: the variants (DoRA, ...) read the dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Packed weights take no update: always an error."""
        raise ValueError(
            f"can't merge an adapter into {self.get_base_layer().weights_format} weights without loss; keep it as an "
            "adapter, or merge it into the dense model"
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, PackedLinear)
        return module.in_features, module.out_features


def register_lora(config: LoraConfig) -> LoraConfig:
    """Let `config` target `PackedLinear` layers beside dense ones; returns it.

    Raises ValueError for an initialisation that reads the dense weight.
    """
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} reads the dense weight, which packed layers don't keep; "
            "use True or 'gaussian'"
        )
    config._register_custom_module({PackedLinear: PackedLoraLinear, nn.Linear: LeanLoraLinear})
    return config
