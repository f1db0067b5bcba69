"""The text model of checkpoints of images and text against stock transformers' class of the whole, and PEFT on it."""

import json
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qerl.checkpoints.files import CheckpointError, check_checkpoint, weights_format_of
from qerl.checkpoints.layouts import own_name
from qerl.data.sources import prepare
from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.export import export, write_dense, write_merged
from qerl.models.linear import PackedLinear
from qerl.models.loading import load_model
from qerl.models.policy import load_policy
from qerl.models.quantize import Calibration, quantize_checkpoint
from qerl.rl.value import add_value
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.models import CalibrationSettings
from qerl.settings.run import EngineSettings, NativeSettings, PPOSettings
from tests.conftest import in_nightly
from tests.parity.family_models import CPU, PROMPTS, TOKENS, adapted, assert_drawn_by, assert_updated_as, by_the_card
from tests.parity.test_published_parity import by_library
from tests.tiny import edit_config, tiny_family, tiny_of_images, tiny_tokenizer, write_template


@dataclass(frozen=True)
class Case:
    """A model of images and text, the family of its text model, and stock classes with which PEFT loads an adapter."""

    kind: str
    family: str
    loaders: tuple[str, ...]
    #: The prefix of the text model's modules in these classes.
    prefix: str = "model.language_model."


CASES = {
    "qwen3_5": Case("qwen3_5", "qwen3_5", ("AutoModelForCausalLM",), "model."),
    "qwen3_5_moe": Case("qwen3_5_moe", "qwen3_5_moe", ("AutoModelForCausalLM",), "model."),
    "gemma3": Case("gemma3", "gemma3", ("AutoModelForCausalLM", "AutoModelForImageTextToText")),
    "mistral3": Case("mistral3", "mistral", ("AutoModelForImageTextToText",)),
    "ministral3": Case("mistral3", "ministral3", ("AutoModelForImageTextToText",)),
}
cases = pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "ministral3", *in_nightly("qwen3_5_moe", "mistral3")])
towers = pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("qwen3_5")])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    return {name: tiny_of_images(root / name, case.kind, case.family) for name, case in CASES.items()}


def whole(folder, dtype=torch.float32):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()


@cases
def test_the_samplers_logprobs_are_those_of_the_whole(sources, name):
    policy, model = load_policy(sources[name], None, "float32", CPU), whole(sources[name])
    samplers = [EagerSampler(policy)]
    if refused_by_engine(policy.lm.config) is None:
        samplers.append(EngineSampler(policy, NativeSettings()))
    assert len(samplers) == (1 if name == "ministral3" else 2)
    for sampler in samplers:
        groups = sampler.generate(PROMPTS, SamplingParams(max_tokens=20, count=2, ignore_eos=True))
        assert_drawn_by(model, groups, 1e-4)


@cases
def test_updates_and_the_saved_adapter_are_those_of_peft_on_the_whole(sources, tmp_path, name):
    """By each stock class that loads the folder; only the text model gets an adapter there."""
    policy = adapted(sources[name], tmp_path)
    # In float64, since float32 rounds twice as much if both sides do. PyTorch's grouped products refuse float64.
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    models = (
        getattr(transformers, loader).from_pretrained(sources[name], **settings) for loader in CASES[name].loaders
    )
    pefts = (PeftModel.from_pretrained(model, tmp_path, is_trainable=True).eval().double() for model in models)
    prefix = f"base_model.model.{CASES[name].prefix}"

    def renamed(gradients):
        return {f"base_model.model.model.{part.removeprefix(prefix)}": grad for part, grad in gradients.items()}

    assert_updated_as(policy, pefts, 1e-4, renamed=renamed)


@cases
def test_the_code_of_the_card_loads_the_saved_adapter(sources, tmp_path, name):
    policy = adapted(sources[name], tmp_path)
    with torch.no_grad():
        found = by_the_card(tmp_path)["model"](TOKENS).logits
        torch.testing.assert_close(found, policy.lm(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_an_export_keeps_the_modules_that_an_adapter_excludes(sources, tmp_path):
    adapted(sources["qwen3_5"], tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"exclude_modules": ["o_proj"]}))
    export(sources["qwen3_5"], tmp_path / "adapter", tmp_path / "out")
    assert json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["exclude_modules"] == ["o_proj"]


