"""Each family of the table against stock transformers, PEFT and TRL, on a small random model in the hub's layout."""

import json
import re
from functools import partial
from statistics import fmean

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from qerl.checkpoints.files import CheckpointError, read_headers
from qerl.data.sources import local_dataset, prepare, read_split
from qerl.doctor import candidate, diagnose
from qerl.evals.evaluate import evaluate
from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.export import export, merge, write_dense, write_merged
from qerl.models.linear import PackedLinear
from qerl.models.loading import has_packed_delta_nets, load_model, packed_tensors, stream
from qerl.models.policy import load_policy, trained_in_full, with_adapter
from qerl.models.quantize import Calibration, quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams, refused_by_engine
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.models import CalibrationSettings
from qerl.settings.run import EXPERT_LAYERS, AdapterSettings, EngineSettings, NativeSettings, NoiseSettings
from qerl.settings.workflow import EvaluationSettings
from tests.conftest import in_nightly
from tests.families import FAMILIES, row
from tests.parity.family_models import (
    CPU,
    NORMS,
    PACKED,
    PROMPTS,
    TOKENS,
    adapted,
    add_noise,
    assert_drawn_by,
    assert_updated_as,
    dense,
    draw,
    families,
    forced,
    layers_of,
    some_families,
    stock,
    unpacked,
    updated,
    with_peft,
)
from tests.tiny import tiny_family, write_template

MLP = {"gate_proj", "up_proj", "down_proj"}
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", *MLP}
NET = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
LAYERS = {"phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}}
#: The layers that get an adapter, where others are packed.
ADAPTED = LAYERS | dict.fromkeys(("qwen3_5", "qwen3_5_moe"), SEVEN | NET)
ADAPTED |= {name: SEVEN - MLP for name in ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss")}
#: Families whose experts transformers stacks as it loads them.
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "qwen3_5_moe")
#: Each family in one of its formats, and in nightly runs in both.
PAIRS = [(name, formats[place % 2]) for place, (name, formats) in enumerate(PACKED.items())]
OTHERS = [(name, formats[1 - place % 2]) for place, (name, formats) in enumerate(PACKED.items())]


def pairs(mixtures):
    chosen, others = ([pair for pair in all_ if (pair[0] in MIXTURES) == mixtures] for all_ in (PAIRS, OTHERS))
    return pytest.mark.parametrize(("name", "weights"), [*chosen, *in_nightly(*others)])


#: Of logits, log-probabilities and gradients. A delta net enlarges rounding: transformers' own chunks and steps differ
#: by 5e-5.
TOLERANCE = {"qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}


@families
def test_the_samplers_logprobs_are_those_of_transformers(bases, name):
    policy, model = load_policy(dense(bases, name), None, "float32", CPU), stock(dense(bases, name))
    samplers = [EagerSampler(policy)]
    if refused_by_engine(policy.lm.config) is None:
        samplers.append(EngineSampler(policy, NativeSettings()))
    params = SamplingParams(max_tokens=20, count=2, ignore_eos=True)
    for sampler in samplers:
        assert_drawn_by(model, sampler.generate(PROMPTS, params), TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen2", "nvfp4"),
        ("llama", "nf4"),
        ("phi3", "nvfp4"),
        ("gemma3", "mxfp4"),
        ("qwen3_moe", "nvfp4"),
        ("qwen3_5_moe", "mxfp4"),
        ("gpt_oss", "mxfp4"),
        *in_nightly(
            ("qwen3", "mxfp4"),
            ("mistral-sliding", "nvfp4"),
            ("qwen3_5", "nvfp4"),
            ("qwen2_moe", "nvfp4"),
            ("mixtral", "mxfp4"),
        ),
    ],
)
def test_the_engine_draws_as_peft_does_on_the_unpacked_base_with_noise(bases, tmp_path, name, weights):
    """Packed weights, an adapter on all layers, trained norms and noise, together."""
    policy = adapted(bases / name / weights, tmp_path / "adapter")
    peft = with_peft(unpacked(bases / name / weights, tmp_path, name), tmp_path / "adapter")
    add_noise(peft, NORMS[name])
    with Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed=3).at(2, 10):
        groups = EngineSampler(policy, NativeSettings()).generate(PROMPTS, SamplingParams(max_tokens=16, count=2))
    assert_drawn_by(peft, groups, TOLERANCE.get(name, 1e-5))


