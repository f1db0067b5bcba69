"""The vectors of the gates, made by code other than this project's.

`python -m tests.vectors` writes tests/fixtures/gates/vectors.safetensors; a test makes them anew and compares.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file

from tests.parity.test_codec_parity import LIBRARY, library_fp4

FILE = Path(__file__).parents[1] / "tests/fixtures/gates/vectors.safetensors"


def vectors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # The heavy tails make the largest and the smallest scales; an outlier of each sign lies in the first rows.
    weight = 0.02 * torch.randn(64, 256, generator=generator) ** 3
    weight[0, 3], weight[1, 200] = 3.0, -2.5
    weight = weight.bfloat16()
    x = torch.randn(8, 256, generator=generator)
    found = {"weight": weight, "x": x}
    for name, (packed, dense) in {**{name: library_fp4(weight, name) for name in LIBRARY}, "nf4": nf4(weight)}.items():
        product = x.double() @ float32(name, packed, dense).double().T
        made = {**packed, "dense": dense, "product": product}
        found |= {f"{name}/{key}": tensor.contiguous().clone() for key, tensor in made.items()}
    return found


def nf4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed = {"weight": codes, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    return packed, bnb.dequantize_4bit(codes, state)


def float32(name: str, packed: dict[str, torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
    """The weight before it is rounded to bfloat16: code times scale."""
    if name == "nf4":
        state = bnb.QuantState.from_dict(
            {key.removeprefix("weight."): value for key, value in packed.items() if key != "weight"},
            torch.device("cpu"),
        )
        state.dtype = torch.float32
        return bnb.dequantize_4bit(packed["weight"], state)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((packed["weight_packed"] & 15, packed["weight_packed"] >> 4), dim=-1).flatten(-2).long()
    values = table[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    scale = packed["weight_scale"]
    scale = (
        2.0 ** (scale.double() - 127) if name == "mxfp4" else scale.double() / packed["weight_global_scale"].double()
    )
    group = values.shape[1] // scale.shape[1]
    return values * scale.repeat_interleave(group, dim=1)


if __name__ == "__main__":
    save_file(vectors(), FILE)
    print(FILE)
