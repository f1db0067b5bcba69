"""Counts of bytes and FLOPs against transformers, PEFT and PyTorch's own counter, and by hand for 7B."""

import pytest
import torch
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from qerl.checkpoints.shapes import PUBLISHED, QWEN, ModelShape
from qerl.formats.codecs import quantize, stored_bytes
from qerl.kernels.state import DeltaHeads, state_bytes
from qerl.models.policy import lora_config
from qerl.models.structure import structure_of
from qerl.results.speeds import byte_parts, step_flops
from qerl.settings.models import Base
from qerl.settings.run import AdapterSettings
from tests.bits import bits_per_weight
from tests.families import FAMILIES

RANK, SEQUENCES, CONTEXT = 4, 3, 40


def model_of(size: str, device: str = "meta"):
    config = AutoConfig.for_model(**QWEN[size], attn_implementation="eager")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def nbytes(parameters) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def test_bytes_of_bf16_weights_are_those_of_the_model():
    """Tied and untied embeddings; the family tests below have tolerances."""
    for size in ("tiny", "7B"):
        model, parts = model_of(size), byte_parts(Base(size, "bf16"), 0, SEQUENCES, CONTEXT)
        embedding = model.get_input_embeddings().weight
        counted = parts["linear"] + parts["head"] + parts["norms and biases"]
        assert counted == nbytes(model.parameters()) - embedding.nbytes * (not QWEN[size]["tie_word_embeddings"])
        assert (parts["embedding"], parts["adapter"]) == (SEQUENCES * embedding[0].nbytes, 0)


def run_step(model, sequences: int, context: int) -> tuple[DynamicCache, int]:
    """The cache after, and PyTorch's FLOPs of, one token for each sequence with `context` tokens in the cache."""
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros((sequences, context), dtype=torch.long, device=model.device)
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, counter.get_total_flops()


def test_cache_read_and_written_is_that_of_transformers():
    cache, _ = run_step(model_of("tiny"), SEQUENCES, CONTEXT)
    after = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert byte_parts(Base("tiny", "bf16"), 0, SEQUENCES, CONTEXT)["cache"] == after


@pytest.mark.parametrize("rank", [0, RANK])
def test_flops_are_those_that_pytorch_counts(rank):
    model = model_of("tiny", "cpu")
    if rank:
        adapter = AdapterSettings(rank=rank, alpha=rank, train_norms=False)
        get_peft_model(model, lora_config(adapter, structure_of(model.config))[0])
    _, counted = run_step(model, SEQUENCES, CONTEXT)
    rotary = 2 * 16  # the new position times the 16 frequencies of a head is a product of matrices there
    assert counted - rotary == step_flops("tiny", rank, SEQUENCES, CONTEXT + 1)  # the new token attends to itself too


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4"])
def test_bytes_of_packed_weights_are_those_of_the_codec(weights):
    rows, columns = 128, 64  # the largest projection of the tiny shape
    packed = quantize(torch.randn(rows, columns), weights)
    assert stored_bytes(weights, [(rows, columns)]) == bits_per_weight(packed) * rows * columns / 8


def test_7b_by_hand():
    block = 233_046_016  # q, o: 3584^2; k, v: 512 * 3584; gate, up, down: 18944 * 3584
    parts = byte_parts(Base("7B", "nvfp4"), 16, 8, 256)
    assert parts["linear"] == 28 * (block * 4.5 / 8 + 7 * 4)  # 4-bit codes, 8 bits a 16 weights, 7 global scales
    assert parts["head"] == 2 * 152064 * 3584
    assert parts["cache"] == 8 * 257 * 28 * 2 * 4 * 128 * 2
    assert parts["adapter"] == 2 * 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    attention = 28 * 4 * 256 * 28 * 128
    dense = 2 * (28 * block + 152064 * 3584)
    assert step_flops("7B", 0, 8, 256) == 8 * (dense + attention)


@pytest.fixture(params=["mistral", "gemma3", "phi3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gpt_oss"])
def family(request, monkeypatch):
    """The configuration of a small model of another family, which is also the size "published"."""
    config = FAMILIES[request.param].config()
    config._attn_implementation = config._experts_implementation = "eager"  # whose products PyTorch counts
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    return config


