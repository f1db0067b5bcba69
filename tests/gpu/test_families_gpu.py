"""Families of models on a GPU in bfloat16: sampler and update against float32, no further off than transformers is."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import unwrap
from itertools import product

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise, standard_normal
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import EXPERT_LAYERS, LAYERS, AdapterSettings, EngineSettings, NativeSettings, NoiseSettings
from tests.families import FAMILIES
from tests.gpu.exact import forced
from tests.parity.family_models import NORMS, perturbed, unpacked
from tests.tiny import tiny_family, tiny_gpt_oss
from tests.unit.rollout.test_turns import Counted

DEVICE = torch.device("cuda")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
#: Heads of delta nets whose layers are wide enough for the packed products.
NETS = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
#: Families whose small models have windows; gpt-oss has those of `shape_of`.
WINDOWS = ("mistral-sliding", "phi3", "gemma3", "mixtral")
#: Families whose small models have layers that the packed products take.
PACKED = ["qwen2", "qwen3", "llama", "phi3", "gemma3", "qwen2_moe", "qwen3_moe", "mixtral", "qwen3_5", "qwen3_5_moe"]
#: Shorter and longer than the windows of 24 tokens.
PROMPTS = [[5, 6, 7], [*range(2, 70)], [*range(10, 40)]]
#: transformers' functions that a library replaces where it is installed.
DELTA_FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
PARAMS = SamplingParams(max_tokens=60, count=3, ignore_eos=True)


def shape_of(name):
    """The values of a family's configuration that make its kernels' smallest layers."""
    if name == "gpt_oss":  # widths that are no multiple of 128, as published
        heads = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 24}
        return heads | {"hidden_size": 320, "intermediate_size": 352, "num_local_experts": 16, "num_experts_per_tok": 4}
    if name == "mixtral":
        return SHAPE | {"intermediate_size": 128, "num_local_experts": 16, "num_experts_per_tok": 4}
    if name in ("qwen2_moe", "qwen3_5_moe"):
        width, layers = {"hidden_size": 256, "head_dim": 64}, {"shared_expert_intermediate_size": 256}
        return width | layers | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
    if name == "qwen3_moe":
        return SHAPE | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
    if name != "phi3":
        return SHAPE
    rope = FAMILIES[name].values["rope_parameters"]  # of heads of 16
    return {**SHAPE, "rope_parameters": {**rope, **{key: 4 * rope[key] for key in ("short_factor", "long_factor")}}}


def by_forced(model, samples):
    """Log-probabilities of each completion's drawn tokens, from one forward pass over it alone, in one row."""
    return torch.cat([forced(model, s.prompt, [s.completion.token_ids])[0, s.completion.mask] for s in samples])


def stock_model(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE, dtype).eval()


@contextmanager
def plain_delta_nets():
    """transformers' delta nets in PyTorch, also where a library is installed whose products of float32 are TF32."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in product((modeling_qwen3_5, modeling_qwen3_5_moe), DELTA_FUNCTIONS):
            patch.setattr(module, name, unwrap(getattr(module, name)))
        yield


def drawn(policy, sampler, params=PARAMS):
    """Samples, and the log-probabilities of their drawn tokens by the sampler and by an update."""
    groups = sampler.generate(PROMPTS, params)
    samples = [Sample(p, c, 0.0, 0.0) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    batch = micro_batch(samples, list(range(len(samples))), DEVICE)
    with torch.no_grad():
        packed = logprobs_and_entropy(policy, batch, 1.0)[0]
    sampled = torch.cat([torch.tensor(s.completion.logprobs, device=DEVICE)[s.completion.mask] for s in samples])
    return samples, sampled, packed[batch.mask_NT.bool()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
# The others have no engine.
@pytest.mark.parametrize("name", [name for name in NORMS if name not in ("ministral3", "olmoe", "glm4_moe")])
def test_sampler_and_update_are_as_near_to_float32_as_transformers(tmp_path, name, dtype):
    # In bfloat16 a token near a tie takes other experts, and few such tokens make most of the error of one model.
    seeds = range(6) if (name, dtype) == ("gpt_oss", "bfloat16") else [0]
    errors = torch.cat([errors_of(tmp_path / str(seed), name, dtype, seed) for seed in seeds], dim=1)
    assert_near_float32(errors, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen2", "mistral-sliding", "gemma3", "qwen3_moe", "qwen3_5"])
def test_behind_replies_too(tmp_path, name, dtype):
    """Replies of less than a window to more than a page; with delta nets they take decode steps."""
    turns, lengths = Counted(together=True, longest=80), ((9, 5, 12),) * 3
    params = replace(PARAMS, max_tokens=250, turns=turns, lengths=lengths)
    assert_near_float32(errors_of(tmp_path, name, dtype, 0, params), dtype)


def assert_near_float32(errors, dtype):
    sampled, packed, stock = errors.square().mean(1).sqrt().tolist()
    limit = 1e-4 if dtype == "float32" else 1.25 * stock
    assert sampled < limit
    assert packed < limit


def errors_of(folder, name, dtype, seed, params=PARAMS):
    """Errors [3, drawn tokens] of log-probabilities against float32: the sampler's, an update's and transformers'."""
    if name == "gpt_oss":
        tiny_gpt_oss(folder, seed, **shape_of(name))
    else:
        window = {"sliding_window": 24} if name in WINDOWS else {}
        tiny_family(folder, name, dtype=torch.bfloat16, **shape_of(name), **window)
    policy = load_policy(folder, None, dtype, DEVICE)
    sampler = make_sampler(policy, EngineSettings(), max_sequences=4)  # of nine, so that slots are used again
    assert isinstance(sampler, EngineSampler)
    samples, sampled, packed = drawn(policy, sampler, params)
    with plain_delta_nets():
        exact = by_forced(stock_model(folder, torch.float32), samples)
    stock = by_forced(stock_model(folder, getattr(torch, dtype)), samples)
    return torch.stack([sampled, packed, stock]) - exact


