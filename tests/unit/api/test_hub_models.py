"""Models of the hub by hand: what is downloaded, in which order, and what is refused before."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

import qerl
from qerl.checkpoints.files import CheckpointError
from qerl.data.hub import CONFIG_FILES
from qerl.settings.base import ConfigError
from tests.families import FAMILIES
from tests.hub_layouts import into_cache

#: As transformers states weights in NF4.
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
}


def hub_of(folder, monkeypatch):
    """A hub whose only model is in a folder; returns the arguments of each download."""
    downloads = []
    monkeypatch.setattr("qerl.workflow.bases.hub_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **how: downloads.append(how) or folder)
    return downloads


def test_a_model_of_the_hub_is_fetched_at_its_revision(monkeypatch, model):
    downloads = hub_of(model, monkeypatch)
    assert qerl.load("org/name@abc", dtype="float32").lm.config.hidden_size == 64
    places = [(how.pop("revision"), how.pop("local_dir"), how.pop("local_files_only")) for how in downloads]
    assert places == [("abc", None, False)] * 2
    published = ["model.safetensors", "original/model.safetensors", "metal/model.bin", "original/config.json"]
    published += ["consolidated.safetensors", "config.json"]  # the former as Mistral has it for other software
    downloaded = [list(filter_repo_objects(published, **how)) for how in downloads]
    assert downloaded == [["config.json"], ["model.safetensors", "config.json"]]


def test_a_model_of_the_hub_that_does_not_fit_is_refused_before_its_weights_are_downloaded(
    values, tmp_path, monkeypatch
):
    folder = tmp_path / "model"
    folder.mkdir()
    downloads = hub_of(folder, monkeypatch)
    for change, other, said in (
        ({"model_type": "gpt2"}, {}, "model_type='gpt2'"),
        ({"attention_dropout": 0.5}, {}, "dropout of 0.5 in attention"),
        ({"layer_norm_eps": 1e-5, "model_type": "starcoder2"}, {}, "adapter.train_norms needs an RMSNorm"),
        ({}, {"adapter": {"targets": ["experts.up_proj", "experts.gate_proj"]}}, "stock PEFT is tested"),
        ({"quantization_config": NF4}, {}, "set weights=nf4"),
    ):
        config = {**FAMILIES["llama"].config().to_dict(), **change}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=said):
            qerl.train({**values, "model": "org/name", **other})
        assert [how["allow_patterns"] for how in downloads] == [CONFIG_FILES]
        downloads.clear()
    assert not Path(values["out"]).exists()


def test_a_repository_without_a_model_is_a_sentence(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    downloads = hub_of(folder, monkeypatch)
    with pytest.raises(ConfigError, match=r"org/name has no config\.json at revision v1; name a model"):
        qerl.load("org/name@v1")
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an adapter, which is no checkpoint"):
        qerl.load("org/name")
    assert [how["allow_patterns"] for how in downloads] == [CONFIG_FILES, CONFIG_FILES]


def test_a_model_in_the_hubs_cache_is_taken_without_a_network(model, tmp_path, monkeypatch):
    into_cache(shutil.copytree(model, tmp_path / "plain"), "models--org--name", tmp_path)
    monkeypatch.setattr("qerl.workflow.bases.hub_unreachable", lambda: "no connection to X")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert qerl.load("org/name", dtype="float32").lm.config.hidden_size == 64


def test_without_a_network_a_model_of_the_hub_is_refused_by_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("qerl.workflow.bases.hub_unreachable", lambda: "no connection to X")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"can't download org/name \(no connection to X\): .*`hf download org/name"):
        qerl.load("org/name")
