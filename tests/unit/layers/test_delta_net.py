"""Delta nets beside libraries that transformers takes in place of its own functions."""

import os
import subprocess
import sys

FAKE = """
def chunk_gated_delta_rule(q, k, v, g, beta):
    raise AssertionError("this kernel takes tensors of a GPU alone")

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from qerl.layers.delta_net import pack_delta_nets
from qerl.layers.structure import structure_of
from tests.families import FAMILIES

config = FAMILIES["qwen3_5"].config()
lm = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(4, 12)[None]
try:
    lm(ids)
except AssertionError as error:
    print(error)
pack_delta_nets(lm)
assert structure_of(config).linears and lm(ids).logits.isfinite().all()
print("done")
"""


def test_a_library_of_gpu_kernels_leaves_models_on_a_cpu_alone(tmp_path):
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "gated_delta_rule.py").write_text(FAKE)
    places = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = os.environ | {"PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # The first line is stock transformers', whose model takes the library's function on a CPU, too.
    assert ended.stdout.splitlines() == ["this kernel takes tensors of a GPU alone", "done"], ended.stderr
