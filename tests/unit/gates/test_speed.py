"""Measurements of this code in turn with another version of it."""

import shutil
import subprocess
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


#: A clock that moves by a millisecond when it is read, and otherwise only where it is told to.
CLOCK = """

import time as _time

_time.passed = 0.0


def _tick() -> float:
    _time.passed += 0.001
    return _time.passed


_time.perf_counter = _tick
"""


def version(folder: Path, rollout_seconds: float) -> Path:
    """A copy of the package whose rollouts take a given time on its own clock."""
    shutil.copytree(PACKAGE, folder / "qerl", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "qerl/api.py"
    text = file.read_text()
    call = "    return EvaluatedPolicy(make_sampler("
    assert text.count(call) == 1
    file.write_text(text.replace(call, f"    _time.passed += {rollout_seconds}\n{call}") + CLOCK)
    return folder


def small_worker(file: Path) -> Path:
    """The worker with less to do: its clock doesn't see how much it is."""
    text = measure.WORKER.read_text()
    sizes = '"prompts": 8, "group_size": 8, "sampling": {"max_tokens": 56}'
    changes = {
        "range(2, 34)": "range(2, 6)",
        "ROLLOUTS = 9": "ROLLOUTS = 3",
        "    from qerl import api\n": "    import gc\n\n    gc.disable()\n    from qerl import api\n",
        sizes: '"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 8}',
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)
    return file


@pytest.mark.slow
def test_a_slower_version_is_seen(tmp_path, monkeypatch):
    """The baseline's stand-in takes twice as long for every rollout, and for nothing else."""
    monkeypatch.setattr(measure, "unpacked", lambda *_: version(tmp_path / "slower", 2.0))
    monkeypatch.setattr(measure, "PACKAGE", version(tmp_path / "now", 1.0) / "qerl")
    monkeypatch.setattr(measure, "WORKER", small_worker(tmp_path / "worker.py"))
    pairs = measure.compare("c" * 40, POLICY, 2, tmp_path)
    rollout, update = (pairs[name] for name in measure.WORKLOADS)
    assert [len(times) for one in (rollout, update) for times in (one.now, one.baseline)] == [2] * 4
    assert rollout.now == pytest.approx([seconds / 2 for seconds in rollout.baseline], rel=0.01)
    assert update.now == pytest.approx(update.baseline)
