"""PackedLinear, with and without LoRA, against dense layers with the unpacked weight."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.formats.codecs import PACKED_FORMATS, dequantize, quantize
from qerl.models.linear import PackedLinear, dense_weights
from qerl.models.loading import load_model
from qerl.models.lora import LeanLoraLinear, products, register_lora
from tests.tiny import tiny_qwen2

ROWS, COLUMNS = 96, 128
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = pytest.mark.parametrize("weights_format", PACKED_FORMATS)


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_pair(weights_format, dtype, bias=True):
    """A packed layer, and a dense one with the very weights it stands for."""
    packed = quantize(seeded(ROWS, COLUMNS), weights_format)
    offset = seeded(ROWS, seed=1, dtype=dtype) if bias else None
    dense = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    dense.weight = nn.Parameter(dequantize(packed, dtype))
    if bias:
        dense.bias = nn.Parameter(offset.clone())
    return PackedLinear.from_packed(packed, offset), dense


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_forward_and_gradients_equal_the_dense_layer(weights_format, dtype, bias):
    layer, dense = layer_pair(weights_format, dtype, bias)
    x = seeded(2, 5, COLUMNS, seed=2, dtype=dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    cotangent = seeded(2, 5, ROWS, seed=3, dtype=dtype)
    out, expected = layer(x), dense(y)
    out.backward(cotangent)
    expected.backward(cotangent)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, y.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


def test_gradcheck_in_float64(weights_format):
    layer, _ = layer_pair(weights_format, torch.float64)
    x = seeded(3, COLUMNS, seed=4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


def test_packed_tensors_are_frozen(weights_format):
    layer, _ = layer_pair(weights_format, torch.float32, bias=False)
    assert list(layer.parameters()) == []
    layer(seeded(3, COLUMNS).requires_grad_()).sum().backward()
    assert all(buffer.grad is None and not buffer.requires_grad for buffer in layer.buffers())


def test_nothing_dense_is_saved_for_backward(weights_format):
    layer, dense = layer_pair(weights_format, torch.float32)
    saved = []

    def count(tensor):
        saved.append(tensor.numel())
        return tensor

    x = seeded(3, COLUMNS).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = layer(x)
    assert sum(saved) == 0
    assert layer._dense is None
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        dense(x)
    assert ROWS * COLUMNS in saved, "the hook sees what a dense layer saves"
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_dense_weights_give_the_same_values_and_are_dropped(weights_format, dtype):
    model = nn.Sequential(layer_pair(weights_format, dtype, bias=False)[0], nn.Tanh(), nn.Linear(ROWS, 4, dtype=dtype))
    layer = model[0]
    x = seeded(7, COLUMNS, seed=5, dtype=dtype).requires_grad_()
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    with dense_weights(model, dtype):
        assert layer.dense_weight(dtype) is layer.dense_weight(dtype)
        kept = model(x)
        kept.sum().backward()
        # Another dtype than the kept one is unpacked on the fly.
        assert layer(x.detach().double()).dtype == torch.float64
        with dense_weights(model, dtype):
            pass
        assert layer._dense is not None
    assert torch.equal(kept, expected)
    assert torch.equal(x.grad, gradient)
    assert layer._dense is None
    with pytest.raises(KeyError), dense_weights(model, dtype):
        raise KeyError
    assert layer._dense is None


def test_state_survives_casts_copies_and_serialisation(weights_format):
    layer, _ = layer_pair(weights_format, torch.float32)
    reference = {name: tensor.clone() for name, tensor in layer.packed.tensors.items()}
    layer.to(torch.bfloat16).float().half().double()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [layer, copy.deepcopy(layer), torch.load(file, weights_only=False)]
    fresh = PackedLinear(COLUMNS, ROWS, weights_format, bias=True)
    fresh.load_state_dict(layer.state_dict())
    for each in [*copies, fresh]:
        for name, tensor in reference.items():
            found = each.packed.tensors[name]
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert layer.bias.dtype == torch.float64
    meta = layer.to("meta")
    assert all(tensor.is_meta for tensor in meta.packed.tensors.values())


# --- LoRA ------------------------------------------------------------------------------------------------------------


def pack(model, weights_format):
    """Replace the linear layers in the blocks of a dense model in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            bias = None if module.bias is None else module.bias.detach()
            model.set_submodule(name, PackedLinear.from_packed(quantize(module.weight, weights_format), bias))
    return model


