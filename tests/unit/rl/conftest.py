"""A small base, rewards of answers, and the processes of a run, started at once."""

import pytest

from qerl.models.quantize import quantize_checkpoint
from tests.forks import fork_processes
from tests.jobs import write_inputs
from tests.tiny import tiny_bases
from tests.unit.rl.tiny_trainer import packed_family


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A Qwen2, dense and packed."""
    return tiny_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A Qwen2, dense in `base` and packed in `nvfp4`, and problems in `data`."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    quantize_checkpoint(folder / "base", folder / "nvfp4", "nvfp4")
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Mixtures of experts: a packed Qwen3, and gpt-oss in MXFP4."""
    folder = tmp_path_factory.mktemp("mixture")
    packed_family(folder, "qwen3_moe", "nvfp4")
    packed_family(folder, "gpt_oss", "mxfp4")
    return folder


def _reward(monkeypatch, number):
    """Reward a number of an answer's text."""
    parts = lambda answer, *_: {"correct": float(number(answer.text)), "format": 0.0, "overlong": 0.0}  # noqa: E731
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)


@pytest.fixture
def rewarded_characters(monkeypatch):
    """Reward the number of different characters, because equal rewards teach nothing."""
    _reward(monkeypatch, lambda text: len(set(text)))


@pytest.fixture
def rewarded_lower_case(monkeypatch):
    """Reward the number of lower-case letters, which are 26 of the 102 tokens."""
    _reward(monkeypatch, lambda text: sum(map(str.islower, text)))


@pytest.fixture
def forking(monkeypatch):
    """Fork the processes of a run, which spares their imports.

    A run spawns them, as in `tests/faults/test_kill.py`.
    """
    fork_processes(monkeypatch)
