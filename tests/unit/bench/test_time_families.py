"""The timing of options that the speed grid lacks, on a small mixture: its files."""

import pytest
import torch

from qerl.bench.decode.points import Timing
from qerl.bench.grpo_step.work import memory_of
from qerl.checkpoints.published import PUBLISHED
from qerl.results import catalogue
from qerl.results.files import read
from qerl.results.schema.families import FamilyDecodeResult, FamilyStepResult
from qerl.results.schema.speed import TimedStep
from tests.families import FAMILIES
from tests.gpu import time_families


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    monkeypatch.setattr(time_families, "DEVICE", torch.device("cpu"))
    monkeypatch.setitem(PUBLISHED, "mixture", FAMILIES["qwen3_moe"].config(vocab_size=256).to_dict())


def test_each_number_of_sequences_is_a_stored_point(tmp_path, monkeypatch):
    def drawn(draw, sequences, prompt, tokens, vocabulary):
        """One draw, without a clock."""
        assert draw([[vocabulary - 1] * prompt] * sequences, tokens, 0) == sequences * tokens
        return Timing([7.0 * sequences], [0.5])

    monkeypatch.setattr(time_families, "timed", drawn)
    time_families.main(tmp_path, models="mixture", sequences="1,2", tokens=4, prompt=5, experts=True)
    [file] = tmp_path.iterdir()
    assert file.name == "decode-native-mixture-nvfp4-r16-experts-5x4.json"
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
    time_families.main(tmp_path, models="mixture", weights="bf16", step=True, recompute=True)
    file = tmp_path / "step-mixture-bf16-r16-recompute.json"
    catalogue.check(file)
    result = read(FamilyStepResult, file)
    assert (result.prompts, result.group, result.completion_tokens) == (16, 8, 1024)
    assert [step.rollout for step in result.steps] == [2.0, 2.0]
    assert result.memory.without_kv_cache_bytes == 8
