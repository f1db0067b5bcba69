"""Weights that share one scale, by format."""

from __future__ import annotations

#: Weights that share one scale, by format (NF4: bitsandbytes' block, along the flattened tensor).
GROUP_SIZE: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}
