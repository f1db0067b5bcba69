"""Float32 copies of 16-bit weights: gradients, rounding and the saved model."""

import torch
from safetensors.torch import load_file
from torch import nn

from qerl.models.policy import Masters, trained_in_full
from tests.tiny import tiny_qwen2, write_template

CPU = torch.device("cpu")


def test_gradients_add_up_in_float32_where_bfloat16_would_lose_them():
    exact = nn.Linear(1, 1, bias=False)
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    masters = Masters(layer, exact)
    [(name, master)] = masters.of(layer.named_parameters())
    assert (name, master.dtype) == ("weight", torch.float32)
    assert torch.equal(master, exact.weight)
    for size in (256.0, 1.0, 1.0):  # bfloat16 has no 257
        layer(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    assert master.grad.item() == 258
    assert layer.weight.grad is None
    with torch.no_grad():
        master.fill_(1 + 2**-9)
    masters.round()
    assert layer.weight.item() == 1


def test_a_model_that_was_trained_in_bfloat16_is_saved_as_its_masters_are(tmp_path):
    """Matrices rounded to bfloat16, vectors in float32: those of a policy that is trained in float32."""
    write_template(folder := tiny_qwen2(tmp_path / "base"))
    for dtype in ("float32", "bfloat16"):
        policy = trained_in_full(folder, dtype, CPU)
        with torch.no_grad():
            for _, parameter in policy.trainable():
                parameter += 2**-12
        policy.use_trained()
        policy.save(tmp_path / dtype)
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert exact.keys() == rounded.keys()
    assert {tensor.dtype for tensor in rounded.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in exact.items():
        assert torch.equal(tensor, rounded[name]), name
