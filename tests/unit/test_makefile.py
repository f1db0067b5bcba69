"""The README's make targets: the commands that make gives to the shell."""

import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["models/mine", "my models/a b", "it's; rm -rf *"])
def test_paths_of_ones_own_reach_the_workflow_as_they_are(model):
    told = subprocess.run(
        ["make", "--dry-run", "reproduce", f"MODEL={model}", "PROBLEMS=my problems.jsonl"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    [train] = [shlex.split(line) for line in told if line.startswith("snakemake ")]
    keys = [f"model={model}", "problems=my problems.jsonl"]
    assert train[train.index("--config") + 1 :] == keys
    [report] = [line for line in told if line.startswith("folder=")]
    where = shlex.split(report.partition("$(")[2].partition(") &&")[0])
    assert where[:2] == ["qerl", "where"]
    assert where[3:] == keys
