"""A study's rules: the page of finished runs and that of committed data start no run; the whole one starts all."""

import shutil

import pytest

from qerl.results.study_data import write_study
from tests.unit.study.test_dose import study
from tests.workflow.conftest import ROOT, copy_tree

pytestmark = pytest.mark.slow


def test_pages_of_finished_runs_and_of_committed_data_start_no_run(tmp_path):
    tree = copy_tree(tmp_path / "qerl")
    costs = tree.folder / "results/reference"
    costs.mkdir(parents=True)
    for file in (ROOT / "results/reference").glob("*.csv"):
        shutil.copy(file, costs)
    config = ("--configfile", "config/dose.yaml")
    finished = {"list_results": 1, "gather_study": 1, "study_page": 1, "study_finished": 1}
    assert tree.planned(*config, "--", "study_finished") == finished
    write_study(tree.folder / "results/reference/dose/some", study(seeds=1, problems=2))
    (tree.folder / "results/reference/dose/some/runs.parquet").unlink()
    lacking = tree.snakemake("--dry-run", *config, "--", "study_published", check=False)
    assert "results/reference/dose/some/runs.parquet" in lacking.stdout + lacking.stderr
    write_study(tree.folder / "results/reference/dose/some", study(seeds=1, problems=2))
    assert tree.planned(*config, "--", "study_published") == {"study_published": 1}


def test_the_small_study_ends_in_its_page(tree):
    planned = tree.planned("--configfile", "config/dose-small.yaml")
    assert (planned["gather_study"], planned["study_page"], planned["measure_dose"]) == (1, 1, 2)
    assert planned["train"] == 10
