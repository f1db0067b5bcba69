"""The memory model against measured peaks of GRPO steps on an H200 and an H100, from 1.5B to 32B, and of mixtures."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qerl.checkpoints.shapes import ModelShape, shape_of
from qerl.doctor import candidate, diagnose
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import PAGE, DeltaHeads, DeltaStates
from qerl.memory_model import (
    CONTEXT,
    StepSettings,
    cache_bytes,
    kept_of_experts,
    net_kept_bytes,
    runs_that_fit,
    step_memory,
    that_fit,
    weight_bytes,
)
from qerl.models.experts import AdaptedExperts, GroupedAdapters
from qerl.models.policy import with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.models.structure import empty_model
from qerl.results.schema import OK, read
from qerl.results.speeds import GrpoStepResult
from qerl.rl.passes import saved_for_backward
from qerl.rollout.decoder import Decoder
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.families import FAMILIES
from tests.tiny import tiny_decoder, tiny_family, tiny_gpt_oss

#: Bytes of a GPU's memory, as PyTorch reports them.
MEMORY = {"h200": 139.8 * 2**30, "h100": 79.1 * 2**30}
SAMPLES = Path(__file__).parents[3] / "results/reference"
RESULTS = {
    f"{machine}/{file.stem}": read(GrpoStepResult, file)
    for machine, folder in (("h200", "cards"), *product(("h200", "h100"), ("shapes", "peers", "families")))
    for file in sorted((SAMPLES / machine / folder).glob("step-qerl-*.json"))
}
#: The model knows no completions without a gradient.
MEASURED = {
    name: result
    for name, result in RESULTS.items()
    if result.status == OK and not result.work.equal_groups and not result.work.median
}
#: Measured before an engine gave back a cache that had all the memory it may use, so its update had the cache too.
CACHE_KEPT = "h200/step-qerl-32B-nvfp4-r16-16x8-128x1024-recompute-80gb"
OUT_OF_MEMORY = {
    "h200/step-qerl-7B-nvfp4-r16-16x8-128x1024-recompute-12gb": "tight",
    "h200/step-qerl-14B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-14B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-1x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-2x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-1x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-2x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h100/step-qerl-7B-bf16-r16-2x8-256x2048-no-recompute": "tight",
    "h100/step-qerl-7B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h100/step-qerl-7B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
}


def model_of(result):
    """The model's answer to what a measurement did; a cap doesn't count CUDA's context."""
    work, settings = result.work, result.settings
    asked = StepSettings(
        weights=work.weights,
        rank=work.rank,
        prompts=work.prompts,
        group=work.group_size,
        prompt_tokens=work.prompt,
        max_tokens=work.tokens,
        recompute={"true": True, "false": False}.get(recompute_of(result), "auto"),
        micro_batch_tokens=settings.micro_batch_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        sleep=settings.sleep,
    )
    gpu = MEMORY["h100" if "H100" in result.provenance.machine.label else "h200"]
    capacity = gpu if settings.memory_gb is None else settings.memory_gb * 1e9 + CONTEXT
    return step_memory(shape_of(work.size).with_packed_nets(work.base.packed_nets), asked, capacity)


def recompute_of(result):
    """Which blocks a step recomputed, as text."""
    return str(result.settings.recompute).lower()


def test_the_measurements_are_there():
    others = {"qwen3-30b-a3b", "qwen3.5-27b", "gpt-oss-20b", "mistral-7b"}
    assert {result.work.size for result in MEASURED.values()} == {"1.5B", "3B", "7B", "8B", "14B", "32B"} | others
    assert set(map(recompute_of, MEASURED.values())) == {"auto", "true", "false"}
    assert len(MEASURED) == 141  # docs/doctor.md states the number


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_within_ten_percent_of_measured_ones(name):
    result, memory = MEASURED[name], model_of(MEASURED[name])
    peaks = [[getattr(step, f"{part}_peak_bytes") for step in result.steps] for part in ("rollout", "update")]
    assert memory.rollout_peak == pytest.approx(max(peaks[0]), rel=0.1)
    kept = result.memory.kv_cache_bytes if name == CACHE_KEPT else 0
    assert memory.update_peak == pytest.approx(max(peaks[1]) - kept, rel=0.1)
    assert memory.verdict in ("fits", "tight")


