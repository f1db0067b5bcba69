"""The loss of a merge against stock PyTorch and numbers by hand, on policies whose difference is known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from qerl.data.prompts import prompt_ids
from qerl.data.sources import local_dataset, prepare, read_meta, read_split
from qerl.evals.divergence import merge_loss
from qerl.models.policy import load_policy
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import parse
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


def odd(policy, completion):
    """Whether a completion has an odd number of different characters, which stands for a right answer."""
    return len(set(policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True))) % 2


@torch.no_grad()
def test_kl_agreement_and_accuracy_are_those_of_stock_pytorch(policies, data, monkeypatch):
    monkeypatch.setattr("qerl.evals.divergence.is_correct", lambda text, *_: len(set(text)) % 2 == 1)
    loss = merge_loss(*policies, data, SETTINGS, most=3)
    problems, instruction = read_split(data, "test")[:3], read_meta(data).instruction
    prompts = [prompt_ids(policies[0].tokenizer, problem.question, instruction) for problem in problems]
    params = SamplingParams(max_tokens=5, temperature=1.5, count=3)
    drawn, others = (EagerSampler(policy).generate(prompts, params) for policy in policies)
    means, same = [], []
    for prompt, group in zip(prompts, drawn, strict=True):
        kl = []
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            ours, theirs = (log_softmax(p.lm(ids).logits[0, len(prompt) - 1 : -1].double(), -1) for p in policies)
            kl += kl_div(theirs, ours, reduction="none", log_target=True).sum(-1).tolist()
            same += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
        means.append(np.mean(kl))
    shares = [[np.mean([odd(policies[0], c) for c in group]) for group in groups] for groups in (drawn, others)]
    assert loss.kl.mean == pytest.approx(np.mean(means), rel=1e-4)
    assert loss.kl.low < loss.kl.mean < loss.kl.high
    assert (loss.tokens, loss.same_token) == (len(same), pytest.approx(np.mean(same)))
    assert [loss.accuracy.mean, loss.accuracy_merged.mean] == pytest.approx(np.mean(shares, axis=1))
    assert loss.difference.mean == pytest.approx(np.mean(shares[1]) - np.mean(shares[0]))
    assert 0 < np.mean(shares) < 1


def test_a_model_has_no_loss_against_itself(policies, data):
    loss = merge_loss(policies[0], policies[0], data, SETTINGS)
    assert (loss.kl.mean, loss.same_token, loss.problems) == (0, 1, 4)
    # Four problems that agree don't show that no problem would differ.
    assert loss.difference.mean == 0
    assert loss.difference.low == -loss.difference.high < 0