@families
def test_updates_and_the_saved_adapter_are_those_of_peft_on_the_unpacked_base(bases, tmp_path, name):
    """Log-probabilities, and the gradient of every trained tensor, by the names that PEFT gives them."""
    tolerance = TOLERANCE.get(name, 1e-5)
    base = dense(bases, name) if name == "gpt_oss" else bases / name / "nvfp4"
    policy = adapted(base, tmp_path / "adapter")
    assert layers_of(policy) == ADAPTED.get(name, SEVEN)
    peft = with_peft(unpacked(base, tmp_path, name), tmp_path / "adapter", is_trainable=True)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, peft(TOKENS).logits, rtol=1e-4, atol=tolerance)
    ours = assert_updated_as(policy, [peft], tolerance)
    assert any(NORMS[name][1] in part for part in ours)


@pairs(mixtures=False)
def test_packed_checkpoints_load_in_transformers(bases, name, weights):
    model = load_model(bases / name / weights, torch.bfloat16)
    layers = {part.rpartition(".")[2] for part, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert layers == LAYERS.get(name, SEVEN)
    assert torch.equal(model(TOKENS).logits, stock(bases / name / weights, torch.bfloat16)(TOKENS).logits)


@pairs(mixtures=True)
def test_packed_experts_are_those_of_the_unpacked_base(bases, tmp_path, name, weights):
    """Stock transformers stacks experts, and so reads no packed ones."""
    model = load_model(bases / name / weights, torch.float32)
    layers = {part for part, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert {part.rpartition(".")[2] for part in layers} == SEVEN
    assert not [part for part in layers if "linear_attn" in part]
    write_dense(bases / name / weights, tmp_path, torch.float32)
    with torch.no_grad():
        expected = stock(tmp_path)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=TOLERANCE.get(name, 1e-5))


@pytest.fixture(scope="module")
def packed_nets(bases):
    """Checkpoints with packed delta nets, by family and format."""
    names = [(name, weights) for name in ("qwen3_5", "qwen3_5_moe") for weights in PACKED_FORMATS]
    for name, weights in names:
        quantize_checkpoint(bases / name / "bf16", bases / f"{name}-nets" / weights, weights, pack_delta_nets=True)
    return {(name, weights): bases / f"{name}-nets" / weights for name, weights in names}


nets = pytest.mark.parametrize("weights", PACKED_FORMATS)
hybrids = pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])


@nets
@hybrids
def test_all_layers_of_a_delta_net_but_b_and_a_are_packed(packed_nets, name, weights):
    """config.json lists b and a as dense, beside the head, and a mixture's routers and gates of a shared expert."""
    folder = packed_nets[name, weights]
    headers, described = read_headers(folder), json.loads((folder / "config.json").read_text())["quantization_config"]
    dense = {part.removesuffix(".weight") for part, info in headers.items() if len(info.shape) == 2}
    dense -= {*packed_tensors(headers, weights), "model.embed_tokens"}
    stays = ("lm_head", "in_proj_b", "in_proj_a", ".mlp.gate", ".shared_expert_gate")
    listed = described["ignore" if weights != "nf4" else "llm_int8_skip_modules"]
    assert {part for part in dense if part.endswith(stays)} == set(listed)
    layers = {part.rpartition(".")[2] for part in packed_tensors(headers, weights) if "linear_attn" in part}
    assert layers == NET - {"in_proj_b", "in_proj_a"}
    if weights == "nvfp4":  # vLLM runs qkv and z as one layer, whose parts have the least of their scales
        own = {part: f"model.layers.0.linear_attn.{part}.weight_global_scale" for part in layers}
        scales = {part: tensor.item() for part, tensor in stream({name: headers[name] for name in own.values()})}
        assert scales[own["in_proj_qkv"]] == scales[own["in_proj_z"]] != scales[own["out_proj"]]


@nets
def test_packed_delta_nets_load_in_transformers(packed_nets, weights):
    folder = packed_nets["qwen3_5", weights]
    model, expected = load_model(folder, torch.bfloat16), stock(folder, torch.bfloat16)
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("qwen3_5", "nvfp4"), ("qwen3_5_moe", "nf4"), *in_nightly(("qwen3_5", "mxfp4"), ("qwen3_5_moe", "nvfp4"))],
)
def test_samplers_and_updates_on_packed_delta_nets_are_those_of_peft(packed_nets, tmp_path, name, weights):
    """Against stock transformers on the unpacked base; adapters are on the same layers as with dense delta nets."""
    base = packed_nets[name, weights]
    policy = adapted(base, tmp_path / "adapter")
    assert layers_of(policy) == ADAPTED[name]
    peft = with_peft(unpacked(base, tmp_path, name), tmp_path / "adapter")
    refused = refused_by_engine(policy.lm.config, weights) is not None  # experts in NF4
    engine = partial(EngineSampler, settings=NativeSettings())
    for sampler in (EagerSampler, *([] if refused else [engine])):
        samples = draw(policy, sampler=sampler)
        with torch.no_grad():
            expected = torch.stack([forced(peft, sample.prompt, sample.completion.token_ids) for sample in samples])
        found = torch.tensor([sample.completion.logprobs for sample in samples])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=TOLERANCE[name])
    torch.testing.assert_close(updated(policy, samples), expected, rtol=1e-5, atol=TOLERANCE[name])


