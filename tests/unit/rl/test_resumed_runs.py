"""Runs that are killed or whose disk is full, on a tiny policy: they continue to the bit."""

import json
import logging

import pytest
import torch

from qerl.rl.checkpoint import Checkpoints, ResumeError
from qerl.rl.thermostat import Thermostat, followed_entropies
from tests.unit.rl.tiny_trainer import CPU, PPO, kill_at, trainer, untimed, weights

pytestmark = pytest.mark.usefixtures("rewarded_characters")


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "nvfp4", "noise": {"schedule": "linear"}},
        {"weights": "bf16", "method": "full", "dtype": "bfloat16"},
        PPO,
    ],
    ids=["aqn", "full", "ppo"],
)
def test_a_killed_run_continues_bit_for_bit(checkpoints, tmp_path, monkeypatch, caplog, changes):
    whole = trainer(checkpoints, tmp_path / "whole", **changes)
    expected = whole.run()
    killed = trainer(checkpoints, tmp_path / "killed", **changes)
    kill_at(4, killed, monkeypatch)
    continued = trainer(checkpoints, tmp_path / "killed", **changes)
    torch.manual_seed(99)
    with caplog.at_level(logging.INFO):
        rows = continued.run()
    assert "continuing from step 2 of 5" in caplog.text
    assert untimed(rows) == untimed(expected)
    assert [json.loads(line)["step"] for line in (tmp_path / "killed/m.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(continued)[name]), name


#: The logits of a random policy are small: at a low temperature its entropy depends on it.
COLD = {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": 6, "temperature": 0.1}}


def following(checkpoints, work, followed):
    made = trainer(
        checkpoints, work, rollout=COLD, adapter={"rank": 4}, thermostat={"metrics": str(followed)}, checkpoint_every=1
    )
    made.thermostat = Thermostat(made.settings.thermostat, 0.1, followed_entropies(followed, 5))
    return made


def test_a_thermostat_sets_the_temperature_of_rollout_and_update(checkpoints, tmp_path, monkeypatch):
    """Sampler and trainer agree on log-probabilities at every temperature, and a killed run goes on."""
    trainer(checkpoints, tmp_path, rollout={**COLD, "sampling": {"max_tokens": 6, "temperature": 0.2}}).run()
    followed = tmp_path / "m.jsonl"
    rows = following(checkpoints, tmp_path / "whole", followed).run()
    temperatures = [row["temperature"] for row in rows]
    assert temperatures[0] == 0.1 < min(temperatures[1:])
    assert all(row["mismatch/kl"] < 1e-8 for row in rows)
    killed = following(checkpoints, tmp_path / "killed", followed)
    kill_at(3, killed, monkeypatch)
    assert untimed(following(checkpoints, tmp_path / "killed", followed).run()) == untimed(rows)


def test_a_truncated_checkpoint_is_named(checkpoints, tmp_path):
    made = trainer(checkpoints, tmp_path)
    made.run()
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ResumeError, match=newest.name):
        trainer(checkpoints, tmp_path).run()


def test_a_full_disk_is_reported_and_the_run_continues_from_the_last_good_checkpoint(checkpoints, tmp_path):
    whole = trainer(checkpoints, tmp_path / "whole").run()
    made = trainer(checkpoints, tmp_path / "full")
    save = made.checkpoints.save

    def save_until_full(step, state):
        if step == 4:
            # The kernel's own full disk: every write to it fails with ENOSPC.
            (tmp_path / "full/partial").symlink_to("/dev/full")
        save(step, state)

    object.__setattr__(made.checkpoints, "save", save_until_full)
    with pytest.raises(ResumeError, match=r"step 4.*No space left on device.*make room"):
        made.run()
    assert sorted(file.name for file in (tmp_path / "full").iterdir()) == ["m.jsonl", "rollouts", "step-000002.pt"]
    assert untimed(trainer(checkpoints, tmp_path / "full").run()) == untimed(whole)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    Checkpoints(tmp_path, "these").save(1, {"rows": []})
    with pytest.raises(ResumeError, match="other settings"):
        Checkpoints(tmp_path, "those").load(CPU)


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    store = Checkpoints(tmp_path, "x")
    for step in (1, 2, 3):
        store.save(step, {})
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step-000002.pt", "step-000003.pt"]
