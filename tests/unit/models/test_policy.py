"""Policies: adapters on layers that a run names, trained norms and masters in float32, and files that are saved."""

import json
import os
import stat
from contextlib import contextmanager

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import ADAPTER_CONFIG
from qerl.models.blocks import NoisyRMSNorm
from qerl.models.export import export, merge, write_dense
from qerl.models.policy import Masters, load_policy, trained_in_full, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.value import add_value
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams, refused_by_engine
from qerl.rollout.vllm import norm_weights
from qerl.settings.base import ConfigError
from qerl.settings.run import LAYERS, AdapterSettings, NativeSettings, PPOSettings
from tests.families import LEFT_OUT
from tests.parity.family_models import forced, perturbed
from tests.tiny import tiny_bases, tiny_family, tiny_qwen2, write_template

CPU = torch.device("cpu")
TOKENS = torch.randint(2, 100, (2, 40), generator=torch.Generator().manual_seed(7))
#: Changes of Qwen2's small configuration that make a model of another family.
OTHERS = {
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": LEFT_OUT, "initializer_range": 0.1},
    "starcoder2": {"model_type": "starcoder2", "bos_token_id": 0},
}


def base(folder, name, **changes):
    if name in OTHERS:
        return tiny_family(folder / "base", "qwen2", **OTHERS[name], **changes)
    return tiny_family(folder / "base", name, **changes)


def made(folder, *targets):
    return with_adapter(folder, AdapterSettings(rank=3, targets=targets, train_norms=False), "float32", 0, CPU)


def adapted(policy):
    return {name.partition(".lora_")[0].partition(".layers.")[2].partition(".")[2] for name, _ in policy.trainable()}


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("gpt_neox", ["query_key_value", "dense"], {"attention.query_key_value", "attention.dense"}),
        ("starcoder2", ["c_proj", "q_proj"], {"mlp.c_proj", "self_attn.q_proj"}),
        ("phi3", ["qkv_proj", "down_proj"], {"self_attn.qkv_proj", "mlp.down_proj"}),
        ("qwen2", ["self_attn.v_proj", "up_proj"], {"self_attn.v_proj", "mlp.up_proj"}),
        ("qwen3_5", ["in_proj_qkv", "in_proj_b"], {"linear_attn.in_proj_qkv", "linear_attn.in_proj_b"}),
        ("qwen3_5_moe", ["up_proj", "shared_expert.down_proj", "out_proj"],
         {"mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", "linear_attn.out_proj"}),
    ],
)  # fmt: skip
def test_named_layers_have_adapters_that_stock_peft_loads(tmp_path, name, targets, layers):
    folder = base(tmp_path, name)
    policy = perturbed(made(folder, *targets), 0.1)
    assert adapted(policy) == layers
    policy.save(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(TOKENS).logits
        peft = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        expected = peft(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01
    if refused_by_engine(policy.lm.config) is None:
        params = SamplingParams(max_tokens=16, count=2, ignore_eos=True)
        [group] = EngineSampler(policy, NativeSettings()).generate([[5, 6, 7]], params)
        for completion in group:
            expected = forced(peft, [5, 6, 7], completion.token_ids).detach()
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_the_default_is_every_layer_by_the_names_of_the_model(tmp_path):
    policy = with_adapter(base(tmp_path, "gpt_neox"), AdapterSettings(rank=2, train_norms=False), "float32", 0, CPU)
    every = {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert adapted(policy) == every
    policy.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]


def test_a_stored_adapters_names_have_one_order(tmp_path):
    """A set of seven names has nearly never this order, in another process or when it was loaded."""
    folder = base(tmp_path, "qwen2")
    made(folder, *LAYERS).save(tmp_path / "adapter")
    stored = (tmp_path / "adapter" / ADAPTER_CONFIG).read_bytes()
    assert json.loads(stored)["target_modules"] == sorted(LAYERS)
    load_policy(folder, tmp_path / "adapter", "float32", CPU).save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / ADAPTER_CONFIG).read_bytes())
    assert again == {**json.loads(stored), "inference_mode": True}


