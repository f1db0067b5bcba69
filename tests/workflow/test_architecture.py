"""docs/architecture.md: its picture of the DAG is Snakemake's own."""

import re

import pytest

from tests import house

pytestmark = pytest.mark.slow


def edges_of(tree, config: str) -> house.Edges:
    """The pairs (rule, rule that needs it) of a configuration."""
    graph = tree.snakemake("--rulegraph", "--configfile", f"config/{config}.yaml").stdout
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', graph)) | {"": ""}
    found = {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", graph)}
    # The entry point's target is the workflow's `all` under another name.
    return {(a, "all" if b == "default" else b) for a, b in found}


def test_the_picture_has_the_edges_that_snakemake_plans(tree):
    planned = edges_of(tree, "mini") | edges_of(tree, "ci")
    rules = {name for edge in planned for name in edge}
    drawn = {edge for edge in house.drawn("The DAG") if set(edge) <= rules}
    assert drawn == house.reduced(planned)