def test_the_adapter_of_a_value_function_has_the_names_of_the_whole(sources, tmp_path):
    policy = adapted(sources["gemma3"])
    add_value(policy, PPOSettings())
    policy.save(tmp_path)
    peft = PeftModel.from_pretrained(whole(sources["gemma3"]), tmp_path / "value")
    stored = load_file(tmp_path / "value/adapter_model.safetensors")
    assert stored.keys() == get_peft_model_state_dict(peft).keys()


def test_awq_equalises_the_text_model(tmp_path):
    """The whole and the text model alone give the same packed tensors."""
    prepare(DatasetSettings(format="gsm8k", origin=Generated(train=20, validation=2, test=2)), tmp_path / "data")
    calibration = Calibration(CalibrationSettings(samples=4, length=64), tmp_path / "data")
    write_template(tiny_of_images(tmp_path / "whole", "mistral3", "mistral"))
    alone = tiny_family(tmp_path / "alone", "mistral", dtype=torch.bfloat16)
    write_template(alone)
    tensors = load_file(tmp_path / "whole/model.safetensors")
    named = {own_name(part): tensor for part, tensor in tensors.items()}
    save_file({part: named[part] for part in load_file(alone / "model.safetensors")}, alone / "model.safetensors")
    packed = []
    for source in (tmp_path / "whole", alone):
        quantize_checkpoint(source, tmp_path / f"{source.name}-packed", "nvfp4", calibration)
        packed.append(load_file(tmp_path / f"{source.name}-packed/model.safetensors"))
    torch.testing.assert_close(*packed, rtol=0, atol=0)


