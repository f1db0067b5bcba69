"""What the structure of a model refuses before a weight is read."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from qerl.checkpoints.files import context_length
from qerl.models.structure import StructureError, rope_types, structure_of
from tests.families import FAMILIES

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
UNKNOWN = {"rope_type": "helical", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "positions", [UNKNOWN, {"full_attention": UNKNOWN, "sliding_attention": {"rope_type": "default"}}]
)
def test_positions_that_transformers_lacks_are_named(positions):
    config = AutoConfig.for_model("qwen2", hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.rope_parameters = positions
    assert "helical" in rope_types(config)
    with pytest.raises(StructureError, match=r"no rotary positions of rope_type='helical'; correct config\.json"):
        structure_of(config)


def sliding(window, kind="gemma3_text"):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(kind, **shape, head_dim=16, vocab_size=64, intermediate_size=64, layer_types=kinds)
    config.sliding_window = window
    return config


def cached_and_not(config, length=10):
    """Log-probabilities of a sequence whose tokens come one by one to transformers' cache, and of one forward pass."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, cache = torch.arange(2, 2 + length)[None], DynamicCache(config=config)
    steps = [model(input_ids=token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, dim=1)]
    return torch.cat(steps, dim=1).log_softmax(-1), model(ids, use_cache=False).logits.log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2])
def test_the_windows_with_which_transformers_cache_is_right_are_those_that_are_supported(window):
    by_token, at_once = cached_and_not(sliding(window))
    if torch.allclose(by_token, at_once, atol=1e-4):
        assert structure_of(sliding(window)).windows == (window, None)
    else:
        with pytest.raises(StructureError, match=f"sliding_window={window} isn't supported.*at least 2 tokens"):
            structure_of(sliding(window))


@torch.no_grad()
@pytest.mark.parametrize("scaling", ["dynamic", "linear"])
def test_a_context_ends_where_transformers_cache_has_other_frequencies_than_one_pass(scaling):
    """Dynamic scaling changes those of all tokens with each further one, so keys in the cache keep older ones."""
    positions = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 2.0}
    config = AutoConfig.for_model("llama", **SMALL, rope_parameters=positions, max_position_embeddings=6)
    config.initializer_range = 0.3
    lengths = range(4, 14)
    same = [length for length in lengths if torch.allclose(*cached_and_not(config, length), atol=1e-4)]
    context = context_length(config.to_dict())
    assert (max(same), context) == ((6, 6) if scaling == "dynamic" else (13, 12))


_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
_HUNYUAN = {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 4, "moe_topk": 2, "intermediate_size": 64}
#: Models of which transformers computes tokens, and the sentence that refuses them.
REFUSED = {
    # Its head reads the hidden states of model.decoder, and packed rows are computed by model.
    "opt": (
        {"ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
        "its logits aren't the product of the last hidden states",
    ),
    # transformers reads the router's weight beside calling it. PEFT adapts stacked experts by the names of shared ones.
    "hunyuan_v1_moe": (_HUNYUAN, r"because model\.layers\.0 has no module that routes tokens to its experts"),
    "granitemoe": (_TWO_OF_FOUR, "because transformers reads its experts as stacks alone"),
    # Noise is drawn in training alone, and samplers would compute another policy.
    "mixtral": (
        {**_TWO_OF_FOUR, "num_key_value_heads": 2, "router_jitter_noise": 0.1},
        r"noise of 0\.1 in model\.layers\.0\.mlp, which updates.*set router_jitter_noise to 0 in config\.json$",
    ),
    "doge": (
        {"intermediate_size": 64},
        r"because model\.layers\.0\.input_residual \[64\] is a parameter of DogeDecoderLayer",
    ),
}


@pytest.mark.parametrize(("kind", "values", "sentence"), [(kind, *rest) for kind, rest in REFUSED.items()])
def test_a_model_that_is_not_handled_is_one_sentence(kind, values, sentence):
    config = AutoConfig.for_model(kind, **SMALL, **values)
    with torch.no_grad():
        assert AutoModelForCausalLM.from_config(config)(torch.arange(2, 12)[None]).logits.isfinite().all()
    with pytest.raises(StructureError, match=sentence):
        structure_of(config)


_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
_LATENT |= {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kind", "values", "packed"),
    [
        ("olmo2", {}, True),
        ("stablelm", {}, False),  # its blocks drop further arguments, so attention isn't told the packing
        ("gemma2", {"head_dim": 16}, False),  # a cap of scores
        ("gemma2", {"head_dim": 16, "attn_logit_softcapping": None}, True),
        # Latent attention as it is published: a part of each key rotates, which values lack.
        ("youtu", {**_LATENT, "v_head_dim": 16}, False),
        ("youtu", {**_LATENT, "v_head_dim": 24}, True),
    ],
)
def test_attention_takes_packed_rows(kind, values, packed):
    config = AutoConfig.for_model(kind, **SMALL, intermediate_size=64, **values)
    assert structure_of(config).takes_packed_rows == packed


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "values", "scale", "cap"),
    [
        ("granite", {"logits_scaling": 5.0}, 0.2, None),
        ("cohere", {"logit_scale": 0.25}, 0.25, None),
        ("minicpm3", {"dim_model_base": 16, "num_key_value_heads": 4}, 0.25, None),
        ("gemma3_text", {"final_logit_softcapping": 0.25}, 4.0, 0.25),
        ("phi", {}, 1.0, None),
        ("olmo2", {}, 1.0, None),
    ],
)
def test_factor_and_cap_of_the_logits_are_those_of_transformers(kind, values, scale, cap):
    config = AutoConfig.for_model(kind, **SMALL, intermediate_size=64, **values)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(2, 12)[None]
    products = scale * model.lm_head(model.model(ids).last_hidden_state)
    torch.testing.assert_close(model(ids).logits, products if cap is None else cap * products.tanh())
    assert structure_of(config).logit_scale == pytest.approx(scale)
    assert structure_of(config).logit_cap == cap


