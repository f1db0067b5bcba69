"""The dose of an error against stock PyTorch, on policies whose difference is known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from typer.testing import CliRunner

import qerl
from qerl.cli.commands import app
from qerl.data.sources import local_dataset, prepare
from qerl.evals.divergence import Assay
from qerl.evals.evaluate import EvaluationError
from qerl.models.policy import load_policy
from qerl.rl.noise import standard_normal
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.workflow import EvaluationSettings
from tests.tiny import tiny_qwen2, write_template

CPU = torch.device("cpu")
SETTINGS = parse(
    EvaluationSettings,
    {
        "tasks": [{"dataset": "problems", "harness": "qerl"}],
        "sampling": {"temperature": 1.5, "max_tokens": 5},
        "repeats": 3,
        "dtype": "float32",
    },
    "settings",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = "".join(f'{{"question": "What is {n}?", "answer": "#### {n}"}}\n' for n in range(4))
    (folder / "rows.jsonl").write_text(rows)
    values = local_dataset(folder / "rows.jsonl", validation_fraction=0, test_fraction=1)
    prepare(parse(DatasetSettings, values, "data"), folder / "prepared")
    return folder / "prepared"


def policy(folder: Path, seed: int):
    write_template(tiny_qwen2(folder, seed=seed, initializer_range=0.1))
    return load_policy(folder, None, "float32", CPU)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [policy(folder / str(seed), seed) for seed in (0, 1)]


@torch.no_grad()
def compared(policies, prompts, drawn):
    """Of each problem's completions: KL and change of entropy of each token."""
    for prompt, group in zip(prompts, drawn, strict=True):
        parts = []
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            logits = [p.lm(ids).logits[0, len(prompt) - 1 : -1].double() for p in policies]
            one, two = (Categorical(logits=each) for each in logits)
            parts.append((kl_divergence(one, two), two.entropy() - one.entropy()))
        yield parts


def dose_by_hand(assay: Assay, other) -> tuple[float, float]:
    """KL of a completion and change of a token's entropy at temperature 1, as means over problems."""
    groups = list(compared((assay.policy, other), assay.prompts, assay.drawn))
    kl = [np.mean([kl.sum().item() for kl, _ in parts]) for parts in groups]
    change = [torch.cat([change for _, change in parts]).mean().item() for parts in groups]
    return float(np.mean(kl)), float(np.mean(change))


def test_dose_is_kl_of_a_completion_and_change_of_entropy(policies, data):
    assay = Assay(policies[0], data, SETTINGS)
    dose = assay.dose(policies[1])
    assert [dose.kl.mean, dose.entropy_change.mean] == pytest.approx(dose_by_hand(assay, policies[1]), rel=1e-4)
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
        expected.append(dose_by_hand(assay, noisy))
    assert [dose.kl.mean, dose.entropy_change.mean] == pytest.approx(np.mean(expected, axis=0), rel=1e-3)
    assert assay.dose(same).kl.mean == 0


def test_the_command_measures_rounding_and_each_sigma(tmp_path, monkeypatch):
    write_template(model := tiny_qwen2(tmp_path / "model", initializer_range=0.1))
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "#### {2 * n}"}}\n' for n in range(3)))
    options = {"count": 2, "completions": 2, "max_tokens": 4, "dtype": "float32"}
    doses = qerl.measure_dose(model, file, sigmas=[0.3], **options)
    assert 0 < doses[0.0].kl.mean < doses[0.3].kl.mean
    assert doses[0.0].problems == 2
    words = ["measure-dose", str(model), *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]
    tables = []
    monkeypatch.setattr("qerl.cli.commands.print_table", lambda _, rows: tables.append(rows))
    drawn = "{format: gsm8k, origin: {source: generated, train: 4, validation: 2, test: 3}}"
    for given in ([f"--problems={file}", "--sigma=0.3"], [f"--dataset={drawn}"]):
        assert CliRunner().invoke(app, [*words, *given]).exit_code == 0
    assert [float(row["KL of a completion"].split()[0]) for row in tables[0]] == pytest.approx(
        [doses[sigma].kl.mean for sigma in (0.0, 0.3)], rel=5e-3
    )
    asked = qerl.measure_dose(model, [{"prompt": "2 + 2?"}], **options)[0.0]  # without an answer
    assert (asked.problems, np.isnan(asked.kl.low)) == (1, True)
    (tmp_path / "data").mkdir()
    file.rename(tmp_path / "data/train.jsonl")
    with pytest.raises(EvaluationError, match="no test problems"):  # before the model is looked for
        qerl.measure_dose(tmp_path / "none", tmp_path / "data")
    with pytest.raises(ConfigError, match=r"sigmas=.*must be positive"):
        qerl.measure_dose(model, file, sigmas=[-1.0])
