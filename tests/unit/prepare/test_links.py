"""A bf16 checkpoint is a folder of links to its source."""

import shutil
from pathlib import Path

import pytest

from qerl.prepare.base_checkpoint import link_checkpoint


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results/models/m"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    (folder / ".snakemake_timestamp").write_text("")
    return Path("results/models/m")


def test_a_moved_tree_has_the_links_of_its_own(source, tmp_path):
    link_checkpoint(source, Path("results/quantize/m-bf16/checkpoint"))
    shutil.copytree("results", "moved/results", symlinks=True)
    shutil.rmtree("results")
    linked = tmp_path / "moved/results/quantize/m-bf16/checkpoint"
    assert [file.name for file in linked.iterdir()] == ["model.safetensors"]
    assert (linked / "model.safetensors").read_text() == "weights"


def test_links_to_a_folder_of_the_users_stay_where_they_point(source, tmp_path):
    link_checkpoint(source.absolute(), tmp_path / "results/checkpoint")
    shutil.move("results/checkpoint", "elsewhere")
    assert (tmp_path / "elsewhere/model.safetensors").read_text() == "weights"
