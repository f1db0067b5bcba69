"""The norms of a policy's blocks, as the engine reads them."""

from __future__ import annotations

from typing import Any

from peft.utils import ModulesToSaveWrapper

from qerl.kernels.geometry import Norm
from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.noisy_norm import NoisyRMSNorm
from qerl.layers.structure import epsilon_of, offset_of


def norm_of(norm: Any) -> Norm:
    """A norm with its noise; PEFT's trained copy if there is one."""
    if isinstance(norm, ModulesToSaveWrapper):
        norm = norm.modules_to_save[POLICY_ADAPTER]
    offset = norm.offset if isinstance(norm, NoisyRMSNorm) else offset_of(norm)
    return Norm(norm.weight, getattr(norm, "noise", None), epsilon_of(norm), offset or 0.0)
