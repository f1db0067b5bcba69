"""A small base, rewards of answers, and the processes of a run, started at once."""

import faulthandler
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import PartialState
from torch.distributed.launcher import api

from tests.tiny import tiny_bases

#: Seconds after which a process says where it is: far above what a test takes, and below its limit.
_HANGING = 300


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A Qwen2, dense and packed."""
    return tiny_bases(tmp_path_factory.mktemp("bases"))


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

    A run spawns them, as in `tests/workflow/test_kill.py`.
    """
    launch = api.elastic_launch

    def launch_forks(config, start):
        PartialState._reset_state()  # a fork would take this process's state for its own
        return partial(launch(replace(config, start_method="fork"), _start), start)

    torch.set_num_threads(1)  # a fork has no other threads
    monkeypatch.setattr(api, "elastic_launch", launch_forks)


def _start(start, *arguments):
    """Start a process that prints where it is if it hangs: nobody sees what processes wait for in each other."""
    faulthandler.dump_traceback_later(_HANGING)
    start(*arguments)
    faulthandler.cancel_dump_traceback_later()
