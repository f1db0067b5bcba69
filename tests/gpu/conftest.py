"""Every test of this folder needs a CUDA device and Triton.

Some files have cases of kernels that Triton's interpreter runs on a CPU, too, in float32 and on smaller shapes
(`tests/unit/kernels/test_interpreter.py`).
"""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.exact import DEVICE, INTERPRETED

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]
MARKS = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not INTERPRETED:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture
def poisoned():
    """NaN in freed memory, from which outputs are allocated."""
    torch.manual_seed(0 if INTERPRETED else torch.seed() % 2**31)
    sizes = (2**9, 2**14) if INTERPRETED else (2**9, 2**14, 2**20, 2**26)
    filled = [torch.full((size,), torch.nan, device=DEVICE) for size in sizes for _ in range(4)]
    del filled


@pytest.fixture(params=["plain"] if INTERPRETED else ["pdl", "plain"])
def dependent_launch(request, monkeypatch):
    """Kernels that start while the one before ends, or after it."""
    monkeypatch.setattr("qerl.kernels.triton.launch.ENABLED", request.param == "pdl")


@pytest.fixture
def sizes_of_a_gpu(monkeypatch):
    """Those by which launches of attention are divided, where there is no GPU."""
    if INTERPRETED:
        sizes = {"multi_processor_count": 8, "shared_memory_per_block_optin": 100_000}
        properties = SimpleNamespace(**sizes, shared_memory_per_multiprocessor=101_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr("qerl.kernels.triton.prompt_attention._reads", lambda dim_block, device: (64, 1))
