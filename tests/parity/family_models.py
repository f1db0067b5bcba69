"""Small random models of the families of the table, and what tests compute with stock libraries."""

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.models.export import write_dense
from qerl.models.policy import with_adapter
from qerl.rl.noise import standard_normal
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings
from tests.conftest import in_nightly
from tests.families import FAMILIES

CPU = torch.device("cpu")
_LLAMAS = ("input_layernorm", "post_attention_layernorm")
#: The norms whose outputs q, k, v and gate, up read, by family.
NORMS = {name: _LLAMAS for name in FAMILIES if name != "qwen3_next"}
NORMS["gemma3"] = ("input_layernorm", "pre_feedforward_layernorm")
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


def perturbed(policy, scale=0.05, seed=1, chosen=lambda name: True):
    """Change the trained tensors whose names are chosen, as a few steps would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.trainable():
        if chosen(name):
            parameter.data += scale * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return policy


def adapted(base, folder=None, scale=0.05, **adapter):
    """A policy in float32 whose trained tensors have all changed, saved to `folder` if there is one."""
    policy = perturbed(with_adapter(base, AdapterSettings(**{"rank": 4, **adapter}), "float32", 0, CPU), scale)
    if folder:
        policy.save(folder)
    return policy


def layers_of(policy):
    """The last names of the layers with an adapter."""
    return {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in policy.trainable() if ".lora_" in name}


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


def with_peft(base, folder, **settings):
    """A stock model with the adapter of a folder, by stock PEFT."""
    with warnings.catch_warnings():  # of experts PEFT says that it found none of the patterns that it made
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        return PeftModel.from_pretrained(stock(base), folder, **settings).eval()


def code_of_the_card(folder):
    """The code of an adapter's card, which loads it with stock transformers and PEFT, as `model` with `tokenizer`."""
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]


def by_the_card(folder):
    """The names that this code defines."""
    names = {}
    with warnings.catch_warnings():  # as above
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        exec(code_of_the_card(folder), names)
    return names


def add_noise(model, norms=_LLAMAS, sigma=0.1, seed=3, step=2):
    """Add the noise of a step to norms of a stock model, or to their trained copies under PEFT."""
    lm = model.get_base_model() if isinstance(model, PeftModel) else model
    for layer, block in enumerate(lm.model.layers):
        for role, name in enumerate(norms):
            norm = block.get_submodule(name)
            weight = (norm.modules_to_save["default"] if hasattr(norm, "modules_to_save") else norm).weight
            weight.data += sigma * standard_normal(seed, step, layer, role, len(weight))


@torch.no_grad()
def assert_drawn_by(model, groups, near=1e-5, prompts=PROMPTS, temperature=1.0):
    """The log-probabilities of completions are those of a stock model, from one forward pass over each alone."""
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = forced(model, prompt, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-7, atol=near)


def draw(policy, length=12, sampler=EagerSampler):
    """Two completions of each prompt as samples of an update."""
    groups = sampler(policy).generate(PROMPTS, SamplingParams(max_tokens=length, count=2, ignore_eos=True))
    return [Sample(p, c, 0.0, 0.0) for p, group in zip(PROMPTS, groups, strict=True) for c in group]


def updated(policy, samples):
    """The log-probabilities [samples, tokens] that an update computes."""
    return logprobs_and_entropy(policy, micro_batch(samples, list(range(len(samples))), CPU), 1.0)[0]


def assert_updated_as(policy, models, near, rtol=1e-3, atol=None, renamed=dict):
    """The log-probabilities of an update, and the gradient of each trained tensor, are those of stock models.

    `near` bounds the log-probabilities' errors. Those of gradients may be `rtol` of a number and `atol`, by default
    `near`, of the largest one. `renamed` gives a model's gradients the names that they have in the policy.
    """
    samples = draw(policy)
    found = updated(policy, samples)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()
    ours = {part: parameter.grad for part, parameter in policy.trainable()}
    for model in models:
        expected = torch.stack([forced(model, sample.prompt, sample.completion.token_ids) for sample in samples])
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=near)
        (expected * weights).sum().backward()
        gradients = renamed({part: p.grad for part, p in model.named_parameters() if p.requires_grad})
        assert ours.keys() == gradients.keys()
        for part, gradient in gradients.items():
            assert gradient.any(), part
            most = (near if atol is None else atol) * gradient.abs().max().item()
            torch.testing.assert_close(ours[part].double(), gradient.double(), rtol=rtol, atol=most, msg=part)
    return ours


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
