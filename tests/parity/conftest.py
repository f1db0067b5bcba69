"""The small models of the families, dense and packed, which several files of tests read, and vLLM's objects."""

import gc

import pytest
import torch

from qerl.models.quantize import quantize_checkpoint
from tests.parity.family_models import NORMS
from tests.tiny import tiny_family, tiny_gpt_oss


class Bases:
    """The folder of the families' folders, in which each checkpoint is made when it is first asked for."""

    def __init__(self, root, name=""):
        self.root, self.name = root, name

    def __truediv__(self, path):
        name, _, weights = f"{self.name}/{path}".strip("/").partition("/")
        if name not in NORMS:
            return self.root / path
        return self.made(name, weights) if weights else Bases(self.root, name)

    def made(self, name, weights):
        folder = self.root / name / weights
        if not folder.exists():
            if name == "gpt_oss":
                tiny_gpt_oss(folder)
            elif weights == "bf16":
                tiny_family(folder, name, dtype=torch.bfloat16)
            else:
                quantize_checkpoint(self.made(name, "bf16"), folder, weights)
        return folder


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return Bases(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def frozen():
    """An engine that ends unfreezes all objects of the process: the next ones would collect among all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
