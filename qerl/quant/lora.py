"""PEFT's LoRA on `PackedLinear`: the adapters are PEFT's own, their base is packed."""

from __future__ import annotations

from typing import Any, NoReturn

from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from qerl.quant.linear import PackedLinear


class PackedLoraLinear(LoraLinear):
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
    """Let `config` target `PackedLinear` layers; returns it.

    Raises ValueError for an initialisation that reads the dense weight.
    """
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} reads the dense weight, which packed layers don't keep; "
            "use True or 'gaussian'"
        )
    config._register_custom_module({PackedLinear: PackedLoraLinear})
    return config