def random_model(config):
    with torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_bytes_of_another_family_are_those_of_its_model(family):
    """Up to norms of heads, biases of experts, convolutions and decays; routers count in float32."""
    model, parts = random_model(family), byte_parts(Base("published", "bf16"), 0, 10_000, CONTEXT)
    embedding = 0 if family.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    held = nbytes(model.parameters()) / 2 - embedding / 2  # the model is in float32
    mixture = ModelShape.of(family.to_dict()).mixture
    routers = 2 * family.num_hidden_layers * mixture.experts * family.hidden_size if mixture else 0
    counted = parts["linear"] + parts["head"] + parts["norms and biases"] - routers
    assert 0.93 * held < counted <= held


def test_bytes_of_another_familys_adapter_are_those_of_peft(family):
    adapter = AdapterSettings(rank=RANK, alpha=RANK, train_norms=False)
    peft = get_peft_model(random_model(family), lora_config(adapter, structure_of(family))[0])
    count = sum(parameter.numel() for parameter in peft.parameters() if parameter.requires_grad)
    counted = byte_parts(Base("published", "nvfp4"), RANK, 1, 0)["adapter"] / 2
    # Phi-3 has fewer adapters, since its q, k and v, and its gate and up, are a layer each.
    assert count <= counted if family.model_type == "phi3" else count == counted


def test_flops_of_another_family_are_those_that_pytorch_counts(family):
    """Recurrences and convolutions aren't products of matrices, which are all that PyTorch counts."""
    _, counted = run_step(random_model(family), SEQUENCES, 4)
    nets = ModelShape.of(family.to_dict()).nets
    recurrences = 6 * SEQUENCES * nets.count * nets.value * nets.key_dim * nets.value_dim if nets else 0
    assert step_flops("published", 0, SEQUENCES, 5) - recurrences == pytest.approx(counted, rel=0.01)


def test_experts_count_as_often_as_random_choices_take_them(monkeypatch):
    config = FAMILIES["qwen3_moe"].config(num_experts=8, num_experts_per_tok=2)
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    none, one, three, many = (byte_parts(Base("published", "nvfp4"), 0, n, 0)["linear"] for n in (0, 1, 3, 9999))
    assert one - none == pytest.approx((many - none) * 2 / 8)
    torch.manual_seed(0)
    chosen = torch.rand(20_000, 3, 8).topk(2).indices.flatten(1)
    mean = sum(len(set(row)) for row in chosen.tolist()) / len(chosen)
    assert (three - none) / (many - none) == pytest.approx(mean / 8, rel=0.01)


def test_a_window_bounds_what_attention_reads(monkeypatch):
    config = FAMILIES["gemma3"].config()
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    windowed, window = config.layer_types.count("sliding_attention"), config.sliding_window
    assert windowed
    short, long, longer = (byte_parts(Base("published", "bf16"), 0, 1, n)["cache"] for n in (window - 1, 999, 1999))
    assert longer - long == pytest.approx(short / window * 1000 * (1 - windowed / config.num_hidden_layers))


def test_states_of_delta_nets_are_read_and_written(monkeypatch):
    config = FAMILIES["qwen3_5"].config()
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    heads = DeltaHeads(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, torch.empty(0, config.linear_conv_kernel_dim), *[torch.empty(0)] * 3, 1e-6,
    )  # fmt: skip
    each = state_bytes(heads, torch.bfloat16) * config.layer_types.count("linear_attention")
    assert byte_parts(Base("published", "nvfp4"), 0, 5, 0)["states"] == 2 * 5 * each


def test_bytes_of_packed_delta_nets_are_those_of_the_stored_layers(monkeypatch):
    """All five layers but those of b and a, which stay bfloat16."""
    config = FAMILIES["qwen3_5"].config()
    monkeypatch.setitem(PUBLISHED, "published", config.to_dict())
    layers = dict(random_model(config).named_modules())
    saved = sum(
        2 * layers[name].weight.numel() - stored_bytes("nvfp4", [tuple(layers[name].weight.shape)])
        for name in structure_of(config).packed_nets
    )
    dense, packed = (
        sum(byte_parts(Base("published", "nvfp4", packed_nets=nets), RANK, 2, 9).values()) for nets in (False, True)
    )
    assert dense - packed == saved > 0
