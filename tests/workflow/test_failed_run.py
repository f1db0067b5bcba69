"""The DAG with a run that is out of its time: a row of the tables, and a finished run once it has more."""

import json

import pytest
import yaml

from .conftest import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ARGUMENTS = ("--configfile", "failing.yaml", "--", "results/micro/tables/accuracy.md")


def write(tree, **changes):
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["benches"] = {}
    values["evaluation"]["tasks"] = values["evaluation"]["tasks"][:1]
    values["experiments"]["main"] |= {"arms": {"nvfp4-lora": {"weights": "nvfp4"}}, **changes}
    (tree.folder / "failing.yaml").write_text(yaml.safe_dump(values))


def row(tree) -> str:
    lines = (tree.folder / "results/micro/tables/accuracy.md").read_text().splitlines()
    return next(line for line in lines if "LoRA" in line)


def test_a_failed_run_is_a_row_where_that_is_asked_for_and_else_fails(tmp_path):
    tree = copy_tree(tmp_path / "qerl")
    write(tree, time_limit=1e-9)
    failed = tree.snakemake(*ARGUMENTS, check=False)
    assert failed.returncode != 0
    assert "over its time limit of 1e-09 h after 1 of 2 steps" in failed.stdout + failed.stderr

    write(tree, time_limit=1e-9, on_failure="row")
    tree.snakemake(*ARGUMENTS)
    assert "seed 0: timeout of 1e-09 h after 1 of 2 steps" in row(tree)
    assert tree.planned(*ARGUMENTS) == {}

    write(tree, time_limit=1.0, on_failure="row")
    tree.snakemake(*ARGUMENTS)
    assert "timeout" not in row(tree)
    result = json.loads((tree.folder / "results/micro/evaluate/main-nvfp4-lora-seed0/result.json").read_text())
    assert result["tasks"]["arithmetic"]["problems"] == 12
