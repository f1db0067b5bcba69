"""Float32 copies of a policy's 16-bit weights, which the optimizer updates while passes compute with the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn


class Masters:
    """The master of each 16-bit weight of `lm`, with the values that `exact` has under its name.

    Each gradient of such a weight is added to that of its master, in float32, and not kept.
    """

    def __init__(self, lm: nn.Module, exact: nn.Module) -> None:
        values = dict(exact.named_parameters())
        self._weights = {name: w for name, w in lm.named_parameters() if w.dtype != torch.float32}
        self._masters = {
            name: nn.Parameter(values[name].detach().to(weight.device, torch.float32, copy=True))
            for name, weight in self._weights.items()
        }
        for name, weight in self._weights.items():
            weight.register_post_accumulate_grad_hook(_adder(self._masters[name]))

    def of(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters, with a master in place of each weight that has one."""
        for name, parameter in parameters:
            yield name, self._masters.get(name, parameter)

    @torch.no_grad()
    def round(self) -> None:
        """Set each weight to its master's value, rounded."""
        for name, weight in self._weights.items():
            weight.copy_(self._masters[name])


def _adder(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """A hook that moves a weight's gradient to its master."""

    def add(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.float(), None
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    return add
