"""The error for tensors that a 4-bit format doesn't support."""

from __future__ import annotations

from qerl.settings.base import UserError


class FormatError(UserError):
    """A tensor, shape or checkpoint that a weight format doesn't support. The message names it."""
