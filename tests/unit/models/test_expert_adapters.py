"""LoRA on the experts of a mixture, and on shared ones, against stock PEFT, which stacks it as transformers does."""

import json
from functools import partial
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import ADAPTER, ADAPTER_CONFIG, CheckpointError
from qerl.models.experts import adapted_experts
from qerl.models.export import export, write_dense, write_merged
from qerl.models.linear import PackedLinear
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.conftest import in_nightly
from tests.parity.family_models import (
    PROMPTS,
    add_noise,
    assert_drawn_by,
    assert_updated_as,
    by_the_card,
    perturbed,
    stock,
    with_peft,
)
from tests.tiny import tiny_family, tiny_gpt_oss, tiny_qwen2

CPU = torch.device("cpu")
EXPERTS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
#: Attention with experts, experts alone, and one projection of them.
TARGETS = (["q_proj", "o_proj", *EXPERTS], EXPERTS, ["v_proj", "experts.down_proj"])
TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))
#: What stock transformers reads in the place of a base.
UNPACKED = {"bf16": "bf16", "nvfp4": "dense", "gpt_oss": "gpt_oss"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapted")
    tiny_family(root / "bf16", "qwen3_moe", dtype=torch.bfloat16)
    for weights in ("nvfp4", "mxfp4", "nf4"):
        quantize_checkpoint(root / "bf16", root / weights, weights)
    write_dense(root / "nvfp4", root / "dense", torch.float32)
    tiny_gpt_oss(root / "gpt_oss")  # which transformers unpacks itself
    return root


def made(base, targets=TARGETS[0], **settings):
    """A policy whose trained tensors all differ from those of a fresh adapter."""
    adapter = AdapterSettings(rank=3, alpha=12, targets=list(targets), **settings)
    return perturbed(with_adapter(base, adapter, "float32", 0, CPU))


def of_stacks(gradients, both=("gate_proj", "up_proj")):
    """Gradients of PEFT's stacks by the names that ours have: gate and up share one, whose B is block-diagonal."""
    found = {}
    for name, grad in gradients.items():
        block, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = grad
            continue
        fused, side = rest.startswith("base_layer."), rest.removeprefix("base_layer.")[:6]
        parts = both if fused else ("down_proj",)
        rank = 3 * len(parts)
        if side == "lora_A":
            halves = grad.view(-1, rank, grad.shape[1]).split(3, 1)
        else:
            rows = grad.view(len(grad), rank, -1).permute(2, 0, 1).chunk(len(parts), 1)
            halves = [part[..., 3 * place : 3 * place + 3] for place, part in enumerate(rows)]
        for part, half in zip(parts, halves, strict=True):
            found[f"{block}.experts.{side}.default.{part}"] = half
    return found


@pytest.mark.parametrize(
    ("base", "targets"),
    [
        *(("nvfp4", TARGETS[0]), ("nvfp4", TARGETS[2]), ("gpt_oss", TARGETS[0])),
        *in_nightly(("nvfp4", TARGETS[1]), ("gpt_oss", TARGETS[1]), ("gpt_oss", TARGETS[2])),
    ],
)
def test_updates_and_the_saved_adapter_are_those_of_stock_peft(bases, tmp_path, base, targets):
    """Log-probabilities, and the gradient of every A, B and norm, within 1e-4 of their greatest values."""
    policy = made(bases / base, targets)
    layers = [module for module in policy.lm.modules() if isinstance(module, PackedLinear)]
    policy.save(tmp_path / "adapter")
    peft = with_peft(bases / UNPACKED[base], tmp_path / "adapter", is_trainable=True)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, peft(TOKENS).logits, rtol=1e-4, atol=1e-5)
    both = ("gate_up_proj",) if base == "gpt_oss" else ("gate_proj", "up_proj")
    ours = assert_updated_as(policy, [peft], 1e-5, rtol=0, atol=1e-4, renamed=partial(of_stacks, both=both))
    asked = len(targets) if base == "nvfp4" else len([target for target in targets if target != "experts.up_proj"])
    assert sum(".lora_" in part for part in ours) == 2 * 2 * asked
    assert all(layer._dense is None for layer in layers if not layer.keepable)


