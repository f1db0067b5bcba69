"""The machines of a run: which one this is, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from qerl.settings.base import ConfigError

#: The port at which machines meet, if MASTER_PORT names none.
PORT = 29400


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
