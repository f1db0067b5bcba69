"""Files of checkpoints, whole and sharded ones; test_resumed_runs.py and test_parallel.py continue runs from them."""

import pytest
import torch

from qerl.rl.checkpoint import Checkpoints, ResumeError, ShardedCheckpoints
from qerl.rl.parallel import Processes


def trained(value: float):
    weights = {"w": torch.nn.Parameter(torch.full((5, 3), value)), "b": torch.nn.Parameter(torch.zeros(5))}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, value)
    optimizer.step()
    return weights, optimizer


@pytest.fixture
def store(tmp_path):
    made = ShardedCheckpoints(tmp_path, "fingerprint", Processes())
    for step in (1, 2, 3):
        made.save(step, *trained(float(step)), {"rows": [step]})
    return made


@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_file_is_refused_and_the_checkpoint_before_is_as_good(store, tmp_path, name):
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    newest = tmp_path / "step-000003"
    (newest / name).write_bytes((newest / name).read_bytes()[:-9])
    with pytest.raises(ResumeError, match="step-000003 is damaged; delete it to continue from the previous"):
        store.load(*trained(7.0))
    newest.rename(tmp_path / "away")
    assert store.load(*trained(7.0)) == {"rows": [2]}


def test_a_checkpoint_of_other_settings_is_refused(store, tmp_path):
    with pytest.raises(ResumeError, match="belongs to a run with other settings; delete"):
        ShardedCheckpoints(tmp_path, "other", Processes()).load(*trained(7.0))


def test_a_full_disk_is_one_sentence(store, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.save", full)
    with pytest.raises(ResumeError, match=r"can't write the checkpoint of step 4 .*No space left on device.*make room"):
        store.save(4, *trained(4.0), {"rows": [4]})
    assert store.load(*trained(7.0)) == {"rows": [3]}


def test_whole_checkpoints_are_refused_and_kept_alike(tmp_path):
    checkpoints = Checkpoints(tmp_path, "these")
    for step in (1, 2, 3):
        checkpoints.save(step, {"rows": []})
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step-000002.pt", "step-000003.pt"]
    with pytest.raises(ResumeError, match="other settings"):
        Checkpoints(tmp_path, "those").load(torch.device("cpu"))
