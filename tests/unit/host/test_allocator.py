"""A training joins free parts of GPU memory, unless the user, WSL or vLLM in its process decides otherwise."""

import os

import pytest

from qerl.cli.workflow import run_job
from qerl.host.lease import VARIABLES, join_free_memory
from qerl.jobs import TrainJob
from qerl.settings.run import RunSettings
from tests.jobs import SETTINGS, train_job

SEEN: dict[str, str | None] = {}


def note(job):
    """In place of a training."""
    SEEN[job.id] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(("engine", "value"), [("native", "expandable_segments:True"), ("vllm", None)])
def test_a_training_has_it_before_its_code_is_imported(engine, value, tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the job sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(TrainJob, "does", f"{__name__}:note")
    rollout = {**SETTINGS["rollout"], "engine": engine}
    adapter = {"rank": 4, "train_norms": False}
    settings = RunSettings.model_validate(
        {**SETTINGS, "rollout": rollout, "adapter": adapter, "noise": {"schedule": "off"}}
    )
    run_job(train_job(settings, tmp_path, tmp_path, tmp_path / "work", tmp_path / engine))
    assert SEEN[engine] == value


def test_a_users_configuration_and_wsl_stay_as_they_are():
    environment: dict[str, str] = {}
    join_free_memory(environment, "5.15.90.1-microsoft-standard-wsl2")
    assert environment == {}
    for name in VARIABLES:
        given = {name: "max_split_size_mb:128"}
        join_free_memory(given, "6.8.0-generic")
        assert given == {name: "max_split_size_mb:128"}
