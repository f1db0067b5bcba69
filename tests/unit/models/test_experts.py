"""MLPs and experts in a policy; `tests.parity.test_families` compares mixtures with other libraries."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from qerl.checkpoints.files import read_headers
from qerl.checkpoints.shapes import ModelShape
from qerl.doctor import candidate, diagnose
from qerl.memory_model import StepSettings, kept_bytes
from qerl.models.experts import Experts, Float32Router, GatedMLP, clamped_glu, fuse_mlps, split_experts
from qerl.models.export import write_dense
from qerl.models.linear import PackedLinear, dense_weights, unpacked_bytes
from qerl.models.loading import load_model
from qerl.models.policy import trained_in_full, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.models.structure import empty_model
from qerl.rl.passes import saved_for_backward
from qerl.settings.run import AdapterSettings
from tests.families import FAMILIES
from tests.tiny import tiny_family, tiny_gpt_oss

IDS = torch.tensor([[5, 9, 2, 77, 31, 8]])


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def outcome(lm):
    """The logits, and the gradient of every parameter by name."""
    logits = lm(IDS).logits
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in lm.named_parameters()}


def fused(lm):
    return [module for module in lm.modules() if isinstance(module, GatedMLP)]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_outputs_gradients_and_names_stay_the_same(name, tmp_path):
    folder = tiny_family(tmp_path / "m", name)
    plain, ours = loaded(folder), loaded(folder)
    fuse_mlps(ours)
    assert len(fused(ours)) == 2
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(outcome(ours), outcome(plain), rtol=0, atol=0)


def test_the_gate_of_gpt_oss_saves_its_input_alone():
    both = torch.randn(5, 12, dtype=torch.float64, requires_grad=True) * 6
    assert torch.autograd.gradcheck(lambda x: clamped_glu(x, 1.702, 7.0), both.detach().requires_grad_())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        clamped_glu(both, 1.702, 7.0)
    assert [tensor.shape for tensor in saved] == [both.shape]


def test_another_activation_and_another_class_are_left_alone():
    """A class with SiLU and the three projections may still compute something else."""

    class OtherMLP(Qwen2MLP):
        pass

    config = FAMILIES["qwen2"].config()
    block = nn.Sequential(OtherMLP(config), Qwen2MLP(FAMILIES["qwen2"].config(hidden_act="gelu")), Qwen2MLP(config))
    fuse_mlps(block)
    assert [type(module) for module in block] == [OtherMLP, Qwen2MLP, GatedMLP]


TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    quantize_checkpoint(tiny_family(root / "bf16", "qwen3_moe", dtype=torch.bfloat16), root / "nvfp4", "nvfp4")
    return root / "nvfp4"


def test_every_expert_is_packed_and_unpacked_by_itself(folder, tmp_path):
    """Samplers and updates may keep attention unpacked, and no expert."""
    model = load_model(folder, torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 2 * (4 + 4 * 3)
    attention = {name: layer for name, layer in layers.items() if "self_attn" in name}
    assert unpacked_bytes(model, torch.float32) == 4 * sum(x.in_features * x.out_features for x in attention.values())
    write_dense(folder, tmp_path / "dense", torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    with torch.no_grad(), dense_weights(model, torch.float32):
        assert {name for name, layer in layers.items() if layer._dense is not None} == attention.keys()
        found, expected = (lm(TOKENS).logits.log_softmax(-1) for lm in (model, stock))
    assert (found - expected).abs().max() < 1e-4


def test_the_router_is_float32_and_dense(folder):
    """In bfloat16 too, where rounding would otherwise choose between experts that score alike."""
    model = load_model(folder, torch.bfloat16)
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts"), Experts)
    router = model.get_submodule("model.layers.0.mlp.gate")
    assert isinstance(router, Float32Router)
    assert router.weight.dtype == torch.float32
    assert read_headers(folder)["model.layers.0.mlp.gate.weight"].dtype == "BF16"
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = router(hidden)[0]
    assert torch.equal(scores, hidden.float() @ router.weight.T)


class Router(torch.nn.Module):
    """A router as those of transformers, of 4 experts; `change` changes its numbers and weights."""

    def __init__(self, change=lambda _, numbers, weights: (numbers, weights), corrections=None):
        super().__init__()
        self.top_k, self.change = 2, change
        self.weight = torch.nn.Parameter(torch.zeros(4, 64, device="meta"))
        self.register_buffer("correction", corrections and torch.zeros(corrections, device="meta"))

    def forward(self, hidden):
        scores = torch.nn.functional.linear(hidden, self.weight)
        probabilities = scores.softmax(-1)
        numbers = (probabilities if self.correction is None else probabilities + self.correction).topk(2)[1]
        numbers, weights = self.change(self, numbers, probabilities.gather(1, numbers))
        return scores, weights, numbers


@pytest.mark.parametrize(
    ("router", "normalised"),
    [
        (Router(), False),
        (Router(lambda _, numbers, weights: (numbers, weights / weights.sum(-1, keepdim=True))), True),
        (Router(lambda _, numbers, weights: (numbers, 2.5 * weights)), None),
        (Router(lambda _, numbers, weights: (numbers.flip(0), weights)), None),
        (Router(corrections=4), None),
    ],
    ids=["as it is", "normalised", "scaled", "others", "corrected"],
)
def test_a_router_is_known_by_what_it_computes(router, normalised):
    split_experts(torch.nn.Sequential(router))
    assert isinstance(router, Float32Router)
    assert router.normalised is normalised


@pytest.mark.parametrize(
    "module",
    [
        Router(lambda router, numbers, weights: (numbers, weights * (1.1 if router.training else 1))),
        Router(lambda _, numbers, weights: (numbers[:, :1], weights[:, :1])),
        Router(lambda _, numbers, weights: (numbers.float(), weights)),
        Router(corrections=(2, 4)),
        torch.nn.Linear(64, 4, device="meta"),
    ],
    ids=["in training", "fewer", "no numbers", "a buffer of another shape", "linear"],
)
def test_what_does_not_choose_experts_in_the_same_way_always_is_no_router(module):
    split_experts(torch.nn.Sequential(module))
    assert not isinstance(module, Float32Router)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe", "gpt_oss"])
def test_the_memory_model_has_the_bytes_of_weights_and_adapter(name, tmp_path):
    """Widths are whole blocks of columns, which a GPU's kernels would fill up."""
    folder = tmp_path / "packed"
    if name == "gpt_oss":
        tiny_gpt_oss(folder, hidden_size=128, intermediate_size=128)
    else:
        width = "intermediate_size" if name in ("mixtral", "olmoe") else "moe_intermediate_size"
        wide = tiny_family(tmp_path, name, dtype=torch.bfloat16, hidden_size=128, **{width: 128})
        quantize_checkpoint(wide, folder, "nvfp4")
    asked = candidate(str(folder), None)
    memory = diagnose(asked, StepSettings(asked.weights, 4, 2, 2, 16, 16, recompute="auto")).memory
    policy = with_adapter(folder, AdapterSettings(rank=4), "bfloat16", 0, torch.device("cpu"))
    adapter = [parameter for name, parameter in policy.trainable() if ".lora_" in name]
    assert memory.adapter == sum(parameter.nbytes for parameter in adapter)
    model = load_model(folder, torch.bfloat16, float32_norms=True)
    tensors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "weight" in name)]
    # The kernels have experts' biases in float32, too.
    biases = sum(2 * p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert memory.weights == pytest.approx(biases + sum(tensor.nbytes for tensor in tensors), rel=0.005)


@pytest.mark.parametrize(("name", "input_"), [("qwen3_moe", 0), ("qwen3_5_moe", 64)])
@pytest.mark.parametrize("chosen", [1, 3])
def test_the_memory_model_has_what_a_mixture_keeps_for_its_backward_pass(chosen, name, input_):
    """In float32, and with the inner features, which the GPU's kernel computes again.

    The shared expert's adapters would keep its input, and its inner features in place of the gate's activation.
    """
    config = FAMILIES[name].config(num_experts_per_tok=chosen)
    mlp = empty_model(config, torch.float32).to_empty(device="cpu").requires_grad_(False).model.layers[0].mlp
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 50, 64, requires_grad=True)
    with saved_for_backward(mlp) as saved:
        _ = mlp(x)
    shape = ModelShape.of(config.to_dict())
    alone = kept_bytes(replace(shape, mixture=None, intermediate=0)) - 2 * (64 - input_)  # without the MLP's input
    assert saved.bytes / 50 == 2 * (kept_bytes(shape) - alone) - (4 * 4 + 16 * chosen + 4) + 4 * chosen * 64


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_a_mixture_that_was_trained_in_full_is_saved_in_the_hubs_layout(name, tmp_path):
    base = tiny_family(tmp_path / "bf16", name, dtype=torch.bfloat16)
    policy = trained_in_full(base, "float32", torch.device("cpu"))
    with torch.no_grad():
        expected = policy.lm(TOKENS).logits
    policy.save(tmp_path / "saved")  # which rounds matrices to bfloat16, as these are
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(stock(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