@pytest.mark.parametrize(
    ("name", "target", "sentence"),
    [
        ("starcoder2", "c_pro", "has c_pro, and .* have q_proj, .*, c_fc, c_proj; .*; did you mean `c_proj`"),
        ("gpt_neox", "q_proj", "has q_proj, and .* have query_key_value, dense, dense_h_to_4h, dense_4h_to_h; leave"),
        ("qwen2", "proj", "has proj, and the blocks of the model have q_proj"),  # PEFT, too, takes whole names alone
        ("qwen2", "lm_head", "has lm_head, and"),
        ("qwen3_5_moe", "shared_expert_gate", "has shared_expert_gate, and"),
        ("qwen3_moe", "experts.up", "has experts.up, and the experts .* have experts.gate_proj, experts.up_proj, "
         "experts.down_proj; did you mean `experts.up_proj`"),
        ("qwen3_moe", "experts.gate_up_proj", "has experts.gate_up_proj, and the experts of the model have"),
        *(("qwen2", name, "has ") for name in ("q proj", "a..b", ".*", "experts.")),  # no ends of names
    ],
)  # fmt: skip
def test_a_name_that_the_model_lacks_is_one_sentence(tmp_path, name, target, sentence):
    with pytest.raises(ConfigError, match=rf"^adapter\.targets {sentence}"):
        made(base(tmp_path, name), target)


IDS = torch.tensor([[5, 6, 7, 40, 41]])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_bases(tmp_path_factory.mktemp("bases"))


def train(policy):
    """Change a policy as training does: by a step that is small beside a norm and large beside an adapter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "layernorm" in name:
                parameter.fill_(1.001)
            elif parameter.ndim > 1 and "lora" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


@torch.no_grad()
def logprobs(policy):
    with policy.autocast():
        return log_softmax(policy.lm(input_ids=IDS).logits.float(), -1)


def are_kept(found):
    assert {weight.dtype for weight in norm_weights(found).values()} == {torch.float32}
    assert all(torch.equal(weight, torch.full_like(weight, 1.001)) for weight in norm_weights(found).values())


@pytest.mark.parametrize("value", [False, True], ids=["alone", "with a value function"])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_a_saved_policy_is_read_to_the_bit(checkpoints, tmp_path, weights, value):
    trained = train(with_adapter(checkpoints / weights, AdapterSettings(rank=4), "bfloat16", 0, CPU))
    if value:
        add_value(trained, PPOSettings(rank=4))
    trained.save(tmp_path)
    found = load_policy(checkpoints / weights, tmp_path, "bfloat16", CPU)
    are_kept(found)
    assert torch.equal(logprobs(found), logprobs(trained))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_an_exported_base_holds_the_norms_as_they_were_trained(checkpoints, tmp_path, weights):
    trained = train(with_adapter(checkpoints / weights, AdapterSettings(rank=4), "bfloat16", 0, CPU))
    trained.save(tmp_path / "policy")
    export(checkpoints / weights, tmp_path / "policy", tmp_path / "out")
    found = load_policy(tmp_path / "out/base", tmp_path / "out/adapter", "bfloat16", CPU)
    are_kept(found)
    assert torch.equal(logprobs(found), logprobs(trained))


def test_a_base_keeps_norms_that_its_files_hold_in_float32(tmp_path):
    """And rounds all else to the dtype that is asked for."""
    base = tiny_qwen2(tmp_path / "m", dtype=torch.float32)
    stored = load_file(base / "model.safetensors")
    found = load_policy(base, None, "bfloat16", CPU)
    for name, weight in norm_weights(found).items():
        assert torch.equal(weight, stored[name])
    own = {id(norm.weight) for norm in found.lm.modules() if isinstance(norm, NoisyRMSNorm)}
    assert {p.dtype for p in found.lm.parameters() if id(p) not in own} == {torch.bfloat16}


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
    assert {tensor.dtype for tensor in rounded.values()} == {torch.float32, torch.bfloat16}
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0)


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_every_file_has_the_mode_of_the_umask(tmp_path, mask):
    base = tiny_qwen2(tmp_path / "base")
    write_template(base)
    with umask(mask):
        policy = with_adapter(base, AdapterSettings(rank=2), "float32", seed=0, device=CPU)
        policy.save(tmp_path / "adapter")
        trained_in_full(base, "float32", CPU).save(tmp_path / "full")
        for weights in ("nvfp4", "nf4"):
            quantize_checkpoint(base, tmp_path / weights, weights)
        write_dense(tmp_path / "nvfp4", tmp_path / "dense", torch.bfloat16)
        export(base, tmp_path / "adapter", tmp_path / "export")
        merge(base, tmp_path / "adapter", tmp_path / "merged", "bf16")
        modes = {
            path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
            for folder in tmp_path.iterdir()
            if folder != base
            for path in folder.rglob("*.safetensors")
        }
    assert len(modes) == 8
    assert set(modes.values()) == {0o666 & ~mask}, modes
