"""The processes of a run, started at once."""

from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from torch.distributed.launcher import api


@pytest.fixture
def forking(monkeypatch):
    """Fork the processes of a run, which spares their imports.

    A run spawns them, as `test_two_processes_make_the_same_loss_and_weights_as_one` does.
    """
    launch = api.elastic_launch

    def launch_forks(config, start):
        PartialState._reset_state()  # a fork would take this process's state for its own
        return launch(replace(config, start_method="fork"), start)

    torch.set_num_threads(1)  # a fork has no other threads
    monkeypatch.setattr(api, "elastic_launch", launch_forks)