@pytest.mark.parametrize("name", MEASURED)
def test_parts_are_the_measured_ones(name):
    measured, memory = MEASURED[name].memory, model_of(MEASURED[name])
    shape = shape_of(MEASURED[name].work.size)
    # The kernels have experts' biases in float32, too, which aren't among the policy's tensors.
    biased = shape.mixture.experts if shape.mixture and shape.mixture.biased else 0
    biases = 4 * shape.layers * biased * sum(rows for rows, _ in shape.expert_linears)
    assert memory.weights - biases == pytest.approx(measured.parts["weights"], rel=1e-3)
    for part in ("adapter", "gradients", "optimizer"):
        assert getattr(memory, part) == measured.parts[part]
    # A cache that was released isn't there at the update's peak, so that the sampler's own size counts.
    given_up = MEASURED[name].given_up
    cache = measured.kv_cache_bytes if given_up is None else given_up.kv_cache_bytes
    capped = MEASURED[name].settings.memory_gb is not None
    assert memory.kv_cache == pytest.approx(cache, rel=0.02 if capped else 0)


def test_no_step_that_ran_out_of_memory_is_left_out():
    assert {name for name, result in RESULTS.items() if result.status != OK} == set(OUT_OF_MEMORY)


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_a_step_that_ran_out_of_memory_does_not_fit_or_is_tight(name):
    assert model_of(RESULTS[name]).verdict == OUT_OF_MEMORY[name]


ASKED = StepSettings("nvfp4", 16, 16, 8, 128, 1024, "auto")
SEVEN = shape_of("7B")


def test_a_smaller_cache_that_sleeps_makes_room_on_a_small_gpu():
    tight = replace(ASKED, micro_batch_tokens=4 * 1152)
    small = replace(tight, kv_cache_gib=1.75, sleep=True)
    ends = [step_memory(SEVEN, asked, 12e9 + CONTEXT) for asked in (tight, small, replace(small, sleep=False))]
    assert [memory.verdict for memory in ends[:2]] == ["tight", "fits"]
    assert ends[1].kv_cache == 1.75 * 2**30 < ends[0].kv_cache
    assert [memory.released for memory in ends] == [True, True, False]  # a set cache is kept
    assert ends[2].least - ends[2].resident >= ends[2].kv_cache + ends[2].graphs


def test_a_cache_in_fp8_has_a_byte_an_element_and_four_a_head():
    half, fp8 = (step_memory(SEVEN, replace(ASKED, kv_cache_dtype=dtype), 141e9) for dtype in ("auto", "fp8"))
    assert half.kv_cache / fp8.kv_cache == 2 * 128 / (128 + 4)
    assert half.resident == fp8.resident
    limited = [replace(ASKED, kv_cache_gib=1, kv_cache_dtype=dtype) for dtype in ("auto", "fp8")]
    assert len({step_memory(SEVEN, one, 141e9).kv_cache for one in limited}) == 1


def test_slower_settings_are_found_that_fit():
    whole = replace(ASKED, micro_batch_tokens=4 * 8312)  # four groups
    found = {gb: that_fit(SEVEN, whole, gb * 1e9 + CONTEXT) for gb in (7, 12, 24, 141)}
    assert found[7] is None  # weights alone take 5.9 GB
    assert found[141] == whole
    assert found[24] == replace(whole, micro_batch_tokens=8312)
    small = found[12]
    assert (small.sleep, small.micro_batch_tokens) == (True, 8312)
    for more, verdict in ((0, "fits"), (0.25, "tight")):
        cached = replace(small, kv_cache_gib=small.kv_cache_gib + more)
        assert step_memory(SEVEN, cached, 12e9 + CONTEXT).verdict == verdict


