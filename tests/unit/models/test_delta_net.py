"""Delta nets beside libraries that transformers takes in place of its own functions."""

import logging
import os
import subprocess
import sys
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qerl.models import delta_net
from qerl.models.delta_net import INSTALLED, PLAIN, PackedQwen3_5DeltaNet, functions_for, gated_delta_rule
from tests.conftest import nightly
from tests.families import FAMILIES

FAKE = """
def chunk_gated_delta_rule(q, k, v, g, beta):
    raise AssertionError("this kernel takes tensors of a GPU alone")

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from qerl.models.delta_net import use_packed_delta_nets
from qerl.models.structure import structure_of
from tests.families import FAMILIES

config = FAMILIES["qwen3_5"].config()
lm = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(4, 12)[None]
try:
    lm(ids)
except AssertionError as error:
    print(error)
use_packed_delta_nets(lm)
assert structure_of(config).linears and lm(ids).logits.isfinite().all()
print("done")
"""


@nightly
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


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "fails"),
    [
        ((9, 0), "3.3.1", False, False),
        ((9, 0), "3.4.0", False, True),
        ((9, 0), "3.6.0", False, True),
        ((9, 0), "3.7.0+git1234", False, True),
        ((9, 0), "3.7.1", False, False),
        ((9, 0), "3.10.0", False, False),
        ((9, 0), "3.6.0", True, False),
        ((8, 9), "3.6.0", False, False),
        ((10, 0), "3.6.0", False, False),
    ],
)
def test_backward_passes_of_the_library_fail_on_hopper_with_some_versions(capability, triton, tilelang, fails):
    assert delta_net.library_backward_fails(capability, triton, tilelang) == fails


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU and a version of Triton with which the library raises, as far as the choice of functions asks."""
    delta_net.library_trains_on.cache_clear()
    monkeypatch.setattr(delta_net, "library_is_installed", lambda: True)
    monkeypatch.setattr(delta_net, "find_spec", lambda name: None)
    monkeypatch.setattr(delta_net, "version", lambda name: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    delta_net.library_trains_on.cache_clear()


def test_gradients_that_the_library_lacks_are_those_of_pytorch(on_hopper, caplog):
    with caplog.at_level(logging.WARNING, logger="qerl"):
        chosen = [functions_for(on_hopper) for _ in range(2)]
        with torch.no_grad():
            assert functions_for(on_hopper) == INSTALLED
    assert chosen == [INSTALLED._replace(chunks=gated_delta_rule)] * 2
    [record] = caplog.records
    assert "Triton 3.6.0" in record.getMessage()
    assert "install Triton 3.7.1 or newer, or tilelang" in record.getMessage()


def test_the_library_trains_where_its_gradients_are_right(on_hopper, monkeypatch, caplog):
    monkeypatch.setattr(delta_net, "version", lambda name: "3.7.1")
    assert functions_for(on_hopper) == INSTALLED
    assert not caplog.records


def test_without_the_library_the_rule_on_a_gpu_is_that_of_this_package(on_hopper, monkeypatch):
    monkeypatch.setattr(delta_net, "library_is_installed", lambda: False)
    assert functions_for(on_hopper) == INSTALLED._replace(chunks=gated_delta_rule)
    on_hopper.dtype = torch.float32
    assert functions_for(on_hopper) == PLAIN


def test_heads_of_keys_are_repeated_for_other_rules_alone(monkeypatch):
    """A delta net has the same outputs by transformers' rule, which needs as many heads of keys as of values."""
    torch.manual_seed(0)
    config = FAMILIES["qwen3_5"].config(linear_num_key_heads=2, linear_num_value_heads=6)
    net = PackedQwen3_5DeltaNet(config, 0)
    row = torch.randn(2, 70, config.hidden_size)
    ours = net(row)
    monkeypatch.setattr(delta_net, "PLAIN", PLAIN._replace(chunks=unwrap(torch_chunk_gated_delta_rule)))
    torch.testing.assert_close(net(row), ours, rtol=1e-4, atol=1e-5)