def test_sinks_with_a_soft_cap_are_refused(monkeypatch):
    """No model of transformers has both."""
    forward = GptOssAttention.forward
    monkeypatch.setattr(GptOssAttention, "forward", lambda *args, **settings: forward(*args, softcap=50.0, **settings))
    with pytest.raises(StructureError, match=r"model\.layers\.0 has sinks and a soft cap"):
        structure_of(FAMILIES["gpt_oss"].config(vocab_size=103))  # structures are kept by configuration


def test_adapters_of_blocks_without_experts_are_those_that_peft_loads():
    """Stock PEFT takes gate_proj of other kinds than Qwen2-MoE for that of experts, also as `mlp.gate_proj`."""
    config = FAMILIES["qwen3_moe"].config(mlp_only_layers=[0])
    structure = structure_of(config)
    assert structure.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert [sum(f".layers.{i}." in name for name in structure.packed) for i in range(2)] == [7, 4 + 3 * 4]
    assert {name.split(".")[1] for name in structure.experts} == {"experts"}
    shared = structure_of(FAMILIES["qwen2_moe"].config(mlp_only_layers=[0])).targets
    assert {"mlp.gate_proj", "shared_expert.gate_proj"} <= set(shared)


@torch.no_grad()
def test_delta_nets_alone_are_refused():
    """Whose tokens transformers' cache doesn't count."""
    config = FAMILIES["qwen3_5"].config(layer_types=["linear_attention"] * 2)
    with pytest.raises(ValueError, match="LinearAttention layers"):
        cached_and_not(config)
    with pytest.raises(StructureError, match="no block has attention"):
        structure_of(config)


@pytest.mark.parametrize(
    ("kind", "keys"), [("starcoder2", ["residual_dropout", "embedding_dropout"]), ("seed_oss", ["residual_dropout"])]
)
def test_dropout_by_a_function_is_refused_as_that_of_a_module(kind, keys):
    """With values of the hub's config.json. transformers' model then computes other numbers in training."""
    values = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(kind, **values, **dict.fromkeys(keys, 0.1))
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(2, 12)[None]
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(
        StructureError, match=rf"dropout of 0.1 outside of .*; set .*{' and '.join(keys)} to 0 in config"
    ):
        structure_of(config)
    structure_of(AutoConfig.for_model(kind, **values, **dict.fromkeys(keys, 0.0), attention_dropout=0.1))


def test_the_dropout_of_attention_is_that_of_config_json():
    values = {**SMALL, "intermediate_size": 64, "attention_dropout": 0.1}
    assert structure_of(AutoConfig.for_model("olmo2", **values)).attention_dropout == 0.1
    assert structure_of(AutoConfig.for_model("glm", **{**values, "attention_dropout": None})).attention_dropout == 0
    with pytest.raises(StructureError, match=r"dropout of 0\.1 in model\.layers\.0\.self_attn\.attention_dropout"):
        structure_of(AutoConfig.for_model("persimmon", **values))
    assert (
        structure_of(AutoConfig.for_model("persimmon", **{**values, "attention_dropout": 0.0})).attention_dropout == 0
    )


def test_a_model_that_drops_layers_is_refused():
    config = AutoConfig.for_model("biogpt", **SMALL, intermediate_size=64, hidden_dropout_prob=0.0, layerdrop=0.5)
    config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).train(), torch.arange(2, 12)[None]
    assert len({float(model(ids).logits.detach().sum()) for _ in range(9)}) > 1
    with pytest.raises(StructureError, match=r"dropout of 0\.5 in biogpt,"):
        structure_of(config)
    config.layerdrop = 0.0
    structure_of(config)
