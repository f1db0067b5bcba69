"""`qerl doctor` on faked GPUs."""

import json
from importlib.metadata import version

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement
from typer.testing import CliRunner

from qerl import doctor
from qerl.checkpoints.files import CheckpointError
from qerl.checkpoints.shapes import ModelShape
from qerl.cli.commands import app
from qerl.doctor import candidate, diagnose, serving, unfit_libraries
from qerl.host.lease import Gpu
from qerl.models.policy import choose_device
from qerl.models.quantize import quantize_checkpoint
from qerl.models.structure import structure_of
from qerl.settings.base import ConfigError
from tests.families import FAMILIES
from tests.tiny import tiny_decoder, tiny_family, tiny_qwen2

#: Which class multiplies packed weights, by compute capability (docs/kernels.md).
NVFP4 = {(8, 0): "PortableLinear", (8, 9): "PortableLinear", (9, 0): "W4Linear", (12, 0): "PortableLinear"}


@pytest.fixture
def machine(monkeypatch):
    """A function that gives this machine GPUs of some capabilities with 24 GB each, 4 of them in use."""

    def fake(*capabilities):
        found = {
            str(i): Gpu(f"GPU-{i}", f"NVIDIA GPU-{i}", c, 24 * 10**9, 20 * 10**9) for i, c in enumerate(capabilities)
        }
        monkeypatch.setattr(doctor, "devices", lambda: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GPU-0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[0])
        # This machine may have no triton.
        monkeypatch.setattr(doctor, "requirements", lambda extra="": [])

    return fake


