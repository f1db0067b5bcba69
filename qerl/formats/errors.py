"""The error of tensors that a 4-bit format refuses."""

from __future__ import annotations

from qerl.settings.base import UserError


class FormatError(UserError):
    """A tensor, shape or checkpoint that a weight format can't hold. The message names it."""