def unpack(model, dtype):
    """The packed model with dense layers in place of packed ones."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=dtype)
            dense.weight = nn.Parameter(dequantize(module.packed, dtype))
            dense.bias = module.bias
            model.set_submodule(name, dense)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("dense") / "qwen2")


def with_adapter(model, packed, seed=0):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, register_lora(config) if packed else config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            seed += 1
            parameter.data.copy_(0.05 * seeded(*parameter.shape, seed=seed))
    return model


def assert_same_but_for_order(logits, expected):
    """To some roundings in float32: ours adds the base's product to bias and adapter, PEFT's the adapter to those."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-7 * expected.abs().max().item())


TOKENS = torch.randint(2, 100, (2, 12), generator=torch.Generator().manual_seed(7))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lora_equals_lora_on_the_dense_model(weights_format, folder, dtype):
    base = pack(load_model(folder, dtype), weights_format)
    reference = with_adapter(unpack(base, dtype), packed=False)
    model = with_adapter(base, packed=True)
    results = []
    for each in (model, reference):
        out = each(input_ids=TOKENS, labels=TOKENS)
        out.loss.backward()
        gradients = {name: p.grad for name, p in each.named_parameters() if p.requires_grad}
        results.append((out.logits, gradients))
    (logits, gradients), (expected_logits, expected) = results
    if dtype == torch.bfloat16:  # without autocast PEFT's way is taken
        assert torch.equal(logits, expected_logits)
    assert_same_but_for_order(logits, expected_logits)
    exact = copy.deepcopy(reference).double()(input_ids=TOKENS).logits
    ours, stock = ((each.double() - exact).norm().item() for each in (logits, expected_logits))
    assert ours <= 1.25 * stock, "it errs as PEFT's does"
    assert gradients.keys() == expected.keys()
    assert len(gradients) == 2 * 2 * len(TARGETS)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_adapter_is_read_by_stock_peft(weights_format, folder, tmp_path):
    base = pack(load_model(folder, torch.float32), weights_format)
    dense = unpack(base, torch.float32)
    model = with_adapter(base, packed=True).eval()
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(dense, tmp_path).eval()
    assert stock.state_dict().keys() - model.state_dict().keys() == {
        key for key in stock.state_dict() if key.endswith("base_layer.weight")
    }
    with torch.no_grad():
        assert_same_but_for_order(model(TOKENS).logits, stock(TOKENS).logits)
    # The other way round: an adapter from elsewhere on a packed base.
    plain = pack(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), weights_format)
    config = register_lora(LoraConfig.from_pretrained(tmp_path))
    back = PeftModel.from_pretrained(plain, tmp_path, config=config).eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, model(TOKENS).logits)


def test_merging_is_an_error_and_keeps_the_adapter(weights_format, folder):
    model = with_adapter(pack(load_model(folder, torch.float32), weights_format), packed=True).eval()
    before = model(TOKENS).logits
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=f"can't merge an adapter into {weights_format} weights"):
            merge()
    assert torch.equal(model(TOKENS).logits, before)
    with model.disable_adapter():
        assert not torch.equal(model(TOKENS).logits, before)