@cases
def test_a_saved_adapter_loads_again_and_is_exported_and_merged(sources, tmp_path, name):
    policy = adapted(sources[name], tmp_path / "adapter")
    export(sources[name], tmp_path / "adapter", tmp_path / "out")
    write_merged(sources[name], tmp_path / "adapter", tmp_path / "merged", torch.float32)
    again = load_policy(sources[name], tmp_path / "adapter", "float32", CPU)
    exported = getattr(transformers, CASES[name].loaders[0]).from_pretrained(tmp_path / "out/base", dtype=torch.float32)
    models = (
        again.lm,
        PeftModel.from_pretrained(exported, tmp_path / "out/adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32),
    )
    with torch.no_grad():
        expected, plain = policy.lm(TOKENS).logits, whole(sources[name])(TOKENS).logits
        for model in models:
            torch.testing.assert_close(model.eval()(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize(  # stock classes stack the experts of the mixture
    ("name", "weights"), zip([name for name in CASES if name != "qwen3_5_moe"], cycle(PACKED_FORMATS), strict=False)
)
def test_quantize_writes_the_text_model_which_stock_transformers_reads(sources, tmp_path, name, weights):
    quantize_checkpoint(sources[name], tmp_path / "packed", weights)
    written = json.loads((tmp_path / "packed/config.json").read_text())
    assert written["model_type"] == json.loads((sources[name] / "config.json").read_text())["text_config"]["model_type"]
    model = load_model(tmp_path / "packed", torch.bfloat16)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    assert torch.equal(model(TOKENS).logits, stock(TOKENS).logits)
    write_dense(tmp_path / "packed", tmp_path / "dense", torch.float32)
    unpacked, dense = load_file(tmp_path / "dense/model.safetensors"), whole(sources[name]).state_dict()
    for layer in (part for part, module in model.named_modules() if isinstance(module, PackedLinear)):
        weight = dense[f"{_within(layer)}.weight"]
        assert (unpacked[f"{layer}.weight"] - weight).norm() < 0.2 * weight.norm(), layer


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("gemma3", "language_model.model."),
        ("mistral3", "model.language_model."),
        *in_nightly(("ministral3", "language_model.model.")),
    ],
)
def test_a_checkpoint_that_llmcompressor_publishes_of_the_whole_loads(sources, tmp_path, name, prefix):
    """The vision tower stays dense there. Files have either prefix, by the version of transformers that wrote them."""
    model = whole(sources[name], torch.bfloat16)
    ignored = ["re:.*lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignored))
    model.save_pretrained(folder := tmp_path / "published")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert any(part.startswith("language_model.model.") for part in tensors)
    save_file({part.replace("language_model.model.", prefix, 1): t for part, t in tensors.items()}, path)

    check_checkpoint(folder)
    assert weights_format_of(folder) == "nvfp4"
    packed, expected = load_model(folder, torch.bfloat16), whole(sources[name], torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    layers = dict(by_library(tensors, config))
    assert len(layers) == 14 == sum(isinstance(module, PackedLinear) for module in packed.modules())
    norms = {part.removesuffix(".weight"): t for part, t in tensors.items() if part.endswith("norm.weight")}
    for layer, weight in (layers | norms).items():  # the library rounds norms of the form 1 + w on its way
        part = layer.replace("language_model.model.", "model.language_model.", 1)
        if part.startswith("model.language_model."):
            expected.get_submodule(part).weight.data = weight.to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(packed(TOKENS).logits, expected(TOKENS).logits)
    tiny_tokenizer(folder)
    policy = adapted(folder, tmp_path / "adapter")
    rounded = deepcopy(expected).float()  # as transformers unpacks the weights
    write_dense(folder, tmp_path / "dense", torch.float32)  # which the comparison above has checked in bfloat16
    for part, weight in load_file(tmp_path / "dense/model.safetensors").items():
        if "proj" in part:
            expected.get_submodule(_within(part)).weight.data = weight
    peft = PeftModel.from_pretrained(expected.float(), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(TOKENS).logits, peft(TOKENS).logits, rtol=1e-4, atol=1e-4)
        # The names that the library lists as ignored are not those of transformers' modules.
        edit_config(folder, quantization_config=config | {"ignore": ignored})
        by_card, unpacked = (
            by_the_card(tmp_path / "adapter")["model"],
            PeftModel.from_pretrained(rounded, tmp_path / "adapter"),
        )
        torch.testing.assert_close(by_card(TOKENS).logits, unpacked.eval()(TOKENS).logits, rtol=1e-4, atol=1e-4)


def _within(part):
    """The stock class's module of a weight of the text model."""
    return f"model.language_model.{part.removeprefix('model.').removesuffix('.weight')}"


def test_a_checkpoint_that_modelopt_publishes_of_the_whole_loads(sources, tmp_path):
    """Its names of NVFP4's tensors, beside the tensors of the vision tower."""
    quantize_checkpoint(sources["gemma3"], tmp_path / "own", "nvfp4")
    own, published = load_file(tmp_path / "own/model.safetensors"), {}
    for part, tensor in own.items():
        layer, _, kind = part.replace("model.", "language_model.model.", 1).rpartition(".")
        named = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}.get(kind, kind)
        value = tensor.double().reciprocal().float().squeeze() if kind == "weight_global_scale" else tensor
        published[f"{layer}.{named}"] = value
    dense = load_file(sources["gemma3"] / "model.safetensors")
    seen = {part: tensor for part, tensor in dense.items() if not part.startswith("language_model.")}
    assert any("vision_tower" in part for part in seen)
    (folder := tmp_path / "published").mkdir()
    save_file(published | seen, folder / "model.safetensors")
    (folder / "config.json").write_text((sources["gemma3"] / "config.json").read_text())
    edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with torch.no_grad():
        found, expected = (load_model(f, torch.float32)(TOKENS).logits for f in (folder, tmp_path / "own"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@towers
def test_vllm_is_refused(sources, name):
    policy = load_policy(sources[name], None, "float32", CPU)
    reason = "not 'ministral3'" if name == "ministral3" else "is one of images and text"
    with pytest.raises(ConfigError, match=rf"{reason}; use engine=native"):
        make_sampler(policy, EngineSettings(engine="vllm"))


def test_a_structure_is_refused_before_a_weight_is_read(tmp_path):
    source = tiny_of_images(tmp_path, "gemma3", "gemma3", use_bidirectional_attention=True)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the attention of model\.layers\.0 isn't causal"):
        load_model(source, torch.float32)
