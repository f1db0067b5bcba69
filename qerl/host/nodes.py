"""The machines of a run: which one this is, where they meet, and a watch that ends the run if one of them is lost."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.settings.base import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

#: The exit status of a process whose run has lost a machine; a new start continues.
LOST = 75
#: The port at which machines meet, if MASTER_PORT names none.
PORT = 29400
_BEAT_SECONDS = 1.0
#: The least time that a machine has for its first beat, as machines don't start at once.
_FIRST_BEAT_SECONDS = 60.0
#: The last beat of a machine whose part of the run has ended.
_ENDED = "ended"


@dataclass(frozen=True)
class Meeting:
    """The number of this machine, and the address of machine 0, where all meet."""

    node: int
    address: str
    port: int


def node_number(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this machine in its run: torchrun's, or NODE_RANK, or SLURM's; 0 for the only one."""
    names = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
    return int(next((environment[name] for name in names if name in environment), 0))


def meeting(nodes: int, environment: Mapping[str, str] = os.environ) -> Meeting:
    """Where the machines of a run meet, by MASTER_ADDR and NODE_RANK, or within a job of SLURM by its variables.

    Raises `ConfigError` if the environment doesn't say it.
    """
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if address is None or not {"NODE_RANK", "SLURM_NODEID"} & environment.keys():
        raise ConfigError(
            f"nodes={nodes} needs MASTER_ADDR (the address of machine 0) and NODE_RANK (0 to {nodes - 1}) in the "
            "environment of each machine; set them, or start the run by srun or torchrun"
        )
    default = PORT + int(environment.get("SLURM_JOB_ID", 0)) % 1000  # jobs of a node must not meet each other
    node = node_number(environment)
    if node >= nodes:
        raise ConfigError(f"NODE_RANK={node} is no machine of nodes={nodes}, which are 0 to {nodes - 1}; correct one")
    return Meeting(node, address, int(environment.get("MASTER_PORT", default)))


def by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process, as one of its run."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment


def check_torchrun(processes: int, nodes: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` unless torchrun started as many processes and machines as the settings say."""
    started = int(environment["WORLD_SIZE"])
    on = int(environment.get("GROUP_WORLD_SIZE", 1))
    if (started, on) != (processes, nodes):
        raise ConfigError(
            f"torchrun started {started} processes on {on} machines, and the settings say processes={processes}, "
            f"nodes={nodes}; make them agree"
        )


def own_lock(nodes: int, environment: Mapping[str, str] = os.environ) -> str:
    """The name of a run's lock, which each machine of several has, or each process that torchrun started."""
    if by_torchrun(environment):
        return f"lock-{environment['RANK']}"
    return "lock" if nodes == 1 else f"lock-{node_number(environment)}"


def is_first(nodes: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process answers for the run's files: that of machine 0, or of torchrun's first process."""
    if by_torchrun(environment):
        return environment["RANK"] == "0"
    return nodes == 1 or node_number(environment) == 0


class NodeWatch:
    """Watches the machines of a run. Each has a beat in the store, which its first process counts up.

    If one stands still for `limit` seconds, the process ends with the status `LOST` and a sentence that names it. This
    works while the process waits for the lost machine in a collective operation. The launcher gets the sentence, and
    with `aloud` the standard error too.
    """

    def __init__(self, store: Store, node: int, nodes: int, limit: float, aloud: bool) -> None:
        self._store, self._node, self._limit, self._aloud = store, node, limit, aloud
        self._others = [other for other in range(nodes) if other != node]
        self._names = {other: f"machine {other}" for other in self._others}
        self._seen = dict.fromkeys(self._others, time.monotonic() + max(0.0, _FIRST_BEAT_SECONDS - limit))
        self._done = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._judge)]

    def start(self) -> None:
        """Begin to beat and to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no longer: the run has ended here, which the others may know."""
        self._done.set()
        for thread in self._threads:
            if thread.is_alive():  # a beat after the last one would be taken for a machine that stands still
                thread.join()
        with suppress(RuntimeError):  # machine 0 has ended too
            self._store.set(f"beat/{self._node}", _ENDED)

    def settle(self) -> None:
        """Wait until a lost machine, which may be why a collective operation failed, would have been noticed."""
        time.sleep(self._limit + 2 * _BEAT_SECONDS)

    def _beat(self) -> None:
        with suppress(RuntimeError):  # without the store no beat is seen, which `_judge` tells
            self._exchange()

    def _exchange(self) -> None:
        self._store.set(f"name/{self._node}", socket.gethostname())
        beats: dict[int, bytes] = {}
        for count in itertools.count():
            if self._done.is_set():
                return
            self._store.set(f"beat/{self._node}", str(count))
            self._done.wait(_BEAT_SECONDS)
            for other in self._others:
                if not self._store.check([f"beat/{other}"]):
                    continue
                beat = self._store.get(f"beat/{other}")
                if beat != beats.get(other):
                    beats[other] = beat
                    self._seen[other] = math.inf if beat == _ENDED.encode() else time.monotonic()
                    self._names[other] = f"{self._store.get(f'name/{other}').decode()} (machine {other})"

    def _judge(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            silent = [other for other in self._others if time.monotonic() - self._seen[other] > self._limit]
            if silent:
                # The store is on machine 0: without it nobody else can be heard.
                _end(self._names[min(silent)], self._limit, self._aloud)


def _end(name: str, limit: float, aloud: bool) -> None:
    sentence = (
        f"{name} hasn't answered for {limit:g} seconds; see why it or its network failed, and start the run again on "
        "all machines: it continues from its last checkpoint"
    )
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(file, "w", encoding="utf-8") as note:
            json.dump({"message": sentence, "timestamp": int(time.time())}, note)
    if aloud:
        print(f"qerl: {sentence}", file=sys.stderr, flush=True)
    os._exit(LOST)