@pytest.mark.parametrize(
    ("weights", "targets"),
    [
        *zip(("bf16", "nvfp4", "gpt_oss"), TARGETS, strict=True),
        *in_nightly(*((weights, targets) for weights in ("nf4", "bf16", "nvfp4", "gpt_oss") for targets in TARGETS)),
    ],
)
def test_a_stored_adapter_is_loaded_and_saved_as_it_was(bases, tmp_path, weights, targets):
    policy = made(bases / weights, targets)
    policy.save(tmp_path / "adapter")
    again = load_policy(bases / weights, tmp_path / "adapter", "float32", CPU)
    assert not list(again.trainable())
    with torch.no_grad():
        assert torch.equal(again.lm(TOKENS).logits, policy.lm(TOKENS).logits)
        with again.reference(), policy.reference():
            assert torch.equal(again.lm(TOKENS).logits, policy.lm(TOKENS).logits)
            base = load_policy(bases / weights, None, "float32", CPU)
            torch.testing.assert_close(again.lm(TOKENS).logits, base.lm(TOKENS).logits)
    again.save(tmp_path / "again")
    for file in (ADAPTER, ADAPTER_CONFIG):
        assert (tmp_path / "again" / file).exists()
    first, second = (load_file(tmp_path / part / ADAPTER) for part in ("adapter", "again"))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("weights", "targets"),
    [
        *(("nvfp4", TARGETS[0]), ("nf4", ["q_proj"]), ("gpt_oss", TARGETS[0])),
        *in_nightly(*product(("bf16", "nvfp4", "mxfp4", "nf4", "gpt_oss"), (TARGETS[0], ["q_proj"]))),
    ],
)
def test_the_code_of_the_card_gives_the_policy(bases, tmp_path, monkeypatch, weights, targets):
    policy = made(bases / weights, targets)
    policy.save(tmp_path)
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        found = by_the_card(tmp_path)["model"](TOKENS).logits
        torch.testing.assert_close(found, policy.lm(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_is_drawn_as_pefts(bases):
    """A's values are uniform up to 1 / sqrt(in)."""
    policy = with_adapter(bases / "nvfp4", AdapterSettings(rank=8, targets=EXPERTS), "float32", 0, CPU)
    base = load_policy(bases / "nvfp4", None, "float32", CPU)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, base.lm(TOKENS).logits)
    for experts in adapted_experts(policy.lm).values():
        a, b = experts.adapter("A", "up_proj"), experts.adapter("B", "up_proj")
        assert 0.12 < a.abs().max() <= 64**-0.5
        assert a.std().item() == pytest.approx((3 * 64) ** -0.5, rel=0.05)
        assert not b.any()
        assert a.dtype == b.dtype == torch.float32


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "gpt_oss"])
def test_both_samplers_draw_as_peft_does_after_a_change_and_with_noise(bases, tmp_path, weights):
    """An update in place reaches the engine's copies, and trained norms and noise have their roles."""
    policy = made(bases / weights)
    samplers = EngineSampler(policy, NativeSettings()), EagerSampler(policy)
    params = SamplingParams(max_tokens=16, count=2, ignore_eos=True)
    samplers[0].generate(PROMPTS, params)
    perturbed(policy, 0.02, seed=3)
    policy.save(tmp_path / "adapter")
    peft = with_peft(bases / UNPACKED[weights], tmp_path / "adapter")
    for sampler in samplers:
        assert_drawn_by(peft, sampler.generate(PROMPTS, params))
    add_noise(peft)
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=3).at(2, 10):
        for sampler in samplers:
            assert_drawn_by(peft, sampler.generate(PROMPTS, params))


