"""A run with trackers: the same policy and metrics as without, and one record through kills."""

import json

import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl.host.provenance import decides
from qerl.rl.parallel import Processes
from qerl.rl.train import Trainer, _trackers, train_run
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.jobs import SETTINGS, train_job, write_inputs

TIMING = ("seconds/", "tokens_per_second/", "memory_bytes")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def job(inputs, folder, name, **changes):
    settings = parse(RunSettings, {**SETTINGS, "checkpoint_every": 2, **changes}, "test")
    return train_job(settings, inputs / "base", inputs / "data", folder / "work" / name, folder / name)


def untimed(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in rows]


def scalars(tracked):
    (folder,) = (tracked / "tensorboard").iterdir()  # one record, however often the run was started
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_trackers_change_nothing_and_have_every_step_once(inputs, tmp_path, monkeypatch):
    """The tracked run is killed in step 4, after the checkpoint of step 2."""
    monkeypatch.setenv("QERL_COMMIT", "test")
    plain, tracked = job(inputs, tmp_path, "plain"), job(inputs, tmp_path, "tracked", track=["tensorboard"])
    train_run(plain)
    with monkeypatch.context() as patch:
        step = Trainer.step
        killed = lambda self, n, *rest: step(self, n, *rest) if n < 4 else (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(tracked)
    assert [step for step, _ in scalars(tracked.tracked)["train/reward"]] == [1, 2, 3]
    train_run(tracked)
    assert untimed(tracked.out) == untimed(plain.out)
    policies = [load_file(one.out / "policy/adapter_model.safetensors") for one in (plain, tracked)]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    logged = scalars(tracked.tracked)
    rows = untimed(tracked.out)
    for name, key in {"train/completions/mean_length": "completion_length", "train/loss": "loss"}.items():
        assert logged[name] == [(row["step"], pytest.approx(row[key])) for row in rows]


def test_a_run_has_its_result_before_trackers_are_closed(inputs, tmp_path, monkeypatch):
    """A library may wait for its server for hours, within which a cluster may end the job."""
    tracked, closed = job(inputs, tmp_path, "run", track=["tensorboard"]), []
    finish = TensorBoardTracker.finish

    def finishing(tracker):
        closed.append((tracked.out / "run.json").is_file())
        finish(tracker)

    monkeypatch.setattr(TensorBoardTracker, "finish", finishing)
    train_run(tracked)
    assert closed == [True]


def test_trackers_are_no_change_of_a_run(inputs, tmp_path):
    """Neither for a finished run, nor for the code that a rule runs."""
    plain = job(inputs, tmp_path, "run")
    tracked = job(inputs, tmp_path, "run", track=["wandb", "mlflow"])
    moved = tracked.model_copy(update={"tracked": tmp_path / "elsewhere"})
    assert plain.deciding == tracked.deciding == moved.deciding
    assert decides("qerl.rl.train")
    assert not decides("qerl.trackers")


def test_a_record_has_no_folder_of_this_machine(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.rl.train.Trackers", lambda _, record: record)
    one = job(inputs, tmp_path, "named", track=["wandb"], model=str(inputs / "base"))
    settings = _trackers(one, tmp_path, Processes()).settings
    assert settings["model"] == "base"
    assert str(tmp_path) not in json.dumps(settings)
    assert settings["optimizer"] == one.settings.optimizer.model_dump(mode="json")
