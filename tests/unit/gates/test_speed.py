"""Measurements of this code in turn with another version of it."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from qerl.gates import measure
from qerl.host.provenance import PACKAGE
from qerl.settings.base import ConfigError

POLICY = Path("tests/fixtures/gates/policy")


def head() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def test_a_commit_is_unpacked_once_with_its_kernels(tmp_path):
    folder = measure.unpacked(head(), tmp_path)
    assert {"api.py", "kernels"} <= {file.name for file in (folder / "qerl").iterdir()}
    committed = subprocess.run(
        ["git", "show", "HEAD:qerl/kernels/cuda/kernel.cu"], cwd=PACKAGE.parent, capture_output=True
    )
    assert (folder / "qerl/kernels/cuda/kernel.cu").read_bytes() == committed.stdout
    (folder / "mark").touch()
    assert measure.unpacked(head(), tmp_path) == folder
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [head()]


def test_a_commit_that_is_not_here_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"^commit 012345678901 of the baseline isn't in this clone; fetch it .*$"):
        measure.unpacked("0123456789" * 4, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_version_than_asked_for_is_not_timed(tmp_path):
    """Where the code asked for can't be imported from, the installed one must not take its place."""
    (tmp_path / "code").mkdir()
    with (
        measure.started(tmp_path / "code", None, POLICY, tmp_path / "work") as ask,
        pytest.raises(ConfigError, match=r"the timed process ended with exit code 1: .* not the version to be timed"),
    ):
        ask("rollout")


def test_versions_take_turns_and_the_fastest_repeat_of_each_turn_counts(tmp_path, monkeypatch):
    asked = []

    @contextmanager
    def started(code, commit, checkpoint, folder):
        def ask(workload):
            asked.append((folder.name, workload))
            return [3.0 * len(asked), 2.0 * len(asked)]

        yield ask

    monkeypatch.setattr(measure, "unpacked", lambda commit, folder: folder)
    monkeypatch.setattr(measure, "started", started)
    pairs = measure.compare("c" * 40, POLICY, 2, tmp_path)
    assert [name for name, _ in asked] == ["baseline", "now"] * 2 + ["now", "baseline"] * 2 + ["baseline", "now"] * 2
    # The first turn is a warm-up.
    assert (pairs["rollout"].now, pairs["rollout"].baseline) == ([10.0, 20.0], [12.0, 18.0])
    assert (pairs["update"].now, pairs["update"].baseline) == ([14.0, 24.0], [16.0, 22.0])


@pytest.mark.slow
def test_a_process_of_its_own_samples_and_trains(tmp_path, monkeypatch):
    small = {"rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 8}}}
    monkeypatch.setattr(measure, "TRAINING", measure.TRAINING | small)
    monkeypatch.setattr(measure, "ROLLOUTS", 3)
    with measure.started(PACKAGE.parent, "c" * 40, POLICY, tmp_path / "work") as ask:
        assert [len(ask(name)) for name in measure.WORKLOADS] == [2, 2]
