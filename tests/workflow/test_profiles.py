"""The profiles of clusters, by a dry run with their executor's plugin, where it is installed."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    find_spec("snakemake_executor_plugin_slurm") is None, reason="snakemake-executor-plugin-slurm isn't installed"
)
def test_the_profile_for_slurm_has_the_options_of_its_plugin(tree):
    """Snakemake refuses options that the executor doesn't have. The jobs are those without the profile."""
    config = ("--configfile", "config/mini.yaml")
    assert tree.planned("--profile", "profiles/slurm", *config) == tree.planned(*config)
