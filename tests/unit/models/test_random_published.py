"""Published shapes: their sizes, and models of them with random weights."""

import pytest
import torch

from qerl.checkpoints.shapes import PUBLISHED, ModelShape, shape_of
from qerl.memory_model import weight_bytes
from qerl.models import random
from qerl.models.linear import PackedLinear
from qerl.models.random import published_config, random_policy
from qerl.models.structure import structure_of
from qerl.settings.models import Base
from tests.families import FAMILIES

#: 10^9 parameters of the text models, by their model cards.
BILLIONS = {
    "mistral-7b": 7.24,
    "phi-4-mini": 3.84,
    "phi-4": 14.7,
    "gemma-3-1b": 1.0,
    "gemma-3-12b": 11.8,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.7,
}


def test_shapes_have_the_published_sizes():
    assert list(PUBLISHED) == [*BILLIONS]
    for name, billions in BILLIONS.items():
        shape = ModelShape.of(published_config(name).to_dict())
        assert weight_bytes(shape, "bf16") / 2e9 == pytest.approx(billions, rel=0.01), name
        assert shape == ModelShape.of(PUBLISHED[name]), name  # of which plans read the values alone


def test_a_token_takes_the_experts_that_it_chose():
    shapes = {name: shape_of(name) for name in ("qwen3-30b-a3b", "mistral-7b")}
    taken = {name: shape.products + shape.vocabulary * shape.hidden for name, shape in shapes.items()}
    assert taken["qwen3-30b-a3b"] / 1e9 == pytest.approx(3.03, rel=0.01)  # "A3B", without the embedding
    assert taken["mistral-7b"] / 1e9 == pytest.approx(7.11, rel=0.01)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3", "qwen3_moe", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("weights", ["bf16", "packed", "nets packed"])
def test_a_policy_of_a_published_shape(monkeypatch, family, weights):
    """Layers are packed as in the family's files, and the adapter counts."""
    config = FAMILIES[family].config()
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    if family != "gemma3":  # a dense copy of the whole may be larger than the GPU
        monkeypatch.setattr(random, "AutoModelForCausalLM", None)
    asked = "bf16" if weights == "bf16" else "mxfp4" if family == "gpt_oss" else "nvfp4"
    nets = weights == "nets packed"
    policy = random_policy(Base("published", asked, packed_nets=nets), 4, torch.device("cpu"))
    packed = {name for name, layer in policy.lm.named_modules() if isinstance(layer, PackedLinear)}
    expected = set() if weights == "bf16" else structure_of(config).packed_layers(nets)
    if family == "gpt_oss":
        expected = {name for name in expected if ".experts." in name}
    assert {name.replace(".base_layer", "") for name in packed} == expected
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in policy.trainable())
    with torch.no_grad():
        logits = policy.lm(torch.arange(3, 20)[None]).logits
    assert logits.isfinite().all()


def test_experts_in_nf4_have_weights_of_their_own(monkeypatch):
    """NF4 isn't stored by rows, so its experts aren't quantized together."""
    monkeypatch.setitem(PUBLISHED, "published", FAMILIES["qwen3_moe"].config().to_dict())
    policy = random_policy(Base("published", "nf4"), 0, torch.device("cpu"))
    experts = [layer for name, layer in policy.lm.named_modules() if name.endswith("gate_proj") and ".experts." in name]
    first, second = (layer.dense_weight(torch.float32) for layer in experts[:2])
    assert first.shape == (experts[0].out_features, experts[0].in_features)
    assert not torch.equal(first, second)
    assert first.std() == pytest.approx(0.02, rel=0.1)
