"""Small random models of the families of the table, and what tests compute with stock libraries."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.models.export import write_dense
from tests.conftest import in_nightly

CPU = torch.device("cpu")
#: The norms whose outputs q, k, v and gate, up read, by family.
NORMS = {
    "qwen2": ("input_layernorm", "post_attention_layernorm"),
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "mistral": ("input_layernorm", "post_attention_layernorm"),
    "mistral-sliding": ("input_layernorm", "post_attention_layernorm"),
    "ministral3": ("input_layernorm", "post_attention_layernorm"),
    "phi3": ("input_layernorm", "post_attention_layernorm"),
    "gemma3": ("input_layernorm", "pre_feedforward_layernorm"),
    "qwen2_moe": ("input_layernorm", "post_attention_layernorm"),
    "qwen3_moe": ("input_layernorm", "post_attention_layernorm"),
    "mixtral": ("input_layernorm", "post_attention_layernorm"),
    "olmoe": ("input_layernorm", "post_attention_layernorm"),
    "glm4_moe": ("input_layernorm", "post_attention_layernorm"),
    "qwen3_5": ("input_layernorm", "post_attention_layernorm"),
    "qwen3_5_moe": ("input_layernorm", "post_attention_layernorm"),
    "gpt_oss": ("input_layernorm", "post_attention_layernorm"),
}
#: The packed formats of each family in tests: NVFP4, whose layers share scales by name, and one more.
_IN_NF4 = ("llama", "mistral", "phi3", "qwen2_moe", "olmoe")
PACKED = {name: ("nvfp4", "nf4" if name in _IN_NF4 else "mxfp4") for name in NORMS if name != "gpt_oss"}
#: Shorter and longer than the windows of 8 tokens; two that a delta net pads to one length.
PROMPTS = [[5, 6, 7], list(range(30, 50)), [9], [8, 12]]
TOKENS = torch.tensor([list(range(20, 44)), list(range(50, 74))])
families = pytest.mark.parametrize("name", NORMS)


def some_families(*names):
    """Families with a mechanism of their own; the others in nightly runs."""
    return pytest.mark.parametrize("name", [*names, *in_nightly(*(name for name in NORMS if name not in names))])


def perturbed(policy, scale=0.05):
    """Change all trained tensors, as a few steps would."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trainable():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def dense(bases, name):
    """gpt-oss is published in MXFP4 alone."""
    return bases / name / ("mxfp4" if name == "gpt_oss" else "bf16")


def stock(folder, dtype=torch.float32):
    """MXFP4 of gpt-oss becomes bfloat16, which has all of its values."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model.float() if dtype == torch.float32 else model


def unpacked(base, folder, name):
    """A dense copy of a family's packed checkpoint; gpt-oss's is unpacked by transformers itself."""
    if name == "gpt_oss":
        return base
    write_dense(base, folder / "dense", torch.float32)
    return folder / "dense"


def forced(model, prompt, tokens, temperature=1.0):
    """Log-probabilities [T] of a completion, from one forward pass over it alone."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


#: The resolution of float32, and how many times over the bounds of `exact` allow for it: a float32 pass rounds after
#: each operation, of which a tiny model has some dozens in a row.
EPS, ROUNDINGS = torch.finfo(torch.float32).eps, 16


def exact(make: Callable[[], nn.Module], compute: Callable[[nn.Module], dict]) -> tuple[dict, dict]:
    """What `compute` finds of a model in float64, and how far a float32 computation may be from it, by name.

    The bounds follow from the model's condition and not from a machine: they are `ROUNDINGS` times what rounding all
    weights at random to float32's resolution changes in float64, or the resolution of the values themselves.
    """
    found = compute(make().double())
    bounds = {name: EPS * value.abs().max() for name, value in found.items()}
    for seed in range(3):
        generator, model = torch.Generator().manual_seed(seed), make().double()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + EPS * (2 * noise - 1))
        for name, value in compute(model).items():
            bounds[name] = torch.maximum(bounds[name], (value - found[name]).abs().max())
    return found, {name: ROUNDINGS * bound for name, bound in bounds.items()}
