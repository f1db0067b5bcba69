"""Scores in the hub's formats, read by the hub's own library."""

import yaml
from huggingface_hub import ModelCardData

from qerl.publishing import RunScore, model_index
from qerl.results.schema import Machine, PreparedDataset, Provenance, TaskScore
from qerl.results.statistics import Interval
from qerl.settings.run import SamplingSettings

COMMIT = "a" * 40
GSM8K = {"source": "hub", "repo": "openai/gsm8k", "subset": "main", "revision": COMMIT}
SPLITS = {"splits": {"train": "train", "test": "test"}}


def score(origin, trained=True, task=None):
    data = PreparedDataset(
        format="gsm8k", instruction="", answer="native", rows={"test": 9}, sha256={}, columns={}, filter={},
        origin=origin, repository_files={},
    )  # fmt: skip
    stamp = Provenance(commit=None, dirty=None, machine=Machine(label="one"), time="2026-11-23T10:00:00+00:00")
    sampling = SamplingSettings(temperature=0.6, top_p=0.95, max_tokens=8)
    own = TaskScore(
        harness="lm-eval", harness_version="0.4", problems=9, repeats=4, accuracy=0.625, task=task, sampling=sampling
    )
    return RunScore("gsm8k", trained, own, Interval(0.625, 0.55, 0.7), data, stamp)


def test_the_model_index_has_the_trained_policys_scores():
    index = model_index([score(GSM8K | SPLITS), score(GSM8K | SPLITS, trained=False)])
    stored = yaml.safe_load(ModelCardData(eval_results=index, model_name="mine").to_yaml())["model-index"]
    [entry] = stored[0]["results"]
    assert entry["dataset"] == {
        "name": "openai/gsm8k", "type": "openai/gsm8k", "config": "main", "split": "test", "revision": COMMIT
    }  # fmt: skip
    assert entry["metrics"][0]["value"] == 0.625
    [local] = model_index([score({"source": "local", "path": "/data/mine.jsonl"})])
    assert (local.dataset_name, local.dataset_revision) == ("mine.jsonl", None)
