"""Data parallelism: the processes of a run, started by torchrun's launcher and connected by accelerate.

Every process has the whole policy, or with `method: full` its shard of each weight. It samples and scores its share of
a step's problems (`qerl.rl.rollouts`) and receives all completions. It computes its share of the micro-batches, and
sums gradients with the others before the optimizer's step.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from torch import nn
from torch.distributed import DistError, TCPStore

from qerl.host.imports import OPTIONAL, begin
from qerl.host.lease import by_torchrun, check_torchrun, environment_variables, meeting
from qerl.host.process import Announcement, Interrupted, handling
from qerl.jobs import KilledError
from qerl.settings.base import ConfigError

T = TypeVar("T")

#: Seconds for which a machine waits for the others at the start of a run: their bases may be quantized first.
_MEETING_SECONDS = 3600
#: Seconds for which a process waits for an answer of the store in which processes count together.
_ANSWER_SECONDS = 120
#: The exit status of a process whose run has lost a machine; a new start continues.
_LOST = 75
#: Seconds that such a process waits, so that the launcher notices first if a process of its own machine has failed.
_SETTLE_SECONDS = 5
#: The exit status of a process that begins a run while it imports the script that started it.
UNGUARDED = 76
#: The exit status of a process that ended after a checkpoint because a signal announced the end.
INTERRUPTED = 77
#: Seconds that the other processes of a run have to end after one has failed. They take the launcher's SIGTERM for an
#: announcement, and may wait for the one that failed.
_SHUTDOWN_SECONDS = 5
#: The signals by which the launcher ends its processes at once.
_LAUNCHER_SIGNALS = "SIGINT,SIGQUIT"
#: For new processes, which import modules before they get this one's path: not first from the working directory.
ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
#: Numbers of this process's counters. Every process makes the same ones, so their numbers agree.
_COUNTERS = itertools.count()


class Processes:
    """This process and the others of its run. Without a launcher it is the only one.

    `timeout`, which counts at the first call in a process, limits the time that an operation waits for the others.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        limit = {} if timeout is None else {"timeout": timeout}  # PyTorch has limits of its own for each backend
        self._state = PartialState(cpu=not torch.cuda.is_available(), **limit)

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

    def gather(self, parts: list[T]) -> list[T]:
        """The parts of all processes in the order of their ranks."""
        return list(gather_object(parts)) if self.count > 1 else parts

    def counter(self) -> Callable[[int], int]:
        """A count that all processes share: a function that adds to it and returns the sum, at first 0.

        Every process must ask for it alike, but may call it when it likes: no process waits for another.
        """
        # torchrun restarts processes on the store that it had.
        name = f"counter/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_COUNTERS)}"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_ANSWER_SECONDS))
        return lambda more: int(store.add(name, more))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the processes."""
        if self.count == 1:
            return list(values)
        # In float64: float32 doesn't count beyond 2^24 tokens.
        total: torch.Tensor = reduce(torch.tensor(values, dtype=torch.float64, device=self._state.device), "sum")
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest value of any process."""
        return max(self.gather([value]))

    def from_first(self, value: T | None) -> T | None:
        """The value of the first process, in every process."""
        if self.count == 1:
            return value
        values: list[T | None] = [value]
        broadcast_object_list(values)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        self._state.wait_for_everyone()

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes; a process without one adds zero."""
        for parameter in parameters:
            # A process without micro-batches must take part all the same. Sums and not means: losses are shares of the
            # whole batch's.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(gradient, "sum") if self.count > 1 else gradient


def check_processes(count: int, nodes: int = 1) -> None:
    """Raise `ConfigError` with the reason unless a run can start its processes on this machine, one of `nodes`."""
    # A run's processes import the script that began it, which would begin it again in each of them.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)
    if by_torchrun():
        check_torchrun(count, nodes)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a run starts its own processes; set `processes` in its settings, and call it without a launcher, or with "
            "torchrun"
        )
    elif nodes > 1:
        meeting(nodes)
    gpus, here = torch.cuda.device_count(), count // nodes
    if gpus and gpus < here:
        raise ConfigError(f"processes={count} needs {here} GPUs here, and this machine has {gpus}; lower processes")


def start_processes(
    count: int, function: Callable[..., None], *arguments: Any, nodes: int = 1, node_timeout: float = 0
) -> bool:
    """Call `function(*arguments)` in `count` new processes on `nodes` machines; this machine starts its share.

    False, and nothing is called, if this process is one of the run's already: its only one, or one of torchrun's.
    Raises `KilledError` if a process was killed, or if a machine was lost: an operation waits `node_timeout` seconds
    for the others.
    """
    check_processes(count, nodes)
    if count == 1 or by_torchrun():
        return False
    # Imported here, because most runs have one process.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
    if nodes > 1:
        at = meeting(nodes)
        place = {"rdzv_backend": "static", "rdzv_endpoint": f"{at.address}:{at.port}", "run_id": "qerl"}
        place["rdzv_configs"] = {"rank": at.node, "timeout": _MEETING_SECONDS}
    end = Announcement()
    # No restarts: the workflow or the user starts again, and the run continues from its last checkpoint.
    config = LaunchConfig(min_nodes=nodes, max_nodes=nodes, nproc_per_node=count // nodes, max_restarts=0, **place)
    config.shutdown_timeout, config.signals_to_handle = _SHUTDOWN_SECONDS, _LAUNCHER_SIGNALS
    try:
        with handling(partial(_pass_on, end)), environment_variables(ENVIRONMENT):
            elastic_launch(config, begin)(*beginning(function, count // nodes, nodes, node_timeout), *arguments)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if end.number or failure.exitcode == INTERRUPTED:  # if not, another machine of the run had the signal
            raise Interrupted(end.number or signal.SIGTERM) from None
        if failure.exitcode == -signal.SIGKILL:
            raise KilledError(
                f"process {rank} of {count} was killed, possibly because memory ran out; start the run again, with "
                "fewer processes if so: it continues from its last checkpoint"
            ) from error
        if nodes > 1 and failure.exitcode in (_LOST, -signal.SIGABRT):  # the latter is how NCCL ends its process
            raise KilledError(_lost(node_timeout)) from error
        if failure.exitcode == UNGUARDED:
            raise unguarded(count) from None
        raise RuntimeError(f"process {rank} of {count} failed: {failure.message}") from error
    return True


def beginning(function: Callable[..., None], here: int, nodes: int = 1, node_timeout: float = 0) -> list[Any]:
    """What `begin` gets in a new process, one of `here` on this machine, before the arguments of `function`."""
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    functions = [f"{each.__module__}:{each.__qualname__}" for each in (_start, function)]
    return [functions, hidden, here, nodes, node_timeout]


def unguarded(count: int) -> ConfigError:
    """The error of a script whose processes would begin it again."""
    return ConfigError(
        f"each of the {count} processes imports the script that starts them, and would start the run again; "
        'write `if __name__ == "__main__":` before the calls in the script'
    )


def _pass_on(end: Announcement, number: int) -> None:
    """Pass a signal on to the processes of the run, which end after their step; a second one ends them at once."""
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, signal.SIGKILL if end.number else number)  # type: ignore[arg-type]
    if end.number or not children:
        raise Interrupted(number)
    end.number = number


def _start(function: Callable[..., None], here: int, nodes: int, node_timeout: float, *arguments: Any) -> None:
    from qerl.host.console import configure_logging

    configure_logging()
    # The launcher's processes would each take all cores.
    torch.set_num_threads(max(torch.get_num_threads() // here, 1))
    try:
        with connected(nodes, node_timeout, aloud=False):
            function(*arguments)
    except Interrupted:  # which multiprocessing would report as a success
        sys.exit(INTERRUPTED)


@contextmanager
def connected(nodes: int, node_timeout: float, aloud: bool = True) -> Iterator[None]:
    """A context in which the loss of another machine of the run ends this process with the status `_LOST`."""
    if nodes == 1:
        yield
        return
    Processes(timeout=timedelta(seconds=node_timeout))
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, DistError) and "gloo" not in str(error):  # gloo's errors have no class of their own
            raise
        time.sleep(_SETTLE_SECONDS)
        if aloud:  # the launcher of a run by itself says it otherwise
            print(f"qerl: {_lost(node_timeout)}", file=sys.stderr, flush=True)
        os._exit(_LOST)  # without the others nothing can be closed


def _lost(node_timeout: float) -> str:
    return (
        f"another machine of the run has ended or hasn't answered for {node_timeout:g} seconds; see why it or its "
        "network failed, and start the run again on all machines: it continues from its last checkpoint"
    )
