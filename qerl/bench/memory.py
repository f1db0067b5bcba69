"""Bytes of tensors and of an optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return nbytes([value for value in states if isinstance(value, torch.Tensor)])