def test_an_adapter_of_experts_is_exported_and_merged(bases, tmp_path):
    """That of gpt-oss is in PEFT's layout of stacks, and isn't merged."""
    for weights in ("nvfp4", "gpt_oss"):
        policy, folder = made(bases / weights), tmp_path / weights
        policy.save(folder / "adapter")
        export(bases / weights, folder / "adapter", folder / "out")
        base = folder / "out/base"
        if weights == "nvfp4":
            write_dense(base, base := folder / "base", torch.float32)
        found = {"exported": with_peft(base, folder / "out/adapter")}
        if weights == "nvfp4":
            write_merged(bases / weights, folder / "adapter", folder / "merged", torch.float32)
            found["merged"] = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
        with torch.no_grad():
            for model in found.values():
                torch.testing.assert_close(model(TOKENS).logits, policy.lm(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mlp.experts.2.up_proj.lora_B", r"^the adapter needs .* \[64, 3\], and .* lacks it; take"),
        ("self_attn.q_proj.lora_A", r"lacks .*q_proj\.lora_A.*; save it again"),
    ],
)
def test_a_file_without_one_of_the_matrices_is_refused(bases, tmp_path, name, sentence):
    made(bases / "nvfp4").save(tmp_path)
    stored = load_file(tmp_path / ADAPTER)
    del stored[f"base_model.model.model.layers.1.{name}.weight"]
    save_file(stored, tmp_path / ADAPTER)
    with pytest.raises(CheckpointError, match=sentence):
        load_policy(bases / "nvfp4", tmp_path, "float32", CPU)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"target_parameters": ["experts.down_proj"], "target_modules": ["q_proj"]},
            "has target_parameters, and .*take",
        ),
        ({"use_rslora": True}, "has use_rslora=True, and experts have plain LoRA"),
        ({"target_modules": r".*\.(q_proj|o_proj|gate_proj|up_proj|down_proj)"}, "which target_modules .* name; list"),
        ({"target_modules": ["q_proj", "gate_proj", "up_proj"]}, r"holds .*\.0\.down_proj.*, which target_modules"),
    ],
)
def test_other_adapters_of_experts_are_refused(bases, tmp_path, changes, sentence):
    made(bases / "nvfp4").save(tmp_path)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=sentence):
        load_policy(bases / "nvfp4", tmp_path, "float32", CPU)


def test_what_stock_peft_would_not_load_is_refused(bases, tmp_path):
    tiny_qwen2(tmp_path / "qwen2")
    with pytest.raises(ConfigError, match=r"experts\.gate_proj, .*of experts of qwen3_moe, gpt_oss, not of 'qwen2'"):
        with_adapter(tmp_path / "qwen2", AdapterSettings(targets=["q_proj", *EXPERTS]), "float32", 0, CPU)
    with pytest.raises(ConfigError, match=r"has up_proj, and .*; experts\.up_proj means that of experts"):
        with_adapter(bases / "bf16", AdapterSettings(targets=["q_proj", "up_proj"]), "float32", 0, CPU)
    with pytest.raises(ValueError, match=r"one of experts\.gate_proj and experts\.up_proj.*name both"):
        AdapterSettings(targets=["experts.up_proj"])
    with pytest.raises(ValueError, match=r"dropout=0\.1 isn't possible with experts"):
        AdapterSettings(targets=EXPERTS, dropout=0.1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny_family(tmp_path_factory.mktemp("shared"), "qwen3_5_moe", dtype=torch.bfloat16)


def by_peft(hybrid, folder, targets):
    """An adapter as stock PEFT makes and saves it, on the stock model, with B that isn't 0."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=targets, init_lora_weights=False)
    peft = get_peft_model(stock(hybrid), config)
    peft.save_pretrained(folder)
    return peft.eval()


@pytest.mark.parametrize(
    "targets",
    [["gate_proj", "up_proj", "down_proj", "q_proj"], ["shared_expert.up_proj"], ["up_proj", "shared_expert_gate"]],
)
def test_an_adapter_of_stock_peft_is_that_of_the_shared_expert(hybrid, tmp_path, targets):
    peft = by_peft(hybrid, tmp_path, targets)
    policy = load_policy(hybrid, tmp_path, "float32", CPU)
    adapted = {name for name, _ in policy.peft.named_parameters() if ".lora_" in name}
    assert adapted == {name for name, _ in peft.named_parameters() if ".lora_" in name}
    drawn = EngineSampler(policy, NativeSettings()).generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    assert_drawn_by(peft, drawn, near=1e-4)
    with torch.no_grad():
        expected, plain = peft(TOKENS).logits, stock(hybrid)(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01


def test_adapters_of_experts_beside_a_shared_one_are_refused(hybrid, tmp_path):
    asked = AdapterSettings(targets=["q_proj", "experts.down_proj"])
    with pytest.raises(
        ConfigError, match=r"experts\.down_proj, and .* of qwen3_moe, gpt_oss, not of 'qwen3_5_moe_text'"
    ):
        with_adapter(hybrid, asked, "float32", 0, CPU)
    by_peft(hybrid, tmp_path, ["q_proj"])
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    for changes in ({"target_parameters": ["experts.down_proj"]}, {"target_modules": r".*\.up_proj"}):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=f"has {next(iter(changes))}.*, and experts beside a shared one"):
            load_policy(hybrid, tmp_path, "float32", CPU)
