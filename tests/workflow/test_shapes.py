"""The speed grid in the workflow: points are measured once, and tables use existing points without a measurement."""

import shutil

import pytest
import yaml

from tests.conftest import nightly
from tests.workflow.conftest import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
POINTS = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "prompt": [8], "tokens": 4}
MIX = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "prompts": 2, "group_size": 2}
MIX |= {"prompt": [4, 8], "median": 4, "tokens": 8, "repeats": 1}
ARGUMENTS = ("--configfile", "speed.yaml")


@nightly
def test_points_are_measured_once_and_tables_use_existing_points(tmp_path):
    tree = copy_tree(tmp_path / "qerl")
    values = {
        "name": "speed",
        "shapes": {"samples": ["committed"], "decode": [POINTS | {"sequences": [1, 2]}], "mixes": [MIX]},
    }
    (tree.folder / "speed.yaml").write_text(yaml.safe_dump(values))
    tree.snakemake(*ARGUMENTS, "--", "shapes_measure")
    assert tree.planned(*ARGUMENTS, "--", "shapes_measure") == {}
    # On another machine, or where the code has changed since: tables, and no measurement.
    results = tree.folder / "results/speed"
    (tree.folder / "committed").mkdir()
    for file in results.glob("points/*/*.json"):
        shutil.move(file, tree.folder / "committed")
    shutil.rmtree(results / "points")
    code = tree.folder / "qerl/bench/decode.py"
    code.write_text(code.read_text() + "\n_CHANGED = 1\n")
    assert tree.planned(*ARGUMENTS) == {
        **{"default": 1, "shapes": 1, "list_results": 1, "collect_results": 1, "write_report": 1}
    }
    tree.snakemake(*ARGUMENTS)
    assert "native" in (results / "tables/decode-tiny-8x4.md").read_text()
    assert "native" in (results / "tables/mixes.md").read_text()


def test_prompts_are_jobs_of_the_workflow(tree, tmp_path):
    asked = {"sizes": ["tiny"], "weights": ["nvfp4"], "ranks": [0, 4], "points": [[1, 8]]}
    file = tmp_path / "prompts.yaml"
    file.write_text(yaml.safe_dump({"name": "refills", "shapes": {"samples": ["committed"], "prompts": [asked]}}))
    planned = tree.planned("--configfile", str(file), "--", "shapes_measure")
    assert planned == {"shape_point": 2, "shapes_measure": 1}
