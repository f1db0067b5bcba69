"""Commands outside the package: the README's make targets, and the actions of the hosted checks."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

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


def test_actions_are_pinned_by_commit_and_leave_no_credentials():
    """A tag can be moved to other code, and a stored token is there for all later steps."""
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        for step in (step for job in jobs.values() for step in job["steps"] if "uses" in step):
            action, _, commit = step["uses"].partition("@")
            assert re.fullmatch("[0-9a-f]{40}", commit), step
            if action == "actions/checkout":
                assert step["with"]["persist-credentials"] is False, file
