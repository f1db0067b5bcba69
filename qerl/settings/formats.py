"""The formats of weights: their names, and what is known of each without torch (codecs: `qerl.formats.codecs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qerl.settings.base import UserError

PackedFormat = Literal["nf4", "mxfp4", "nvfp4"]
WeightFormat = Literal["bf16", PackedFormat]


class FormatError(UserError):
    """A tensor, shape or checkpoint that a weight format doesn't support. The message names it."""


@dataclass(frozen=True)
class Format:
    """A 4-bit format, and the libraries that write checkpoints of it."""

    #: Weights that share one scale (NF4: bitsandbytes' block, along the flattened tensor).
    group_size: int
    #: How stock libraries deviate from a policy as it was trained on such a base.
    note: str
    #: llmcompressor's scheme of weights alone, compressed-tensors' name of the layout, and the type of its numbers;
    #: None of a format that bitsandbytes writes.
    scheme: str | None = None
    layout: str | None = None
    numbers: Literal["float", "int"] = "float"
    #: Whether stock transformers reads experts, which it stacks while it loads them.
    stock_experts: bool = False
    #: How weights are rounded; rtn: to nearest, without calibration data.
    method: str = "rtn"

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries whose versions decide a checkpoint's bytes."""
        return ("llmcompressor", "compressed-tensors") if self.scheme else ("bitsandbytes",)


_UNPACKED = "PEFT has no adapter for layers packed so: they are unpacked, "
FORMATS: dict[str, Format] = {
    # By transformers 5.17, experts in NVFP4 lose their global scales without an error, and those in NF4 fail.
    "nvfp4": Format(16, _UNPACKED + "and transformers rounds them to bfloat16.", "NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": Format(32, _UNPACKED + "which is exact.", "MXFP4A16", "mxfp4-pack-quantized", stock_experts=True),
    "nf4": Format(
        64,
        "The base's own settings load it by bitsandbytes, which multiplies by its weights in bfloat16.",
        method="nf4-double-quant",
    ),
}