def test_runs_side_by_side_share_the_base_and_nothing_else():
    alone, four = (step_memory(SEVEN, replace(ASKED, runs=n), 1e12) for n in (1, 4))
    assert four.weights == alone.weights
    assert four.activations == alone.activations  # they update one after another
    for part in ("adapter", "gradients", "optimizer", "adapter_copies"):
        assert getattr(four, part) == 4 * getattr(alone, part)
    # The cache is that of one run with the sequences of all.
    assert four.kv_cache == step_memory(SEVEN, replace(ASKED, prompts=4 * ASKED.prompts), 1e12).kv_cache
    most = runs_that_fit(SEVEN, replace(ASKED, runs=64), 24e9)
    assert 0 < most < 64
    fits = [step_memory(SEVEN, replace(ASKED, runs=n), 24e9).verdict == "fits" for n in (most, most + 1)]
    assert fits == [True, False]


def test_a_head_that_config_json_does_not_say_is_tied_counts_once(tmp_path):
    """Gemma's files leave it to transformers' class."""
    folder = tiny_decoder(tmp_path, "gemma", head_dim=16)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    numbers = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert weight_bytes(candidate(str(folder), "bf16").shape, "bf16") == 2 * numbers + 2 * 4 * 64 - 2 * 64


# The memory model of adapters of experts against a policy's own tensors.


EXPERTS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_adapter_and_the_samplers_copies_have_the_bytes_of_their_tensors(tmp_path, name):
    folder = tmp_path / "packed"
    if name == "gpt_oss":
        tiny_gpt_oss(folder)
    else:
        quantize_checkpoint(tiny_family(tmp_path / "bf16", name, dtype=torch.bfloat16), folder, "nvfp4")
    adapter = AdapterSettings(rank=16, targets=[*ATTENTION, *EXPERTS])
    policy = with_adapter(folder, adapter, "bfloat16", 0, torch.device("cpu"))
    asked = candidate(str(folder), None)
    settings = StepSettings(asked.weights, 16, 2, 2, 16, 16, recompute="auto", experts=True)
    memory, without = (diagnose(asked, one).memory for one in (settings, replace(settings, experts=False)))
    sizes = {name: parameter.nbytes for name, parameter in policy.trainable() if ".lora_" in name}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert (memory.adapter, without.adapter) == (sum(sizes.values()), sum(sizes.values()) - of_experts)
    copies = [one for one in Decoder([policy], NativeSettings().kernels).linears if isinstance(one, GroupedAdapters)]
    copied = sum(tensor.nbytes for one in copies for tensor in (one.down, one.up))
    assert memory.adapter_copies - without.adapter_copies == copied
    stacks, numbers = sum(".experts." in name for name in sizes), of_experts // 4
    # Two bytes a number, two float32 scales a block of 256, and the codes' two tables of each tensor.
    assert memory.optimizer - without.optimizer == 2 * numbers + 2 * 4 * numbers // 256 + 2048 * stacks


@pytest.mark.parametrize("chosen", [1, 3])
def test_what_a_mixture_keeps_for_the_gradients_of_its_adapters(chosen):
    """In float32, where inputs of both products and of B take twice the bytes."""
    config = FAMILIES["qwen3_moe"].config(num_experts_per_tok=chosen)
    mlp = empty_model(config, torch.float32).to_empty(device="cpu").requires_grad_(False).model.layers[0].mlp
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, kept = torch.randn(1, 50, 64, requires_grad=True), []
    for rank in (0, 4):
        if rank:
            mlp.experts = AdaptedExperts(mlp.experts, ["gate_proj", "up_proj", "down_proj"], rank, 4)
        with saved_for_backward(mlp) as saved:
            _ = mlp(x)
        kept.append(saved.bytes / 50)
    settings = StepSettings("nvfp4", 4, 1, 1, 25, 25, recompute=False, experts=True)
    assert kept[1] - kept[0] == 2 * kept_of_experts(ModelShape.of(config.to_dict()), settings)


