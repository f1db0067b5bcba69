"""Every test of this folder needs a CUDA device and Triton."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]
MARKS = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture
def poisoned():
    """NaN in freed memory, from which outputs are allocated."""
    torch.manual_seed(torch.seed() % 2**31)
    filled = [torch.full((size,), torch.nan, device="cuda") for size in (2**9, 2**14, 2**20, 2**26) for _ in range(4)]
    del filled


@pytest.fixture(params=[True, False], ids=["pdl", "plain"])
def dependent_launch(request, monkeypatch):
    """Kernels that start while the one before ends, or after it."""
    monkeypatch.setattr("qerl.kernels.triton.launch.ENABLED", request.param)
