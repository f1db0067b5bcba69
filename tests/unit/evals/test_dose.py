"""The dose of rounding and noise against stock PyTorch, on policies and noise that are known."""

import json

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from typer.testing import CliRunner

import qerl
from qerl.cli.commands import app
from qerl.evals.divergence import Assay
from qerl.rl.noise import standard_normal
from qerl.settings.base import ConfigError
from tests.tiny import tiny_qwen2, write_template
from tests.unit.evals.test_merge_loss import SETTINGS, data, policies, policy

__all__ = ["data", "policies"]  # fixtures


@torch.no_grad()
def by_hand(assay: Assay, other) -> tuple[float, float]:
    """KL of a completion and change of a token's entropy at temperature 1, as means over problems."""
    kl, change = [], []
    for prompt, group in zip(assay.prompts, assay.drawn, strict=True):
        pairs = []
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            pairs.append(
                [Categorical(logits=p.lm(ids).logits[0, len(prompt) - 1 : -1].double()) for p in (assay.policy, other)]
            )
        kl.append(np.mean([kl_divergence(*pair).sum().item() for pair in pairs]))
        change.append(torch.cat([two.entropy() - one.entropy() for one, two in pairs]).mean().item())
    return float(np.mean(kl)), float(np.mean(change))


def test_dose_is_kl_of_a_completion_and_change_of_entropy(policies, data):
    assay = Assay(policies[0], data, SETTINGS)
    dose = assay.dose(policies[1])
    assert [dose.kl.mean, dose.entropy_change.mean] == pytest.approx(by_hand(assay, policies[1]), rel=1e-4)
    assert dose.kl.low < dose.kl.mean < dose.kl.high
    assert (dose.problems, dose.completions) == (4, 12)
    none = assay.dose(policies[0])
    assert (none.kl.mean, none.entropy_change.mean) == (0, 0)


def test_noise_is_a_mean_over_draws_and_leaves_nothing(policies, data, tmp_path):
    assay = Assay(policies[0], data, SETTINGS)
    same = policy(tmp_path / "same", 0)
    dose = assay.dose(same, sigma=0.5)
    expected = []
    for draw in (1, 2):
        noisy = policy(tmp_path / str(draw), 0)
        for number, layer in enumerate(noisy.lm.model.layers):
            for role, norm in enumerate((layer.input_layernorm, layer.post_attention_layernorm)):
                norm.weight.data += 0.5 * standard_normal(0, draw, number, role, norm.weight.numel())
        expected.append(by_hand(assay, noisy))
    assert [dose.kl.mean, dose.entropy_change.mean] == pytest.approx(np.mean(expected, axis=0), rel=1e-3)
    assert assay.dose(same).kl.mean == 0


def test_the_command_measures_rounding_and_each_sigma(tmp_path, monkeypatch):
    model = tiny_qwen2(tmp_path / "model", initializer_range=0.1)
    write_template(model)
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"{n} + {n}?", "answer": f"#### {2 * n}"}) + "\n" for n in range(3))
    )
    asked = {"count": 2, "completions": 2, "max_tokens": 4, "dtype": "float32"}
    doses = qerl.measure_dose(model, file, sigmas=[0.3], **asked)
    assert 0 < doses[0.0].kl.mean < doses[0.3].kl.mean
    assert doses[0.0].problems == 2
    options = [f"--{key.replace('_', '-')}={value}" for key, value in asked.items()]
    tables = []
    monkeypatch.setattr("qerl.cli.commands.print_table", lambda _, rows: tables.append(rows))
    printed = CliRunner().invoke(app, ["measure-dose", str(model), f"--problems={file}", "--sigma=0.3", *options])
    assert printed.exit_code == 0
    assert [row["kl"] for row in tables[0]] == [doses[sigma].kl.mean for sigma in (0.0, 0.3)]
    drawn = "{format: gsm8k, origin: {source: generated, train: 4, validation: 2, test: 3}}"
    of_set = CliRunner().invoke(app, ["measure-dose", str(model), f"--dataset={drawn}", *options])
    assert of_set.exit_code == 0
    with pytest.raises(ConfigError, match=r"sigmas=.*must be positive"):
        qerl.measure_dose(model, file, sigmas=[-1.0])