def test_peft_options_that_need_the_dense_weight_are_errors(weights_format, folder):
    with pytest.raises(ValueError, match="init_lora_weights='pissa'"):
        register_lora(LoraConfig(init_lora_weights="pissa", target_modules=TARGETS))
    base = pack(load_model(folder, torch.float32), weights_format)
    with pytest.raises(ValueError, match="use_dora"):
        get_peft_model(base, register_lora(LoraConfig(use_dora=True, target_modules=TARGETS)))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("packed", [True, False])
def test_lean_lora_is_pefts_under_autocast(weights_format, packed, dropout):
    """Outputs and gradients against float64; PEFT's own forward pass errs as much or more."""
    layer, dense = layer_pair(weights_format, torch.bfloat16)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=False, lora_dropout=dropout)
    torch.manual_seed(0)
    ours = get_peft_model(nn.Sequential(layer if packed else dense), register_lora(config)).base_model.model[0]
    stock = super(LeanLoraLinear, ours).forward
    assert isinstance(ours, LeanLoraLinear)
    x, grad = seeded(2, 5, COLUMNS, seed=2, dtype=torch.bfloat16), seeded(2, 5, ROWS, seed=3, dtype=torch.bfloat16)
    a, b = (side["default"].weight for side in (ours.lora_A, ours.lora_B))
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    torch.manual_seed(1)
    kept = nn.functional.dropout(torch.ones_like(x), dropout).double()
    shrunk = (wide[0] * kept) @ wide[1].T
    exact = wide[0] @ dense.weight.double().T + dense.bias.double() + 3 * shrunk @ wide[2].T
    expected = (exact, *torch.autograd.grad(exact, wide, grad.double()))

    def errors(forward):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(inputs)
        found = (out, *torch.autograd.grad(out, (inputs, a, b), grad))
        assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        return [((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, expected, strict=True)]

    lean = errors(ours)
    assert max(lean) < 0.01
    if not dropout:  # PEFT draws it for another dtype
        assert sum(lean) < 1.1 * sum(errors(stock))


def test_layers_that_share_an_input_keep_it_once(weights_format):
    """PEFT's own layers keep a copy each."""
    layers = nn.ModuleList(layer_pair(weights_format, torch.bfloat16)[0] for _ in range(3))
    config = register_lora(LoraConfig(r=4, target_modules=["0", "1", "2"]))
    layers = get_peft_model(layers, config).base_model.model
    x = seeded(50, COLUMNS, dtype=torch.bfloat16).requires_grad_()

    def kept(forwards):
        found = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            _ = [forward(x) for forward in forwards]
        return {t.untyped_storage().data_ptr() for t in found if t.numel() == x.numel()}

    assert kept(layers) == {x.untyped_storage().data_ptr()}
    assert len(kept([super(LeanLoraLinear, layer).forward for layer in layers])) == 3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_that_share_an_input_give_the_same_outputs_together_and_alone(weights_format, dropout):
    """With dropout, or a layer without an adapter among them, they are computed alone indeed."""
    bases = [layer_pair(weights_format, torch.bfloat16, bias)[0] for bias in (True, False, True)]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["0", "1"], init_lora_weights=False, lora_dropout=dropout)
    torch.manual_seed(0)
    layers = list(get_peft_model(nn.ModuleList(bases), register_lora(config)).base_model.model)
    x = seeded(2, 5, COLUMNS, seed=2, dtype=torch.bfloat16).requires_grad_()
    grads = [seeded(2, 5, ROWS, seed=3 + i, dtype=torch.bfloat16) for i in range(3)]
    for together in (layers[:2], layers):
        trained = [x, *(p for layer in together for p in layer.parameters() if p.requires_grad)]
        found = []
        for fused in (True, False):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16):
                outs = products(x, together) if fused else [layer(x) for layer in together]
            found.append([*outs, *torch.autograd.grad(outs, trained, grads[: len(outs)])])
        for ours, alone in zip(*found, strict=True):
            assert ours.dtype == alone.dtype
            assert ((ours.double() - alone.double()).norm() / alone.double().norm()).item() < 0.005
