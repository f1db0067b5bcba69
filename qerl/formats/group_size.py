"""Weights that share one scale, by format, and the error for tensors that a format doesn't support; without torch."""

from __future__ import annotations

from qerl.settings.base import UserError

#: Weights that share one scale, by format (NF4: bitsandbytes' block, along the flattened tensor).
GROUP_SIZE: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}


class FormatError(UserError):
    """A tensor, shape or checkpoint that a weight format doesn't support. The message names it."""
