"""A bf16 checkpoint is a folder of links to its source."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl.settings.run import RunSettings
from qerl.workflow.bases import link_checkpoint, make_checkpoint
from qerl.workflow.run_folder import base_stage
from tests.tiny import tiny_qwen2


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


def test_a_run_by_hand_links_to_a_model_that_is_named_by_a_relative_path(tmp_path, monkeypatch):
    tiny_qwen2(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    settings = SimpleNamespace(settings=RunSettings(model="m", dataset="d", weights="bf16"), out=Path("out"))
    base_stage(settings, Path("model")).make(make_checkpoint)
    linked = list((tmp_path / "out/checkpoint").iterdir())
    assert {file.name for file in linked} == {file.name for file in (tmp_path / "model").iterdir()}
    assert all(file.is_file() for file in linked)
