"""AWQ: the equalised model computes the dense one's outputs, and its rounding equals the library's, bit for bit."""

import json
import math

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.data.prompts import prompt_ids
from qerl.data.records import DataError
from qerl.data.sources import prepare, read_split
from qerl.models.quantize import (
    Calibration,
    _modifier,
    calibration_ids,
    equalise,
    quantization_report,
    quantize_checkpoint,
)
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.models import CalibrationSettings
from tests.conftest import NIGHTLY
from tests.parity.test_codec_parity import assert_bits_equal
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3, write_template

BUILDERS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3} | ({"llama": tiny_llama} if NIGHTLY else {})
SETTINGS = CalibrationSettings(samples=6, length=96)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "sums"
    settings = DatasetSettings(format="gsm8k", origin=Generated(train=20, validation=2, test=2), instruction="Number:")
    prepare(settings, folder)
    return folder


def dense(architecture, folder):
    """A random model whose blocks read a few channels that are much larger than the others, as those of real models."""
    BUILDERS[architecture](folder)
    write_template(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data[::16] *= 20
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, data):
    """Folder of each architecture's checkpoints (bf16, rtn, awq), with the report of the last."""
    root = tmp_path_factory.mktemp("checkpoints")
    reports = {}
    for name in BUILDERS:
        source = dense(name, root / name / "bf16")
        quantize_checkpoint(source, root / name / "rtn", "nvfp4")
        reports[name] = quantize_checkpoint(source, root / name / "awq", "nvfp4", Calibration(SETTINGS, data))
    return root, reports


everywhere = pytest.mark.parametrize("architecture", BUILDERS)


def texts_of(folder, data):
    return calibration_ids(AutoTokenizer.from_pretrained(folder), Calibration(SETTINGS, data))


@everywhere
@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp4"])
def test_equalising_leaves_the_function_as_it_is(checkpoints, data, architecture, weights_format):
    folder = checkpoints[0] / architecture / "bf16"
    texts = texts_of(folder, data)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    token_ids = torch.tensor([texts[0]])
    with torch.no_grad():
        expected = model(token_ids).logits
        equalise(model, weights_format, texts, AutoTokenizer.from_pretrained(folder))
        scaled = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        scaled.load_state_dict({name: model.get_parameter(name) for name in before}, strict=False)
        torch.testing.assert_close(scaled(token_ids).logits, expected, rtol=1e-4, atol=1e-5)
    changed = {name.rpartition(".weight")[0].rpartition(".")[2] for name in before if differs(scaled, before, name)}
    assert {"input_layernorm", "q_proj", "k_proj", "v_proj", "up_proj", "down_proj"} <= changed
    assert not {"embed_tokens", "norm", "lm_head", "q_norm", "k_norm"} & changed


def differs(model, before, name):
    return not torch.equal(model.get_parameter(name), before[name])


@everywhere
def test_checkpoint_equals_that_of_the_librarys_own_run(checkpoints, data, tmp_path, architecture):
    folder = checkpoints[0] / architecture
    texts = texts_of(folder / "bf16", data)
    model = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
    rows = [{"input_ids": torch.tensor([text])} for text in texts]
    recipe = [_modifier(), QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])]
    oneshot(model=model, recipe=recipe, dataset=DataLoader(rows, batch_size=None)).save_pretrained(tmp_path)
    expected, found = load_file(tmp_path / "model.safetensors"), load_file(folder / "awq" / "model.safetensors")
    assert_bits_equal(found, expected)


# --- texts and report


def test_texts_are_training_problems_with_their_solutions(checkpoints, data):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[0] / "qwen2" / "bf16")
    problems = {problem.question: problem for problem in read_split(data, "train")}
    whole = Calibration(CalibrationSettings(samples=5, length=2048), data)
    texts = calibration_ids(tokenizer, whole)
    assert len(texts) == 5
    for ids in texts:
        [problem] = [p for p in problems.values() if ids[: len(prompt(tokenizer, p))] == prompt(tokenizer, p)]
        answer = ids[len(prompt(tokenizer, problem)) :]
        assert answer == [*tokenizer.encode(problem.solution, add_special_tokens=False), tokenizer.eos_token_id]
    assert texts == calibration_ids(tokenizer, whole)
    assert texts != calibration_ids(tokenizer, Calibration(CalibrationSettings(samples=5, seed=1), data))
    cut = Calibration(CalibrationSettings(samples=5, length=30), data)
    assert calibration_ids(tokenizer, cut) == [ids[:30] for ids in texts]
    every = calibration_ids(tokenizer, Calibration(CalibrationSettings(samples=1000), data))
    assert len(every) == len(problems)


def prompt(tokenizer, problem):
    return prompt_ids(tokenizer, problem.question, "Number:")


def test_a_set_without_training_problems_is_an_error(checkpoints, tmp_path):
    settings = {"format": "gsm8k", "origin": {"source": "local", "path": tmp_path / "p.jsonl", "test_fraction": 1}}
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    settings["origin"]["validation_fraction"] = 0
    prepare(DatasetSettings(**settings), tmp_path / "data")
    source = checkpoints[0] / "qwen2" / "bf16"
    with pytest.raises(DataError, match=r"no training problems.*calibration.dataset"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4", Calibration(SETTINGS, tmp_path / "data"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "p.jsonl"]


@everywhere
def test_report_names_the_method_and_what_it_was_calibrated_on(checkpoints, data, architecture):
    root, reports = checkpoints
    report, folder = reports[architecture], root / architecture
    texts = texts_of(folder / "bf16", data)
    assert report["method"] == "awq"
    assert report["calibration"] == {
        **SETTINGS.model_dump(),
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "sha256": json.loads((data / "dataset.json").read_text())["sha256"]["train"],
    }
    assert {"llmcompressor", "compressed-tensors"} <= report["versions"].keys()
    rtn = quantization_report(folder / "bf16", folder / "rtn", "nvfp4")
    assert (report["bits_per_weight"], rtn["method"]) == (rtn["bits_per_weight"], "rtn")
    # Of the weights as AWQ scaled them: of about the size of plain rounding, not of the scaling.
    for kind, error in report["relative_error"].items():
        assert math.isclose(error, rtn["relative_error"][kind], rel_tol=0.3), kind
