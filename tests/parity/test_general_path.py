"""Models that no list names, against stock transformers and PEFT: their structure decides how updates compute."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import differences, read_headers
from qerl.models.export import write_dense
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.conftest import in_nightly
from tests.parity.family_models import CPU, PROMPTS, TOKENS, adapted, assert_drawn_by, draw, exact, forced, updated
from tests.tiny import edit_config, tiny_decoder, tiny_family

LATENT = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
ERNIE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "moe_layer_start_index": 1,
    "moe_num_shared_experts": 1,
    "head_dim": 16,
}
GEMMA2 = {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.2}
#: Values of config.json, and whether norms can be trained: padded batches, logits with a factor, a cap or a bias, caps
#: of attention's scores, other mixtures. A small cap bends the logits of random weights.
MODELS = {
    "stablelm": ({}, False),
    "nemotron": ({"head_dim": 16}, False),
    "youtu": (LATENT | {"num_key_value_heads": 4}, True),
    "minicpm3": (LATENT | {"num_key_value_heads": 4, "dim_model_base": 16}, True),
    "granite": ({"logits_scaling": 8.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}, True),
    "cohere2": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, False),
    "gemma2": (GEMMA2, True),
    "vaultgemma": (GEMMA2, True),
    "nanochat": ({}, False),
    "phi": ({}, False),
    # Sigmoids with a correction, groups of experts, a shared one, and a first block without experts.
    "glm4_moe": (GROUPED | {"head_dim": 16}, True),
    "deepseek_v3": (GROUPED | LATENT | {"num_key_value_heads": 4}, True),
    "deepseek_v2": (GROUPED | LATENT | {"num_key_value_heads": 4, "routed_scaling_factor": 2.5}, True),
    "ernie4_5_moe": (ERNIE, True),
    "exaone_moe": (GROUPED | {"head_dim": 16}, True),
}
#: Models whose mechanisms others have, too.
ALIKE = ("nemotron", "minicpm3", "cohere2", "vaultgemma", "nanochat", "deepseek_v3", "exaone_moe")


def written(folder, kind):
    values, norms = MODELS[kind]
    file = tiny_decoder(folder, kind, dtype=torch.float32, **values) / "model.safetensors"
    tensors = load_file(file)
    if (bias := tensors.get("lm_head.bias")) is not None:
        save_file(tensors | {"lm_head.bias": torch.linspace(-1, 1, len(bias))}, file, {"format": "pt"})
    return folder, norms


@pytest.mark.parametrize("kind", [*(kind for kind in MODELS if kind not in ALIKE), *in_nightly(*ALIKE)])
def test_samples_updates_and_gradients_are_those_of_transformers_and_peft(tmp_path, kind):
    """Groups share their prompt in the packed row, and completions of one token have no piece of it."""
    base, norms = written(tmp_path / "base", kind)
    policy = adapted(base, tmp_path / "adapter", rank=2, train_norms=norms)
    # transformers' SDPA, its default, has no cap of scores, and its grouped products of experts no float64.
    eager = {"experts_implementation": "eager"}
    eager |= {"attn_implementation": "eager"} if "attn_logit_softcapping" in MODELS[kind][0] else {}

    def stock():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **eager).eval()
        return PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)

    samples = draw(policy, 20) + draw(policy, 1)
    logprobs = updated(policy, samples)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2))
    (logprobs * weights).sum().backward()

    def compute(model):
        rows = [forced(model, s.prompt, s.completion.token_ids) for s in samples]
        sum((one * row[: len(one)]).sum() for one, row in zip(rows, weights, strict=True)).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {"logprobs": torch.cat(rows).detach(), **gradients}

    expected, bounds = exact(stock, compute)
    trained = dict(policy.trainable())
    assert {"logprobs", *trained} == expected.keys()
    found = {name: parameter.grad for name, parameter in trained.items()}
    drawn = torch.cat([torch.tensor(s.completion.logprobs) for s in samples])
    in_update = torch.cat(
        [row[: len(s.completion.token_ids)].detach() for s, row in zip(samples, logprobs, strict=True)]
    )
    for name, ours in [("logprobs", drawn), ("logprobs", in_update), *found.items()]:
        assert (ours.double() - expected[name]).abs().max() <= bounds[name], name
        assert expected[name].any()
        assert bounds[name] < 2e-3 * expected[name].abs().max(), "the bound would hide an error"


def predict_more(base):
    """Give a mixture uneven corrections and a block of multi-token prediction, after which GLM-4.5's decoder ends."""
    tensors = load_file(base / "model.safetensors")
    [correction] = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors[correction].copy_(torch.linspace(-1, 1, 4).view_as(tensors[correction]))
    edit_config(base, num_nextn_predict_layers=1)
    further = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file(tensors | further, base / "model.safetensors", {"format": "pt"})
    [told] = differences(base, read_headers(base))
    assert told.endswith("has blocks of multi-token prediction, which are left out")
    return correction


