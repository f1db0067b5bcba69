"""LoRA dropout whose mask depends only on the sequence, not on the packing or the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

#: The random key of a piece of a packed row: numbers that no other piece of the run has.
Key = tuple[int, ...]


class KeyedDropout(nn.Module):
    """Dropout over packed rows. In training mode, call `set_keys` with the row's pieces first."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.keys: Sequence[Key] = ()
        self.lengths: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [1, L, features]; kept values are divided by 1 - p."""
        if not self.training:
            return x
        if x.shape[:-1] != (1, sum(self.lengths)):
            raise RuntimeError(f"dropout has keys of {sum(self.lengths)} tokens for an input {list(x.shape)}")
        kept = torch.cat([self._kept(*piece, x) for piece in zip(self.keys, self.lengths, strict=True)])
        return (x * kept) / (1 - self.p)

    def _kept(self, key: Key, tokens: int, x: Tensor) -> Tensor:
        """The kept values as bool [tokens, features], a function of the key alone."""
        seed = np.random.SeedSequence([*key, self.layer]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(x.device).manual_seed(int(seed))
        return torch.rand(tokens, x.shape[-1], generator=generator, device=x.device) >= self.p


def key_dropout(model: nn.Module, adapter: str) -> None:
    """Replace an adapter's dropout, for which PEFT uses torch's global generator, by `KeyedDropout`."""
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    for number, layer in enumerate(layers):
        plain = layer.lora_dropout[adapter]
        if isinstance(plain, nn.Dropout):
            layer.lora_dropout[adapter] = KeyedDropout(plain.p, number)


def dropouts(model: nn.Module) -> list[KeyedDropout]:
    """The dropouts of a model's adapters; none if they drop nothing."""
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


def set_keys(modules: Iterable[KeyedDropout], keys: Sequence[Key], lengths: Sequence[int]) -> None:
    """Set the keys and lengths of the next row's pieces. They stay until the next call, also in the backward pass."""
    for module in modules:
        module.keys, module.lengths = keys, lengths
