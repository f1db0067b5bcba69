"""A user's own model gets settings that follow from its checkpoint, and none of the miniature's."""

import subprocess
from pathlib import Path

import pytest
import yaml

from qerl.checkpoints.files import context_length
from qerl.settings.base import ConfigError
from qerl.workflow import plan
from qerl.workflow.plan import Traits, chosen, fitting, plan_from, traits
from tests.tiny import edit_config, tiny_llama, tiny_qwen2, write_template

ROOT = Path(__file__).parents[3]
OWN = ROOT / "config/own.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tiny_qwen2(tmp_path_factory.mktemp("own") / "Own-1B", shard_size="60KB", max_position_embeddings=256)
    write_template(folder)
    return folder


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(plan, "devices", dict)


def test_traits_are_the_checkpoint_s(model, tmp_path):
    from transformers import AutoModelForCausalLM

    tied, untied = model, tiny_llama(tmp_path / "llama", max_position_embeddings=256)
    for folder in (tied, untied):
        parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
        assert traits(folder) == Traits(parameters, 256, gpu=False)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (Traits(7_600_000_000, 32768, True), ("bfloat16", 200, 1e-5, 16, 8, 1024, 4)),
        (Traits(1_500_000_000, 1024, True), ("bfloat16", 200, 1e-5, 16, 8, 512, 4)),
        (Traits(500_000_000, 32768, False), ("float32", 30, 3e-5, 4, 4, 256, 1)),
        (Traits(80_000, None, False), ("float32", 30, 1e-4, 4, 4, 256, 1)),
    ],
)
def test_size_context_and_gpu_decide(of, expected):
    run, evaluation = chosen(of)["run"], chosen(of)["evaluation"]
    rollout, rate = run["rollout"], run["optimizer"]["learning_rate"]
    batch = rollout["prompts"], rollout["group_size"], rollout["sampling"]["max_tokens"]
    assert (run["dtype"], run["steps"], rate, *batch, evaluation["repeats"]) == expected
    assert (evaluation["dtype"], evaluation["sampling"]["max_tokens"]) == (expected[0], batch[2])


def test_a_model_alone_is_a_whole_plan_without_the_miniature_s_settings(model):
    planned = plan_from({"model": str(model)}, OWN)
    settings = planned.runs["main-nvfp4-lora-seed0"].settings
    miniature = yaml.safe_load((ROOT / "config/mini.yaml").read_text())["experiments"]["main"]["base"]
    assert settings.model == "Own-1B"
    assert settings.optimizer.learning_rate == 1e-4 != miniature["optimizer"]["learning_rate"]
    assert settings.rollout.sampling.max_tokens == 128 != miniature["rollout"]["sampling"]["max_tokens"]
    told = "\n".join(fitting(planned))
    assert "a context of 256 tokens, without a GPU" in told
    assert "  optimizer.learning_rate: 0.0001\n" in told
    assert planned.config.evaluation.sampling.temperature == 0.6


def test_written_keys_override_the_fitted_ones(model):
    values = yaml.safe_load(OWN.read_text()) | {"model": str(model)}
    values["experiments"]["main"]["base"] |= {"steps": 7, "rollout.sampling.max_tokens": 9}
    values["evaluation"] |= {"repeats": 3}
    planned = plan_from(values, OWN)
    run = next(iter(planned.runs.values())).settings
    assert (run.steps, run.rollout.sampling.max_tokens, run.rollout.prompts) == (7, 9, 4)
    assert (planned.config.evaluation.repeats, planned.config.evaluation.sampling.max_tokens) == (3, 128)
    assert "  steps: 7" in fitting(planned)


def test_a_model_may_be_written_into_the_configuration(model):
    values = yaml.safe_load(OWN.read_text()) | {"models": {"mine": {"source": "local", "path": str(model)}}}
    values["experiments"]["main"]["base"] |= {"model": "mine"}
    assert {run.settings.dtype for run in plan_from(values, OWN).runs.values()} == {"float32"}


def test_without_a_model_a_sentence_says_how_to_give_one():
    with pytest.raises(ConfigError, match=r"give one as `model=FOLDER` \(make: MODEL=FOLDER\)"):
        plan_from({}, OWN)


@pytest.mark.parametrize(
    ("given", "used"),
    [((), "mini"), (("PROBLEMS=p",), "mini"), (("MODEL=m",), "own"), (("MODEL=m", "PROBLEMS=p"), "own")],
)
def test_make_takes_the_configuration_of_real_models_for_a_model(given, used):
    said = subprocess.run(["make", "-n", "reproduce", *given], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"--configfile config/{used}.yaml" in said.stdout
    assert f"qerl where config/{used}.yaml" in said.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False}, 32768),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        # As Qwen's model cards have it, and as Transformers has it.
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({}, None),
    ],
)
def test_the_context_is_the_one_that_engines_take(changes, expected):
    assert context_length(changes) == expected


def test_a_context_of_a_checkpoint_that_says_none_is_left_open(tmp_path):
    folder = tiny_qwen2(tmp_path / "m")
    edit_config(folder, max_position_embeddings=None)
    assert traits(folder).context is None