@pytest.mark.parametrize("kind", ["phi", "gemma2", "glm4_moe", "ernie4_5_moe"])
def test_packed_models_have_the_logits_of_their_dense_weights(tmp_path, kind):
    """A head with a bias, soft caps, and mixtures with their corrections and without multi-token prediction."""
    base, _ = written(tmp_path / "base", kind)
    correction = predict_more(base) if "moe" in kind else None
    quantize_checkpoint(base, tmp_path / "packed", "nvfp4")
    assert not list(differences(tmp_path / "packed", read_headers(tmp_path / "packed")))
    packed = load_file(tmp_path / "packed/model.safetensors")
    assert (correction in packed) == ("moe" in kind)
    assert "model.layers.2.eh_proj.weight" not in packed
    write_dense(tmp_path / "packed", tmp_path / "dense", torch.float32)
    policy = load_policy(tmp_path / "packed", None, "float32", CPU)
    eager = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, stock(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_the_engine_draws_where_a_block_has_no_experts(tmp_path):
    values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    base = tiny_decoder(tmp_path, "qwen3_moe", dtype=torch.float32, head_dim=16, **values)
    engine = EngineSampler(load_policy(base, None, "float32", CPU), NativeSettings())
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    drawn = engine.generate(PROMPTS, SamplingParams(max_tokens=16, count=2))
    assert_drawn_by(stock, drawn)


def test_dropout_of_an_adapter_is_refused_where_rows_are_not_packed(tmp_path):
    base, norms = written(tmp_path, "stablelm")
    with pytest.raises(ConfigError, match=r"adapter\.dropout needs attention that takes packed rows.*dropout=0"):
        with_adapter(base, AdapterSettings(rank=2, train_norms=norms, dropout=0.1), "float32", 0, CPU)


@pytest.mark.parametrize("kind", ["olmo2", "flex_olmo", "starcoder2"])
def test_a_model_without_such_norms_trains_without_them_and_refuses_noise(tmp_path, kind):
    """OLMo 2 has norms after its layers alone, StarCoder 2 LayerNorms with biases and an MLP of two layers.

    FlexOlmo is OLMo 2 with experts.
    """
    tiny_family(tmp_path, "qwen2", model_type=kind, bos_token_id=0)
    with pytest.raises(ConfigError, match=r"set adapter\.train_norms=false"):
        with_adapter(tmp_path, AdapterSettings(rank=2), "float32", 0, CPU)
    policy = adapted(tmp_path, rank=2, train_norms=False)
    with pytest.raises(ConfigError, match=r"set noise\.schedule=off"):
        Noise(policy.lm, NoiseSettings(schedule="constant"), seed=0)
    samples = draw(policy, 6)
    torch.testing.assert_close(
        updated(policy, samples), torch.tensor([s.completion.logprobs for s in samples]), rtol=1e-4, atol=1e-5
    )
