"""The kernels of packed weights that a test on a GPU is run with, and its policies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from qerl.models import linear
from qerl.models.linear import is_hopper
from qerl.models.policy import Policy, with_adapter
from qerl.settings.run import AdapterSettings
from tests.parity.family_models import perturbed

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


def adapted(checkpoint: Path, dtype: str, deviation: float = 0.02) -> Policy:
    """A policy on a GPU whose adapter and norms are random, and the same whatever the dtype of the base."""
    policy = with_adapter(checkpoint, AdapterSettings(rank=16), dtype, 0, torch.device("cuda", 0))
    return perturbed(policy, deviation)