def configured(folder, name: str, **changes) -> str:
    """A folder with the config.json of a family alone."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[name].config(**changes).to_dict()))
    return str(folder)


@pytest.mark.parametrize(("capability", "product"), NVFP4.items())
def test_what_serves_a_gpu(machine, capability, product):
    machine(capability)
    (device,) = diagnose(candidate("7B", "nvfp4"), None).devices
    assert product in device.products
    assert device.unsupported is None
    assert (device.sampler, device.memory_gb, device.free_gb) == ("engine with CUDA graphs", 24, 20)
    assert device.attention.startswith("Triton")
    assert choose_device() == torch.device("cuda:0")


@pytest.mark.parametrize(("capabilities", "product"), [([], "PortableLinear"), ([(9, 0)], "W4Linear")])
def test_a_gpu_that_is_asked_about_is_described_instead_of_the_machine(machine, capabilities, product):
    machine(*capabilities)
    diagnosis = diagnose(None, None, 80)
    (device,) = diagnosis.devices
    assert (device.device, device.memory_gb, device.free_gb) == ("a GPU of 80 GB", 80, None)
    assert (device.sampler, device.attention[:6]) == ("engine with CUDA graphs", "Triton")
    assert product in device.products
    here = "NVIDIA GPU-0 of 24.0 GB" if capabilities else "no GPU"
    assert any(note.endswith(f"this machine has {here}") for note in diagnosis.notes)
    assert not diagnosis.problems


def test_turing_is_refused_at_start_and_by_the_doctor_in_the_same_sentence(machine):
    machine((7, 5))
    with pytest.raises(ConfigError, match=r"compute capability 7\.5.*need 8\.0.*CUDA_VISIBLE_DEVICES=") as refused:
        choose_device()
    assert diagnose(None, None).problems == [str(refused.value)]


def test_amd_is_refused_and_apple_is_told_and_the_cpu_serves(machine, monkeypatch):
    machine((9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="AMD's GPUs aren't supported"):
        choose_device()
    monkeypatch.setattr(torch.version, "hip", None)
    machine()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("cpu")
    found = diagnose(None, None)
    assert any("Apple's GPU" in note for note in found.notes)
    (device,) = found.devices
    assert (device.device, device.sampler) == ("CPU", "eager sampler, for small models")
    assert "TorchLinear" in device.products
    assert "PyTorch" in device.attention


def test_a_family_that_the_engine_refuses_gets_the_eager_sampler(machine, tmp_path):
    machine((9, 0))
    found = diagnose(candidate(configured(tmp_path, "qwen2", model_type="olmo2"), None), None)
    (device,) = found.devices
    assert (device.sampler, device.products) == (
        "eager sampler, for small models",
        "nvfp4: weights unpacked once a rollout",
    )
    assert any("the native engine supports qwen2, " in note and "'olmo2'" in note for note in found.notes)
    with pytest.raises(CheckpointError, match="GatedDeltaNet"):
        candidate(configured(tmp_path, "qwen3_next"), None)


def test_packed_delta_nets_are_those_of_the_folder_or_asked_for(machine, tmp_path):
    dense = tiny_family(tmp_path / "dense", "qwen3_5", dtype=torch.bfloat16)
    quantize_checkpoint(dense, tmp_path / "packed", "nvfp4", pack_delta_nets=True)
    machine((9, 0))
    kept, asked = candidate(str(dense), "nvfp4"), candidate(str(dense), "nvfp4", packed_nets=True)
    assert (kept.shape.nets.packed, asked.shape.nets.packed) == (False, True)
    assert candidate(str(tmp_path / "packed"), None).shape == asked.shape
    [gpu] = doctor.devices().values()
    assert "and dense layers of delta nets" in serving(gpu, kept).products
    assert "and narrow dense layers of delta nets" in serving(gpu, asked).products
    for model, weights, reason in ((dense, "bf16", "weights of bf16 are not packed"), ("7B", "nvfp4", "7B has none")):
        with pytest.raises(CheckpointError, match=f"{reason}; leave the option out"):
            candidate(str(model), weights, packed_nets=True)


@pytest.mark.parametrize(("kind", "reason"), [("minimax", "doesn't mix tokens"), ("olmo_hybrid", "GatedDeltaNet")])
def test_a_structure_is_refused_before_its_sizes_are_read(tmp_path, kind, reason):
    """Both have layers of linear attention, whose sizes are those of delta nets in Qwen3.5 alone."""
    folder = configured(tmp_path, "qwen2", model_type=kind, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(CheckpointError, match=reason):
        candidate(folder, None)


def test_keys_of_experts_that_a_model_lacks_are_no_mixture(tmp_path):
    """Gemma 4 has its number of experts under such keys, and its dense models build none."""
    keys = {"model_type": "gemma4_text", "head_dim": 16, "num_experts": 4, "top_k_experts": 2}
    model = candidate(configured(tmp_path, "qwen2", **keys), None)
    assert (model.shape.mixture, model.shape.intermediate) == (None, 128)


def test_a_mixture_has_grouped_products(machine, tmp_path):
    machine((8, 9))
    (device,) = diagnose(candidate(configured(tmp_path, "qwen3_moe", hidden_size=256), "nvfp4"), None).devices
    assert device.products == (
        "nvfp4: packed, portable kernels (PortableLinear) and grouped products of packed experts"
    )
    nf4 = diagnose(candidate(str(tmp_path), "nf4"), None)
    assert nf4.devices[0].sampler == "eager sampler, for small models"
    assert any("no grouped product of nf4 experts" in note for note in nf4.notes)


def test_missing_and_old_libraries_are_found(monkeypatch):
    wanted = [Requirement(text) for text in ("torch>=99", "qerl-has-no-such-library>=1", "numpy")]
    monkeypatch.setattr(doctor, "requirements", lambda extra="": wanted)
    old, missing = unfit_libraries()
    assert (old.library, old.installed, old.wanted) == ("torch", version("torch"), ">=99")
    assert (missing.library, missing.installed) == ("qerl-has-no-such-library", None)
    assert any("torch is" in problem for problem in diagnose(None, None).problems)


def test_a_folder_says_its_shape_and_weights(tmp_path):
    model = candidate(str(tiny_qwen2(tmp_path / "model")), None)
    assert (model.weights, model.repo) == ("nvfp4", None)
    with pytest.raises(CheckpointError, match="--model 8Q is neither a size"):
        candidate("8Q", None)


@pytest.mark.parametrize(("size", "memory", "code"), [("7B", "80", 0), ("32B", "12", 1), ("7B", None, 1)])
def test_the_exit_code_says_whether_the_step_fits(machine, size, memory, code):
    machine()
    options = ["--rank", "16", "--max-tokens", "1024", "--json", *(["--memory-gb", memory] if memory else [])]
    result = CliRunner().invoke(app, ["doctor", "--model", size, *options])
    assert result.exit_code == code, result.output
    answer = json.loads(result.stdout)
    assert bool(answer["problems"]) == bool(code)
    if memory is None:
        assert "a GPU of" in answer["problems"][0]
    else:
        assert answer["memory"]["verdict"] == ("doesn't fit" if code else "fits")


def test_norms_that_are_neither_trained_nor_noisy_are_told(tmp_path):
    told = CliRunner().invoke(app, ["doctor", "--model", str(tiny_decoder(tmp_path, "starcoder2"))])
    assert "note: adapter.train_norms needs an RMSNorm" in told.stdout
    assert "set adapter.train_norms=false, and leave noise.schedule off" in told.stdout
    assert "adapter.train_norms" not in CliRunner().invoke(app, ["doctor", "--model", "7B"]).stdout


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("qwen3_next", "glm4_moe")])
def test_shapes_of_families_have_the_weights_of_their_models(name):
    config = FAMILIES[name].config()
    assert ModelShape.of(config.to_dict()).block_weights == structure_of(config).block_weights


@pytest.mark.parametrize("kind", ["starcoder2", "glm4_moe", "youtu"])
def test_memory_is_not_predicted_for_models_with_other_layers(tmp_path, kind):
    """An MLP of two layers, blocks that differ, and latent attention."""
    values = FAMILIES[kind].values if kind in FAMILIES else {}
    folder = tiny_decoder(tmp_path, kind, **{key: value for key, value in values.items() if key != "model_type"})
    told = CliRunner().invoke(app, ["doctor", "--model", str(folder), "--rank", "16", "--max-tokens", "16"])
    assert "note: the memory isn't predicted, because the model's blocks" in told.stdout
    assert "peak of the update" not in told.stdout


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_without_a_network_a_model_of_the_hub_is_refused(no_network):
    with pytest.raises(ConfigError, match=r"can't download org/name \(no connection to http://127.0.0.1:9: .*refused"):
        candidate("org/name", None)


def test_without_a_network_a_model_in_the_hubs_cache_is_told_of(no_network, tmp_path):
    commit = "a" * 40
    cached = no_network / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    tiny_qwen2(cached / "snapshots" / commit)
    assert candidate("org/name", None).config.hidden_size == 64