@pytest.mark.parametrize("kernels", ["auto", "portable"])
@pytest.mark.parametrize(
    ("name", "weights", "option"),
    [
        *product(PACKED, ["nvfp4", "mxfp4"], [None]),
        *product(["qwen3_5", "qwen3_5_moe"], ["nvfp4", "mxfp4"], ["packed nets"]),
        ("gpt_oss", "mxfp4", None),
        ("qwen3_moe", "nvfp4", "adapted experts"),
        ("gpt_oss", "mxfp4", "adapted experts"),
    ],
)
def test_packed_weights_with_adapter_and_noise_are_near_those_of_peft(tmp_path, name, weights, option, kernels):
    """Fused layers in the kernels' layouts, in sampler and update, with trained norms and noise on them."""
    nets = option == "packed nets"
    if name == "gpt_oss":
        tiny_gpt_oss(tmp_path / weights, **shape_of(name))
    else:
        shape = shape_of(name) | (NETS if nets else {})
        window = {"sliding_window": 24} if name in WINDOWS else {}
        tiny_family(tmp_path / "bf16", name, dtype=torch.bfloat16, **shape, **window)
        quantize_checkpoint(tmp_path / "bf16", tmp_path / weights, weights, pack_delta_nets=nets)
    experts = EXPERT_LAYERS if option == "adapted experts" else ()
    adapter = AdapterSettings(rank=16, targets=[*LAYERS, *experts])
    policy = perturbed(with_adapter(tmp_path / weights, adapter, "bfloat16", 0, DEVICE))
    policy.save(tmp_path / "adapter")
    dense = unpacked(tmp_path / weights, tmp_path, name)
    sampler = make_sampler(policy, EngineSettings(native=NativeSettings(kernels=kernels)))
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=3).at(2, 10):
        samples, sampled, packed = drawn(policy, sampler)
    peft = partial(noisy_peft, dense, tmp_path / "adapter", NORMS[name])
    exact, stock = (by_forced(peft(dtype), samples) for dtype in (torch.float32, torch.bfloat16))
    limit = 2 * (stock - exact).square().mean().sqrt().item()  # PEFT's adapter is float32, ours bfloat16
    for found in (sampled, packed):
        assert (found - exact).square().mean().sqrt().item() < limit


def noisy_peft(dense, adapter, norms, dtype):
    """The unpacked base with the saved adapter, and the noise of step 2 on its trained norms."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype).to(dtype)
    peft = PeftModel.from_pretrained(model, adapter)
    for layer, block in enumerate(peft.base_model.model.model.layers):
        for role, norm in enumerate(norms):
            weight = block.get_submodule(norm).modules_to_save["default"].weight
            weight.data += (0.1 * standard_normal(3, 2, layer, role, len(weight))).to(dtype)
    return peft.to(DEVICE).eval()
