"""4-bit weight formats: codecs, linear layers over packed weights, quantization of checkpoints."""

from qerl.config import UserError


class FormatError(UserError):
    """A weight or a packed tensor that a format can't hold; the message is one sentence for the user."""
