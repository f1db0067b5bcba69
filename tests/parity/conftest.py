"""The small models of the families, dense and packed, which several files of tests read, and vLLM's objects."""

import gc

import pytest
import torch

from qerl.models.quantize import quantize_checkpoint
from tests.parity.family_models import PACKED
from tests.tiny import tiny_family, tiny_gpt_oss


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    tiny_gpt_oss(root / "gpt_oss/mxfp4")
    for name, formats in PACKED.items():
        source = tiny_family(root / name / "bf16", name, dtype=torch.bfloat16)
        for weights in formats:
            quantize_checkpoint(source, root / name / weights, weights)
    return root


@pytest.fixture(scope="module")
def frozen():
    """An engine that ends unfreezes all objects of the process: the next ones would collect among all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
