"""The card of a trained policy's folder: its code runs unchanged and loads the policy with stock PEFT."""

import json
import re

import pytest
import torch
from torch.nn.functional import log_softmax

from qerl.models.adapter_files import Base
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.settings.run import AdapterSettings
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 40, 41, 8]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    dense = tiny_qwen2(folder / "bf16")
    for weights in ("nvfp4", "mxfp4", "nf4"):
        quantize_checkpoint(dense, folder / weights, weights)
    return folder


def trained(base, **adapter):
    """Random values in all that is trained, norms away from what 16 bits can hold."""
    policy = with_adapter(base, AdapterSettings(rank=4, **adapter), "float32", 0, CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def code(folder):
    [block] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return block


#: What the card says that is rounded to bfloat16: NVFP4's weights when they are unpacked, the input of NF4's products.
@pytest.mark.parametrize(("weights", "near"), [("bf16", 1e-5), ("nvfp4", 3e-3), ("mxfp4", 1e-5), ("nf4", 3e-3)])
@torch.no_grad()
def test_the_code_of_the_card_makes_the_policy_with_stock_peft(bases, tmp_path, weights, near):
    policy = trained(bases / weights)
    policy.save(tmp_path / "policy")
    names = {}
    exec(code(tmp_path / "policy"), names)
    ours, stock = (log_softmax(model(input_ids=IDS).logits, -1) for model in (policy.lm, names["model"]))
    torch.testing.assert_close(stock, ours, atol=near, rtol=0)
    bare = load_policy(bases / weights, None, "float32", CPU).lm(input_ids=IDS).logits
    assert (log_softmax(bare, -1) - ours).abs().max() > 0.03  # what was trained shows
    assert names["tokenizer"].decode(IDS[0]) == policy.tokenizer.decode(IDS[0])


def test_an_adapter_names_its_base(bases, tmp_path):
    policy = trained(bases / "nvfp4", train_norms=False)
    for name, base in {"here": None, "hub": Base("org/name", "0" * 40)}.items():
        policy.save(tmp_path / name, base)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        expected = base or Base(str(bases / "nvfp4"))
        assert (config["base_model_name_or_path"], config["revision"]) == (expected.name, expected.revision)
        card = (tmp_path / name / "README.md").read_text()
        assert f"`{expected.name}`" in card
        assert "More Information Needed" not in card
        assert "norms" not in card  # there are none
    assert 'from_pretrained(base, revision="0000' in code(tmp_path / "hub")
