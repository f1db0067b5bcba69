"""The activations of a gate that products apply themselves: out = activation(gate) * up."""

from __future__ import annotations

from math import pi, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

#: As `hidden_act` of a configuration names them; "gelu_pytorch_tanh" is gelu's approximation with tanh.
Activation = Literal["silu", "gelu_pytorch_tanh"]

_ROOT = sqrt(2 / pi)
#: a and b of each activation: x * sigmoid(a * x + b * x^3). For gelu, (1 + tanh(u)) / 2 is sigmoid(2 * u).
COEFFICIENTS: dict[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_pytorch_tanh": (2 * _ROOT, 2 * _ROOT * 0.044715),
}


def gated(both: Tensor, activation: Activation, out: Tensor) -> None:
    """Write activation(gate) * up [B, N / 2] of gate and up side by side [B, N] to `out`, by PyTorch."""
    gate, up = both.chunk(2, dim=-1)
    silu = activation == "silu"
    torch.mul(nn.functional.silu(gate) if silu else nn.functional.gelu(gate, approximate="tanh"), up, out=out)
