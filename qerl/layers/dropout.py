"""LoRA dropout whose mask depends on the sequence, not on what is packed beside it or on the process that packs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

#: What a piece of a packed row is drawn from: numbers that no other piece of the run has.
Key = tuple[int, ...]


class KeyedDropout(nn.Module):
    """Dropout over packed rows. In training mode, `set_keys` must have stated the pieces of the row."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.keys: Sequence[Key] = ()
        self.lengths: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Map [1, L, features] to the same shape. Kept values are divided by their share."""
        if not self.training:
            return x
        if x.shape[:-1] != (1, sum(self.lengths)):
            raise RuntimeError(f"dropout has keys of {sum(self.lengths)} tokens for an input {list(x.shape)}")
        kept = torch.cat([self._kept(*piece, x) for piece in zip(self.keys, self.lengths, strict=True)])
        return (x * kept) / (1 - self.p)

    def _kept(self, key: Key, tokens: int, x: Tensor) -> Tensor:
        """Bools [tokens, features]: the same for the same key, whatever the rest of the row."""
        seed = np.random.SeedSequence([*key, self.layer]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(x.device).manual_seed(int(seed))
        return torch.rand(tokens, x.shape[-1], generator=generator, device=x.device) >= self.p


def key_dropout(model: nn.Module, adapter: str) -> None:
    """Replace PEFT's dropout of an adapter, which draws from torch's global generator, by `KeyedDropout`."""
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    for number, layer in enumerate(layers):
        plain = layer.lora_dropout[adapter]
        if isinstance(plain, nn.Dropout):
            layer.lora_dropout[adapter] = KeyedDropout(plain.p, number)


def set_keys(model: nn.Module, keys: Sequence[Key], lengths: Sequence[int]) -> None:
    """State the pieces of the next row. They hold until the next call, also in the backward pass."""
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.keys, module.lengths = keys, lengths
