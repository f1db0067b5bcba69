"""The kernels of packed weights that a test on a GPU is run with."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qerl.layers import fused_linear
from qerl.layers.w4_linear import is_hopper

HOPPER = torch.cuda.is_available() and is_hopper(torch.cuda.get_device_capability())
#: Ends a parameter's name for the kernels of every other GPU. On those GPUs it would repeat the case without it.
PORTABLE = "-portable"


def with_portable(*weights: str) -> list[str]:
    """Names of weight formats, and of the packed ones with portable kernels, too."""
    return [*weights, *(f"{name}{PORTABLE}" for name in weights if HOPPER and name in ("nvfp4", "mxfp4"))]


@contextmanager
def kernels_of(name: str) -> Iterator[str]:
    """A context with the kernels that a parameter names; yields the weight format.

    A faked capability chooses them, as another GPU would.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith(PORTABLE):
            patch.setattr(fused_linear, "is_hopper", lambda capability: False)
        yield name.removesuffix(PORTABLE)
