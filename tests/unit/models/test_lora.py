"""Lean LoRA on packed and dense layers against PEFT's and float64, and keyed dropout."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.lora import KeyedDropout, LeanLoraLinear, products, register_lora, set_keys
from tests.unit.models.test_linear import COLUMNS, ROWS, layer_pair, seeded

formats = pytest.mark.parametrize("weights_format", PACKED_FORMATS)


@formats
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"use_dora": True}, "use_dora"),
        ({}, "can't merge an adapter into .* weights"),
    ],
)
def test_what_needs_the_dense_weight_is_an_error(weights_format, options, sentence):
    config = LoraConfig(target_modules=["0"], **options)
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(
            nn.Sequential(layer_pair(weights_format, torch.float32)[0]), register_lora(config)
        ).merge_adapter()


@formats
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


@formats
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


@formats
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


FEATURES = 64
PIECES = {(0, 1, 0, 99): 40, (0, 1, 1, 0): 100, (0, 1, 1, 1): 60}


def masks(layer=0, keys=tuple(PIECES), p=0.3):
    """The masks of the pieces of one row, as multiples of the input."""
    dropout = KeyedDropout(p, layer).train()
    lengths = [PIECES[key] for key in keys]
    set_keys([dropout], keys, lengths)
    torch.manual_seed(torch.initial_seed() + 1)  # torch's own generator has no part in it
    return dict(zip(keys, dropout(torch.ones(1, sum(lengths), FEATURES))[0].split(lengths), strict=True))


def test_a_mask_is_the_pieces_own_wherever_it_is_packed():
    together, keys = masks(), list(PIECES)
    for chosen in ([keys[0]], [keys[2], keys[1]], keys[::-1]):
        for key, mask in masks(keys=chosen).items():
            assert torch.equal(mask, together[key])


def test_inputs_are_dropped_at_the_rate_and_the_others_scaled_up():
    values = torch.cat([mask.flatten() for layer in range(8) for mask in masks(layer).values()])
    assert torch.allclose(values.unique(), torch.tensor([0, 1 / 0.7]))
    assert (values == 0).double().mean().item() == pytest.approx(0.3, abs=5e-3)  # of 102,400: 0.0014 is a deviation
    assert values.mean().item() == pytest.approx(1, abs=7e-3)


def test_pieces_layers_and_steps_are_drawn_apart():
    first = [mask[:40].flatten() for layer in range(3) for mask in masks(layer).values()]
    correlations = torch.corrcoef(torch.stack(first)) - torch.eye(len(first))
    assert correlations.abs().max() < 0.08  # 2,560 numbers each: 0.02 is a deviation


def test_a_rollout_keeps_every_input_and_a_row_without_keys_is_an_error():
    dropout = KeyedDropout(0.5, 0)
    row = torch.ones(1, 5, FEATURES)
    assert dropout.eval()(row) is row
    with pytest.raises(RuntimeError, match="keys of 0 tokens"):
        dropout.train()(row)
