"""The kernels of packed weights that a test on a GPU is run with, and the memory that it finds."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qerl.models import linear
from qerl.models.linear import is_hopper

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
            patch.setattr(linear, "is_hopper", lambda capability: False)
        yield name.removesuffix(PORTABLE)


def poison() -> None:
    """Fill freed memory, from which outputs are allocated, with NaN."""
    torch.manual_seed(torch.seed() % 2**31)
    filled = [torch.full((size,), torch.nan, device="cuda") for size in (2**9, 2**14, 2**20, 2**26) for _ in range(4)]
    del filled
