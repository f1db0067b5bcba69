"""Dry runs: what is launched in one is compiled, once and in threads, and nothing runs."""

import threading

import pytest
import torch

from qerl.kernels import state
from qerl.kernels.state import compile_later, dry_run, in_dry_run

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """The GPU that each thread has chosen, by its number."""
    chosen = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device.index}))
    return chosen


def test_equal_calls_are_made_once_by_threads_on_the_gpu_and_before_the_block_ends(gpus):
    made = []

    def load(name, size):
        made.append((name, size, gpus[threading.get_ident()]))

    with dry_run(DEVICE):
        assert in_dry_run()
        assert all(compile_later(load, *arguments) for arguments in [("a", 1), ("b", 1), ("a", 1), ("a", 2)])
    assert sorted(made) == [("a", 1, 1), ("a", 2, 1), ("b", 1, 1)]
    assert not in_dry_run()
    assert not compile_later(load, "a", 1)
    assert len(made) == 3


def test_errors_end_a_dry_run(gpus):
    def load():
        raise ValueError("doesn't compile")

    with pytest.raises(ValueError, match="doesn't compile"), dry_run(DEVICE):
        compile_later(load)
    assert not in_dry_run()


def test_a_dry_run_captures_no_graph(gpus):
    with pytest.raises(RuntimeError, match="dry run"), dry_run(DEVICE):
        state.capture(lambda: None)
    assert not in_dry_run()
