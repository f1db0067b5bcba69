"""A tiny run from files to files, and several ways to end its process."""

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from qerl.cli.workflow import run_job
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests import jobs
from tests.jobs import metrics_of, train_job, write_inputs

SETTINGS = {**jobs.SETTINGS, "reward": {"functions": {"own": "fault_reward:letters"}}}
#: Random completions differ in it.
REWARD = "def letters(answer, problem):\n    return float(len(set(answer.text)))\n"


class Run:
    """Trains in `folder`; `row` and `changes` as in the sheet of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base, self.data, self.work, self.out = (folder / name for name in ("base", "data", "work", "out"))

    def train(self, changes: dict | None = None, name: str = "", **row) -> list[dict]:
        settings = parse(RunSettings, {**SETTINGS, **(changes or {})}, "test")
        sys.modules.pop("fault_reward", None)
        out = Path(f"{self.out}{name}")
        run_job(train_job(settings, self.base, self.data, Path(f"{self.work}{name}"), out, id="r", **row))
        return metrics_of(out)

    def reward(self, text: str) -> None:
        (self.folder / "fault_reward.py").write_text(text)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(self.work.glob("*/step-*.pt"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_hidden_layers=1)


def prepared(folder: Path, inputs: Path, patch: pytest.MonkeyPatch) -> Run:
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    made = Run(folder)
    made.reward(REWARD)
    return made


@pytest.fixture
def run(tmp_path, inputs, monkeypatch) -> Run:
    return prepared(tmp_path, inputs, monkeypatch)


@pytest.fixture(scope="session")
def whole(inputs, tmp_path_factory) -> list[dict]:
    """The metrics of an undisturbed run."""
    with pytest.MonkeyPatch.context() as patch:
        rows = prepared(tmp_path_factory.mktemp("whole"), inputs, patch).train()
        assert any(row["grad_norm"] > 0 for row in rows), "its steps are all alike"
        return rows


def forked(function: Callable[[], object]) -> int:
    """The exit status of a fork that calls `function`: 0 where it returned, 1 where it raised."""
    torch.set_num_threads(1)  # a fork has no other threads
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def ordinary_user():
    """Become an ordinary user within the block, because root may read and write anything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def public():
    """A folder that other users may read, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
