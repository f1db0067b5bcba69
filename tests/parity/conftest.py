"""The small models of the families, dense and packed, which several files of tests read, and vLLM's objects."""

import gc

import pytest
import torch

from qerl.models.quantize import quantize_checkpoint
from tests.parity.family_models import PACKED
from tests.tiny import tiny_family, tiny_gpt_oss


class Bases:
    """The folder of the families' folders, each of which is made when it is first asked for."""

    def __init__(self, root):
        self.root = root

    def __truediv__(self, path):
        name = str(path).partition("/")[0]
        if name == "gpt_oss" and not (self.root / name).exists():
            tiny_gpt_oss(self.root / "gpt_oss/mxfp4")
        elif name in PACKED and not (self.root / name).exists():
            source = tiny_family(self.root / name / "bf16", name, dtype=torch.bfloat16)
            for weights in PACKED[name]:
                quantize_checkpoint(source, self.root / name / weights, weights)
        return self.root / path


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return Bases(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def frozen():
    """An engine that ends unfreezes all objects of the process: the next ones would collect among all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
