"""The timing of other families, on a small mixture: its files, and the checkpoint and the adapter that vLLM gets."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.bench.decode.points import Timing
from qerl.bench.grpo_step.work import memory_of
from qerl.layers.structure import structure_of
from qerl.results import catalogue
from qerl.results.files import read
from qerl.results.schema.speed import FamilyDecodeResult, FamilyStepResult, TimedStep
from tests.families import FAMILIES
from tests.gpu import family_on_vllm, time_families

SHAPE = {"vocab_size": 256}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    monkeypatch.setattr(time_families, "DEVICE", torch.device("cpu"))
    monkeypatch.setitem(time_families.MODELS, "small", ("qwen3_moe", SHAPE))


def test_each_number_of_sequences_is_a_stored_point(tmp_path, monkeypatch):
    def drawn(draw, sequences, prompt, tokens):
        """One draw, without a clock."""
        assert draw([[200_000] * prompt] * sequences, tokens, 0) == sequences * tokens
        return Timing([7.0 * sequences], [0.5])

    monkeypatch.setattr(time_families, "timed", drawn)
    time_families.main(tmp_path, models="small", sequences="1,2", tokens=4, prompt=5)
    [file] = tmp_path.iterdir()
    assert file.name == "decode-native-small-nvfp4-r16-5x4.json"
    catalogue.check(file)
    result = read(FamilyDecodeResult, file)
    assert [point.sequences for point in result.points] == [1, 2]
    assert [point.samples for point in result.points] == [[7.0], [14.0]]
    assert result.points[0].weight_bytes > 0
    assert result.provenance.commit == "test"


def test_steps_are_stored(tmp_path, monkeypatch):
    """`steps_with` has tests of its own."""

    def steps(policy, work, settings, folder):
        assert (work.completions, settings.gradient_checkpointing) == (128, True)
        assert any("lora_A" in name for name, _ in policy.trainable())
        step = TimedStep(step=3.0, sync=0.0, rollout=2.0, update=1.0)
        return "native engine", [step, step], memory_of(10.0, 2, {"weights": 3}), None

    monkeypatch.setattr(time_families, "steps_with", steps)
    time_families.main(tmp_path, models="small", weights="bf16", step=True, recompute=True)
    file = tmp_path / "step-small-bf16-r16-recompute.json"
    catalogue.check(file)
    result = read(FamilyStepResult, file)
    assert (result.prompts, result.group, result.completion_tokens) == (16, 8, 1024)
    assert [step.rollout for step in result.steps] == [2.0, 2.0]
    assert result.memory.without_kv_cache_bytes == 8


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "phi3"])
def test_the_adapter_for_vllm_is_one_of_pefts(tmp_path, family):
    config = FAMILIES[family].config()
    structure = structure_of(config)
    family_on_vllm.write_adapter(tmp_path / "adapter", config, structure, 4)
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), str(tmp_path / "adapter"))
    adapted = [value for name, value in policy.named_parameters() if "lora_B" in name]
    assert len(adapted) == len(structure.windows) * len(structure.linears)
    assert all(value.abs().sum() > 0 for value in adapted)  # an adapter that PEFT misses stays 0


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_the_config_for_vllm_is_the_models(tmp_path, weights):
    config = FAMILIES["qwen3_moe"].config()
    family_on_vllm.write_config(tmp_path / "model", config, weights)
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["architectures"] == ["Qwen3MoeForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path / "model").num_experts == 4
    assert ("re:.*mlp.gate$" in stored["quantization_config"]["ignore"]) if weights == "nvfp4" else True
    assert ("quantization_config" in stored) == (weights == "nvfp4")
