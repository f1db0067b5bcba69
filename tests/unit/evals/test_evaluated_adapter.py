"""The rule of evaluation scores the trained policy, and not its base, as upstream's evaluation does."""

import json

import pytest
import torch

from qerl.data.sources import prepare
from qerl.evals.evaluate import evaluate_policy
from qerl.jobs import EvaluateJob
from qerl.models.policy import with_adapter
from qerl.settings.data import DatasetSettings, Generated
from qerl.settings.run import AdapterSettings, SamplingSettings
from qerl.settings.workflow import EvaluationSettings, TaskSettings
from tests.tiny import tiny_qwen2, write_template


@pytest.mark.parametrize("changed", ["lora", "norm"])
def test_the_adapter_and_the_trained_norms_are_applied(tmp_path, changed):
    base = tiny_qwen2(tmp_path / "base")
    write_template(base)
    prepare(DatasetSettings(format="gsm8k", origin=Generated(train=4, validation=4, test=4)), tmp_path / "data")
    torch.manual_seed(0)
    policy = with_adapter(base, AdapterSettings(rank=4), "float32", 0, torch.device("cpu"))
    for name, parameter in policy.trainable():
        parameter.data += torch.randn_like(parameter) if changed in name else 0
    policy.save(tmp_path / "policy")
    tasks = [TaskSettings(dataset="sums", harness="qerl")]
    sampling = SamplingSettings(temperature=1.0, max_tokens=6)  # draws of one seed
    settings = EvaluationSettings(tasks=tasks, sampling=sampling, repeats=1, dtype="float32")
    texts = []
    for trained in (None, tmp_path / "policy"):
        paths = {"checkpoint": base, "trained": trained, "data": {"sums": tmp_path / "data"}}
        out = tmp_path / ("base-result" if trained is None else "result")
        evaluate_policy(EvaluateJob(policy={"stored": "p"}, settings=settings, out=out, **paths))
        texts.append([json.loads(line)["completion"] for line in (out / "samples.jsonl").open()])
    assert len(texts[0]) == 4
    assert texts[0] != texts[1]
