"""Data parallelism: the processes of a run, started by torchrun's launcher and connected by accelerate.

Every process has the whole policy. It samples and scores its share of a step's problems, receives all completions,
computes its share of the micro-batches, and sums gradients with the others before the optimizer's step.
"""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from torch import nn

from qerl.jobs.base import KilledError
from qerl.settings.base import ConfigError

T = TypeVar("T")


class Processes:
    """This process and the others of its run. Without a launcher it is the only one."""

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.cuda.is_available())

    @property
    def count(self) -> int:
        """The number of processes."""
        return int(self._state.num_processes)

    @property
    def rank(self) -> int:
        """The index of this process."""
        return int(self._state.process_index)

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> tuple[int, Sequence[T]]:
        """This process's contiguous part of `items`, and the index of its first item."""
        first, end = (len(items) * rank // self.count for rank in (self.rank, self.rank + 1))
        return first, items[first:end]

    def gather(self, parts: list[T]) -> list[T]:
        """The parts of all processes in the order of their ranks, which is the inverse of `share`."""
        return list(gather_object(parts)) if self.count > 1 else parts

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the processes."""
        if self.count == 1:
            return list(values)
        total: torch.Tensor = reduce(torch.tensor(values, dtype=torch.float64, device=self._state.device), "sum")
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest value of any process."""
        return max(self.gather([value]))

    def wait(self) -> None:
        """Wait until all processes are here."""
        self._state.wait_for_everyone()

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes; a process without one adds zero."""
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(gradient, "sum") if self.count > 1 else gradient


def check_processes(count: int) -> None:
    """Raise `ConfigError` with the reason unless a run can start this number of processes here."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a run starts its own processes; set `processes` in its settings, and call it without torchrun"
        )
    gpus = torch.cuda.device_count()
    if gpus and gpus < count:
        raise ConfigError(f"processes={count} needs as many GPUs, and this machine has {gpus}; lower processes")


def run_in_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments)` in `count` new processes on this machine, or in this process if `count` is 1."""
    check_processes(count)
    if count == 1:
        function(*arguments)
    else:
        _launch(count, function, arguments)


def _launch(count: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Imported here, because most runs have one process.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(launch, _start)(count, function, *arguments)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGKILL:
            raise KilledError(
                f"process {rank} of {count} was killed, possibly because memory ran out; start the run again, with "
                "fewer processes if so: it continues from its last checkpoint"
            ) from error
        raise RuntimeError(f"process {rank} of {count} failed: {failure.message}") from error


def _start(count: int, function: Callable[..., None], *arguments: Any) -> None:
    from qerl.host.progress import configure_logging

    gc.freeze()  # modules: the collector would look through all of them at the end of the process (qerl.host.imports)
    configure_logging()
    # The launcher's processes would each take all cores.
    torch.set_num_threads(max(torch.get_num_threads() // count, 1))
    function(*arguments)