# The memory model of hybrids of delta nets and attention, against models and what they keep.


#: Widths that differ from each other, so that none can stand for another.
CONFIG = FAMILIES["qwen3_5"].config(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=8,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    linear_key_head_dim=32,
    linear_value_head_dim=48,
)


@pytest.fixture(scope="module")
def shape():
    return ModelShape.of(CONFIG.to_dict())


@pytest.fixture(scope="module")
def model():
    return empty_model(CONFIG, torch.bfloat16)


def test_weights_are_those_of_the_model(shape, model):
    """But for convolutions and norms of heads; norms of blocks are float32 in a policy."""
    few = sum(p.numel() for name, p in model.named_parameters() if "linear_attn" in name and "proj" not in name)
    few += sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    few += model.model.norm.weight.numel()
    numbers = sum(p.numel() for p in model.parameters()) - few
    assert weight_bytes(shape, "bf16") == 2 * numbers + 8 * 2 * 128 * 2
    nets = sum(m.weight.numel() for n, m in model.named_modules() if "linear_attn" in n and isinstance(m, nn.Linear))
    packed = weight_bytes(shape, "bf16") - weight_bytes(shape, "nvfp4")
    linears = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, nn.Linear))
    assert packed == pytest.approx((linears - nets) * (2 - 4.5 / 8), rel=1e-3)
    narrow = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith(("in_proj_b", "in_proj_a")))
    of_all = weight_bytes(shape, "bf16") - weight_bytes(shape.with_packed_nets(), "nvfp4")
    assert of_all == pytest.approx((linears - narrow) * (2 - 4.5 / 8), rel=1e-3)
    assert shape.with_packed_nets().adapter_numbers(4) == shape.adapter_numbers(4)
    assert shape.with_packed_nets().products == shape.products


def test_the_cache_has_pages_of_attention_and_states_of_all_nets(shape):
    heads = DeltaHeads(2, 4, 32, 48, torch.zeros(320, 4), *[torch.zeros(4)] * 2, torch.zeros(48), 1e-6)
    made = DeltaStates.empty(heads, 6, 128, torch.bfloat16, torch.device("cpu"))
    page = 2 * 2 * 2 * 16 * PAGE * 2
    assert cache_bytes(shape, ASKED)[1] == made.nbytes + page * (128 * 19 + 20)


def test_a_net_keeps_what_its_backward_pass_reads(shape, model):
    """As counted on a CPU, where float32 copies and chunks are those of a GPU."""
    net = type(model.model.layers[0].linear_attn)(CONFIG, 0).bfloat16().requires_grad_(False)
    weights, kept = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    row = torch.randn(1, 512, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(row, packing=Packing.of([512], [None], torch.device("cpu")))
    counted = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    assert net_kept_bytes(shape.nets) * 512 == pytest.approx(counted, rel=0.03)


def test_a_hybrid_of_experts_has_the_weights_of_its_model():
    """Widths that differ from each other; routers and gates too."""
    config = FAMILIES["qwen3_5_moe"].config(
        hidden_size=192, moe_intermediate_size=128, shared_expert_intermediate_size=320, num_experts=6
    )
    shape, model = ModelShape.of(config.to_dict()), empty_model(config, torch.bfloat16)
    counted = ("proj", "embed_tokens", "lm_head", "layernorm")
    numbers = sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in counted))
    norms, routers, gates = 2 * 2 * 192, 2 * 6 * 192, 2 * 192
    assert weight_bytes(shape, "bf16") == 2 * numbers + 2 * norms + 4 * routers + 2 * gates
