"""Kernels in Triton, imported on GPUs alone: the functions of `qerl.kernels.reference`."""

from qerl.kernels.triton.attention import attend
from qerl.kernels.triton.delta import delta_prompts, delta_step
from qerl.kernels.triton.experts import (
    combine,
    combine_gradients,
    dense_input_gradient,
    dense_product,
    dense_weight_gradient,
    group,
    route,
    scores,
)
from qerl.kernels.triton.norms import add_normed, clamped_glu, rms_norm
from qerl.kernels.triton.prompt_attention import attend_prompts
from qerl.kernels.triton.sampling import draw, tile_gradient, tile_statistics

__all__ = [
    "add_normed",
    "attend",
    "attend_prompts",
    "clamped_glu",
    "combine",
    "combine_gradients",
    "delta_prompts",
    "delta_step",
    "dense_input_gradient",
    "dense_product",
    "dense_weight_gradient",
    "draw",
    "group",
    "rms_norm",
    "route",
    "scores",
    "tile_gradient",
    "tile_statistics",
]