def test_a_merged_base_with_packed_delta_nets_packs_them_again(packed_nets, tmp_path):
    adapted(packed_nets["qwen3_5", "nvfp4"], tmp_path / "adapter", rank=2)
    merge(packed_nets["qwen3_5", "nvfp4"], tmp_path / "adapter", tmp_path / "merged", "nvfp4")
    assert has_packed_delta_nets(tmp_path / "merged")


def test_delta_nets_are_packed_where_there_are_some_and_by_rounding_to_nearest(bases, tmp_path):
    dense, out = bases / "qwen3_5/bf16", tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"mistral/bf16 has no delta nets, .*; leave pack_delta_nets out"):
        quantize_checkpoint(bases / "mistral/bf16", out, "nvfp4", pack_delta_nets=True)
    with pytest.raises(ConfigError, match="pack_delta_nets needs a 4-bit format that is rounded to nearest"):
        quantize_checkpoint(dense, out, "nvfp4", Calibration(CalibrationSettings(), tmp_path), pack_delta_nets=True)
    with pytest.raises(ConfigError, match="pack_delta_nets needs a 4-bit format"):
        quantize_checkpoint(dense, out, "bf16", pack_delta_nets=True)
    assert not out.exists()


def test_a_policy_of_mixtral_is_written_by_the_names_of_its_files(bases, tmp_path):
    """Exported, merged and trained in full, as stock transformers and PEFT read it."""
    base = bases / "mixtral/bf16"
    policy = adapted(base, tmp_path / "adapter", rank=2)
    export(base, tmp_path / "adapter", tmp_path / "out")
    write_merged(bases / "mixtral/nvfp4", tmp_path / "adapter", tmp_path / "merged", torch.float32)
    trained_in_full(base, "float32", CPU).save(tmp_path / "full")
    with torch.no_grad():
        found = with_peft(tmp_path / "out/base", tmp_path / "out/adapter")(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, found, rtol=1e-4, atol=1e-5)
        packed = load_policy(bases / "mixtral/nvfp4", tmp_path / "adapter", "float32", CPU)
        torch.testing.assert_close(
            packed.lm(TOKENS).logits, stock(tmp_path / "merged")(TOKENS).logits, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(stock(tmp_path / "full")(TOKENS).logits, stock(base)(TOKENS).logits)
        torch.testing.assert_close(
            load_policy(base, tmp_path / "full", "float32", CPU).lm(TOKENS).logits,
            stock(base)(TOKENS).logits,
            rtol=1e-4,
            atol=1e-5,
        )
    with safe_open(bases / "mixtral/nvfp4/model.safetensors", "pt") as file:
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in file.keys()  # noqa: SIM118


def test_experts_of_gpt_oss_are_exported_as_published_and_neither_merged_nor_read_dense(bases, tmp_path):
    base = dense(bases, "gpt_oss")
    policy = adapted(base, tmp_path / "adapter", rank=2)
    export(base, tmp_path / "adapter", tmp_path / "out")
    with torch.no_grad():
        found = with_peft(tmp_path / "out/base", tmp_path / "out/adapter")(TOKENS).logits
        torch.testing.assert_close(policy.lm(TOKENS).logits, found, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"stacks experts in MXFP4.* without --merged"):
        write_merged(base, tmp_path / "adapter", tmp_path / "merged")
    tiny_family(tmp_path / "dense", "gpt_oss", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"down_proj \[4, 128, 64\], a stack of experts in another format"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "packed", "nvfp4")


def test_targets_of_a_fused_layer_are_all_of_its_parts(bases):
    def made(*targets):
        return with_adapter(bases / "phi3/bf16", AdapterSettings(rank=2, targets=targets), "float32", 0, CPU)

    assert layers_of(made("q_proj", "k_proj", "v_proj")) == {"qkv_proj"}
    with pytest.raises(ConfigError, match="up_proj without gate_proj, and the model has both in gate_up_proj"):
        made("up_proj")


GREEDY = parse(
    EvaluationSettings,
    {
        "tasks": [{"dataset": "problems", "harness": "qerl"}],
        "sampling": {"temperature": 0, "max_tokens": 10},
        "repeats": 1,
    },
    "settings",
)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    rows = [{"question": f"What is {n} and {7 * n}?", "answer": f"#### {8 * n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = local_dataset(folder / "rows.jsonl", validation_fraction=0, test_fraction=1)
    prepare(parse(DatasetSettings, {**values, "instruction": ""}, "problems"), folder / "prepared")
    return folder / "prepared"


def odd(text):
    """Whether a text has an odd number of different characters, which stands for a right answer."""
    return len(set(text)) % 2 == 1


@some_families("qwen2", "qwen3_5", "gpt_oss")
def test_an_evaluation_scores_the_answers_of_peft_on_the_unpacked_base(bases, problems, tmp_path, monkeypatch, name):
    """Greedy ones of a packed base with a trained adapter, by all samplers of this machine."""
    monkeypatch.setattr("qerl.evals.harness.verdict", lambda text, *_: "right" if odd(text) else "wrong")
    base = dense(bases, name) if name == "gpt_oss" else bases / name / "nvfp4"
    write_template(base)
    adapted(base, tmp_path / "adapter")
    peft = with_peft(unpacked(base, tmp_path, name), tmp_path / "adapter")
    tokenizer, expected = AutoTokenizer.from_pretrained(base), []
    for problem in read_split(problems, "test"):
        chat = [{"role": "user", "content": problem.question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        ids = peft.generate(**asked, max_new_tokens=10, do_sample=False)[0, asked["input_ids"].shape[1] :]
        expected.append((tokenizer.decode(ids, skip_special_tokens=True), len(ids)))
    right = [odd(text) for text, _ in expected]
    assert 0 < sum(right) < len(right)
    trained = load_policy(base, tmp_path / "adapter", "float32", CPU)
    samplers = [make_sampler(trained, GREEDY)]
    if refused_by_engine(trained.lm.config) is None:
        samplers.append(EngineSampler(trained, NativeSettings()))
    for sampler in samplers:
        scores = evaluate(sampler, trained.tokenizer, GREEDY, {"problems": problems}, tmp_path, lambda _: None)
        rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert [(row["completion"], row["tokens"]) for row in rows] == expected
        assert scores["problems"].accuracy == fmean(right)


def test_a_structure_that_is_not_handled_is_refused_before_a_weight_is_read(tmp_path):
    """The folder has no weights, which would be the next error."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_next"].config().to_dict()))
    for refused in (
        lambda: load_model(tmp_path, torch.float32),
        lambda: quantize_checkpoint(tmp_path, tmp_path / "out", "nvfp4"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(row(FAMILIES["qwen3_next"]).refusal)) as caught:
            refused()
        assert "\n" not in str(caught.value)


REFUSED = [(name, part) for name in NORMS for part in row(FAMILIES[name]).refused if (name, part) != ("gpt_oss", "AWQ")]
#: What the user of a refused part is told to do instead.
INSTEAD = {
    "AWQ": "use recipe: rtn",
    "LoRA on experts": "leave experts out",
    "engine": "the eager sampler serves it",
    "vLLM": "use engine=native",
}


@pytest.mark.parametrize(("name", "part"), REFUSED)
def test_who_asks_for_a_refused_part_of_a_family_gets_the_sentence_of_the_page(bases, tmp_path, name, part):
    base = dense(bases, name)
    policy = load_policy(base, None, "float32", CPU)
    recipe = Calibration(CalibrationSettings(), tmp_path)
    ways = {
        "AWQ": lambda: quantize_checkpoint(base, tmp_path / "out", "nvfp4", recipe),
        "LoRA on experts": lambda: with_adapter(base, AdapterSettings(targets=EXPERT_LAYERS), "float32", 0, CPU),
        "engine": lambda: EngineSampler(policy, NativeSettings()),
        "vLLM": lambda: make_sampler(policy, EngineSettings(engine="vllm")),
    }
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        ways[part]()
    assert f"{row(FAMILIES[name]).refused[part]}; {INSTEAD[part]}" in str(caught.value)
    assert not (tmp_path / "out").exists()


@families
def test_the_doctor_notes_which_samplers_refuse_a_family(bases, name):
    refused = row(FAMILIES[name]).refused
    notes = "; ".join(diagnose(candidate(str(dense(bases, name)), None), None).notes)
    assert ("the native engine supports" in notes) == ("engine" in refused)
    assert ("sampling by vLLM is tested with" in notes) == ("vLLM" in refused)
    assert all(refused[sampler] in notes for sampler in refused.keys() & {"engine", "vLLM"})
