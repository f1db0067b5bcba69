"""The DAG with a reward and a data set of the user, by import path, and answers in tags."""

import json

import pytest
import yaml

from .conftest import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DATA = """
def rows():
    return [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(40)]
"""
REWARD = """
from own_lengths import of

def length(answer, problem):
    return float(of(answer.text))
"""
LENGTHS = "def of(text):\n    return len(text)\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = copy_tree(tmp_path_factory.mktemp("own") / "qerl")
    (tree.folder / "own_data.py").write_text(DATA)
    (tree.folder / "own_reward.py").write_text(REWARD)
    (tree.folder / "own_lengths.py").write_text(LENGTHS)
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["datasets"]["sums"] = {
        "format": "gsm8k",
        "answer": "tags",
        "instruction": "Write <think>steps</think><answer>number</answer>.",
        "origin": {"source": "python", "function": "own_data:rows"},
    }
    values["experiments"]["main"]["base"] |= {"dataset": "sums", "reward": {"function": "own_reward:length"}}
    values["evaluation"]["tasks"] = [{"dataset": "sums", "harness": "lm-eval"}]
    (tree.folder / "own.yaml").write_text(yaml.safe_dump(values))
    return tree


TRAINED = "results/micro/evaluate/main-nvfp4-lora-seed0/result.json"
ARGUMENTS = ("--configfile", "own.yaml", "--", TRAINED, "results/micro/profile/step.json")


def replanned(tree, file, old, new):
    path = tree.folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    planned = tree.planned(*ARGUMENTS)
    path.write_text(text)
    return planned


def test_own_functions_run_and_their_changes_rerun_what_they_decide(tree):
    tree.snakemake(*ARGUMENTS)
    metrics = (tree.folder / "results/micro/train/main-nvfp4-lora-seed0/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["reward/custom"] > 0
    meta = json.loads((tree.folder / "results/micro/data/sums/dataset.json").read_text())
    assert (meta["answer"], sum(meta["rows"].values())) == ("tags", 40)
    assert tree.planned(*ARGUMENTS) == {}
    assert replanned(tree, "own_reward.py", "def length", "# a remark\ndef length") == {}
    rewarded = {"train": 1, "evaluate": 1, "profile": 1}
    assert replanned(tree, "own_reward.py", "float(of(", "-float(of(") == rewarded
    assert replanned(tree, "own_lengths.py", "len(text)", "-len(text)") == rewarded
    assert replanned(tree, "own_data.py", "n + 1", "n + 2") == {"prepare_data": 1, **rewarded}


def test_a_missing_function_stops_the_workflow_before_any_job(tree):
    (tree.folder / "gone.yaml").write_text((tree.folder / "own.yaml").read_text().replace(":length", ":gone"))
    run = tree.snakemake("--configfile", "gone.yaml", check=False)
    assert run.returncode != 0
    assert "has no function gone" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
