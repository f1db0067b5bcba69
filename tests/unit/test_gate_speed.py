"""This code in turn with another version of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from qerl.config import ConfigError
from qerl.gates import speed
from qerl.provenance import PACKAGE
from qerl.report.intervals import paired_ratio_interval

POLICY = Path("config/gates/policy")


def head() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@pytest.mark.slow
def test_a_commit_is_unpacked_once_with_its_kernels(tmp_path):
    folder = speed.unpacked_wheel(head(), tmp_path)
    assert {"api.py", "config.py"} <= {file.name for file in (folder / "qerl").iterdir()}
    committed = subprocess.run(["git", "show", "HEAD:qerl/kernels/w4a16.cu"], cwd=PACKAGE.parent, capture_output=True)
    assert (folder / "qerl/kernels/w4a16.cu").read_bytes() == committed.stdout
    (folder / "mark").touch()
    assert speed.unpacked_wheel(head(), tmp_path) == folder
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [head()]


def test_a_commit_that_is_not_here_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"^commit 012345678901, .* isn't in this clone; fetch it .*$"):
        speed.unpacked_wheel("0123456789" * 4, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_version_than_asked_for_is_not_timed(tmp_path):
    """Where the code asked for can't be imported from, the installed one must not take its place."""
    (tmp_path / "code").mkdir()
    with (
        speed.started(tmp_path / "code", None, POLICY, tmp_path / "work") as worker,
        pytest.raises(ConfigError, match=r"the process to be timed ended \(exit code 1\): .* not the one to be timed"),
    ):
        worker.ask("rollout")


@pytest.mark.slow
def test_a_slower_version_is_seen(tmp_path, monkeypatch):
    """What stands for the baseline sleeps in every rollout, and nowhere else."""
    copy = tmp_path / "slower"
    shutil.copytree(PACKAGE, copy / "qerl", ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "qerl/api.py"
    text = file.read_text()
    call = "    return Drawing(make_sampler("
    assert text.count(call) == 1
    file.write_text(text.replace(call, f"    __import__('time').sleep(1.0)\n{call}"))
    monkeypatch.setattr(speed, "unpacked_wheel", lambda *_: copy)
    found = speed.compare("c" * 40, POLICY, 2, tmp_path)
    assert found["baseline"] == "c" * 40
    rollout, update = (found["samples"][name] for name in speed.WORKLOADS)
    assert [len(times) for workload in (rollout, update) for times in workload.values()] == [2] * 4
    assert paired_ratio_interval(rollout["now"], rollout["baseline"]).high < 0.8
