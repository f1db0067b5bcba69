"""The random static error against the error of rounding itself."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qerl.checkpoints.files import read_headers
from qerl.formats.codecs import dequantize
from qerl.models.loading import read_packed
from qerl.models.policy import load_policy
from qerl.models.quantize import quantize_checkpoint
from qerl.settings.models import RandomErrorSettings
from tests.tiny import tiny_qwen2

GROUP = {"nvfp4": 16, "nf4": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    tiny_qwen2(folder / "bf16")
    return folder


def errors(folder, of, seed=3):
    """The random error of each linear layer and that of rounding, as float32."""
    name = f"random-{of}-{seed}"
    if not (folder / name).exists():
        quantize_checkpoint(folder / "bf16", folder / name, "bf16", error=RandomErrorSettings(of=of, seed=seed))
    if not (folder / of).exists():
        quantize_checkpoint(folder / "bf16", folder / of, of)
    before, after = (load_file(folder / base / "model.safetensors") for base in ("bf16", name))
    assert before.keys() == after.keys()
    rounded = {layer: dequantize(packed, torch.float32) for layer, packed in read_packed(read_headers(folder / of), of)}
    for tensor in before.keys() - {f"{layer}.weight" for layer in rounded}:
        assert torch.equal(before[tensor].bfloat16(), after[tensor])
    dense = {layer: before[f"{layer}.weight"].bfloat16().float() for layer in rounded}
    return {layer: (after[f"{layer}.weight"].float() - dense[layer], rounded[layer] - dense[layer]) for layer in dense}


@pytest.mark.parametrize("of", ["nvfp4", "nf4"])
def test_its_variance_is_that_of_rounding_in_each_group(folder, of):
    ratios, products = [], []
    for drawn, rounding in errors(folder, of).values():
        one, other = (error.unflatten(-1, (-1, GROUP[of])).square().mean(-1) for error in (drawn, rounding))
        ratios.append((one / other)[other > 0])
        products.append((drawn * rounding).mean() / (drawn.std() * rounding.std()))
    ratios = torch.cat([ratio.flatten() for ratio in ratios])
    # A mean square of n normal draws varies by sqrt(2 / n) of its expectation; bf16 adds a little.
    assert ratios.mean().item() == pytest.approx(1, abs=0.02)
    assert ratios.std().item() == pytest.approx((2 / GROUP[of]) ** 0.5, rel=0.15)
    assert abs(np.mean(products)) < 0.02


def test_the_seed_decides_and_layers_differ(folder):
    first, second = errors(folder, "nvfp4", 3), errors(folder, "nvfp4", 4)
    again = quantize_checkpoint(folder / "bf16", folder / "again", "bf16", error=RandomErrorSettings(seed=3))
    assert load_file(folder / "again/model.safetensors").keys()
    for layer, (drawn, _) in first.items():
        assert abs(np.corrcoef(drawn.flatten(), second[layer][0].flatten())[0, 1]) < 0.1
    same = load_file(folder / "again/model.safetensors"), load_file(folder / "random-nvfp4-3/model.safetensors")
    assert all(torch.equal(tensor, same[1][name]) for name, tensor in same[0].items())
    assert (again["method"], again["random_error"]) == ("random", {"of": "nvfp4", "variance": 1.0, "seed": 3})


def test_a_variance_scales_the_same_draw(folder):
    """Four times the variance is twice the error, up to the rounding to bfloat16."""
    drawn = {layer: error for layer, (error, _) in errors(folder, "nvfp4", 3).items()}
    error = RandomErrorSettings(variance=4.0, seed=3)
    quantize_checkpoint(folder / "bf16", folder / "larger", "bf16", error=error)
    before, after = (load_file(folder / base / "model.safetensors") for base in ("bf16", "larger"))
    for layer, one in drawn.items():
        dense = before[f"{layer}.weight"].bfloat16().float()
        larger = after[f"{layer}.weight"].float() - dense
        torch.testing.assert_close(larger, 2 * one, rtol=0, atol=3 * 2**-8 * dense.abs().max().item())
        assert (larger.std() / one.std()).item() == pytest.approx(2, rel=0.01)


def test_the_report_has_its_size_as_that_of_rounding(folder):
    random = quantize_checkpoint(folder / "bf16", folder / "r", "bf16", error=RandomErrorSettings(seed=0))
    rounded = quantize_checkpoint(folder / "bf16", folder / "q", "nvfp4")
    assert random["relative_error"] == pytest.approx(rounded["relative_error"], rel=0.05)
    assert random["bits_per_weight"] == 16


def test_the_checkpoint_loads_as_a_dense_one(folder):
    errors(folder, "nvfp4")
    assert load_policy(folder / "random-nvfp4-3", None, "float32").lm.dtype == torch.float32
