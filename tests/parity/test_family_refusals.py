"""What the table of families refuses: the sentences of its page are those that a user gets."""

import json
import re

import pytest
import torch

from qerl.checkpoints.files import CheckpointError
from qerl.doctor import candidate, diagnose
from qerl.models.loading import load_model
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import Calibration, quantize_checkpoint, write_equalised
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.settings.base import ConfigError
from qerl.settings.models import CalibrationSettings
from qerl.settings.run import EXPERT_LAYERS, AdapterSettings, EngineSettings, NativeSettings
from tests.families import FAMILIES, row
from tests.parity.family_models import CPU, NORMS, dense, families


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


def test_gpt_oss_as_published_is_quantized_already(bases, tmp_path):
    recipe = Calibration(CalibrationSettings(), tmp_path)
    with pytest.raises(CheckpointError, match=r"is quantized already \(mxfp4\); give the dense checkpoint"):
        quantize_checkpoint(dense(bases, "gpt_oss"), tmp_path / "out", "mxfp4", recipe)


@families
def test_the_doctor_notes_which_samplers_refuse_a_family(bases, name):
    refused = row(FAMILIES[name]).refused
    notes = "; ".join(diagnose(candidate(str(dense(bases, name)), None), None).notes)
    assert ("the native engine supports" in notes) == ("engine" in refused)
    assert ("sampling by vLLM is tested with" in notes) == ("vLLM" in refused)
    assert all(refused[sampler] in notes for sampler in refused.keys() & {"engine", "vLLM"})


@pytest.mark.parametrize(("name", "reason"), [("phi3", "the model has .*qkv_proj"), ("gemma3", "norms don't multiply")])
def test_awq_is_refused_where_its_rules_are_not_tested(bases, tmp_path, name, reason):
    calibration = Calibration(CalibrationSettings(), tmp_path)
    with pytest.raises(CheckpointError, match=f"{reason}.*; use recipe: rtn"):
        write_equalised(bases / name / "bf16", tmp_path / "out", "nvfp4", calibration)
    assert not (tmp_path / "out").exists()
