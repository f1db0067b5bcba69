"""Merged exports: one checkpoint, its stored loss, and a card."""

import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import qerl
from qerl.checkpoints.files import CheckpointError
from qerl.models.export import trained_tensors
from qerl.results.schema import MergedExport, read
from qerl.settings.base import ConfigError

IDS = torch.tensor([[5, 6, 7, 40, 41, 8]])


@torch.no_grad()
@pytest.mark.parametrize(("weights", "near"), [("bf16", 2e-3), ("nvfp4", 0.05)])
def test_one_checkpoint_with_its_measured_loss(run, tmp_path, monkeypatch, weights, near):
    monkeypatch.chdir(tmp_path)
    made = qerl.export_merged(run.folder, "merged", weights, problems=2)
    read(MergedExport, tmp_path / "merged/merged.json")
    loss = made.loss
    assert (made.weights, made.base_weights, loss.split, loss.problems) == (weights, "nvfp4", "validation", 2)
    assert 2 * loss.repeats <= loss.tokens <= 2 * loss.repeats * 6  # the run's max_tokens
    assert 0 < loss.kl.low <= loss.kl.mean <= loss.kl.high < near
    text = (tmp_path / "merged/README.md").read_text()
    assert f"| {loss.kl.mean:.3g} [{loss.kl.low:.3g}, {loss.kl.high:.3g}] |" in text
    assert str(tmp_path) not in text
    assert "/tiny-model" not in text
    card = ModelCard.load(tmp_path / "merged/README.md").data
    assert card.base_model_relation == {"bf16": "finetune", "nvfp4": "quantized"}[weights]
    assert card.eval_results is None  # the scores are of the policy with its adapter
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["model"].dtype == torch.bfloat16
    ours = run.policy.lm(IDS).logits.log_softmax(-1)
    torch.testing.assert_close(names["model"](IDS).logits.float().log_softmax(-1), ours, atol=10 * near, rtol=0)


def test_a_trained_norm_is_in_the_checkpoint_without_noise(run, tmp_path):
    qerl.export_merged(run.folder, tmp_path / "merged", problems=1)
    norms, _ = trained_tensors(run.adapter)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    for name, tensor in norms.items():
        assert torch.equal(model.get_parameter(name), tensor.bfloat16())


def test_mistakes_are_sentences_and_leave_no_folder(run, tmp_path):
    data = shutil.copytree(run.folder, tmp_path / "run", symlinks=True) / "data"
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists already"):
        qerl.export_merged(run.folder, tmp_path / "there")
    meta = (data / "dataset.json").read_text()
    (data / "dataset.json").write_text(re.sub(r'"validation": \d+', '"validation": 0', meta))
    with pytest.raises(ConfigError, match=r"no validation problems to measure on; give another split \(test\)"):
        qerl.export_merged(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
