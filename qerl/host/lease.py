"""GPU leases, locks on folders, PyTorch's allocator, and the machines of a run: which one this is, where they meet."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pynvml
from filelock import FileLock, Timeout

from qerl.host.console import log
from qerl.settings.base import ConfigError

# GPU leases, which give a process GPUs of this node, and locks on folders of runs.
#
# Jobs of several workflows thus never share a GPU by accident. A lease is a `filelock` on a file of each GPU: an flock,
# which the kernel releases when the process ends for any reason. NVML lists the GPUs, because CUDA_VISIBLE_DEVICES must
# be set before torch is imported.

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: CUDA's own order has the fastest GPU first. NVML's follows the bus, so its numbers would name other GPUs to CUDA.
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
#: The least compute capability of the kernels: Ampere, the first generation with bfloat16.
LEAST_CAPABILITY = (8, 0)
#: The folder of the locks, the same for all users of the node: TMPDIR differs among users, and among jobs of a cluster.
LOCKS = Path("/tmp/qerl-gpus")
_POLL_SECONDS = 1.0
#: The least share of a free GPU's memory that is free: a context of CUDA or a screen takes some.
_FREE_SHARE = 0.9


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; memory is in bytes.

    Locks use the UUID, because within a SLURM job or a container every first GPU has the index 0. A part of a GPU
    (MIG), whose capability NVML doesn't tell, counts as supported.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    total: int
    free: int

    @classmethod
    def of(cls, device: str) -> Gpu:
        """The GPU of an index of NVML's or of a UUID."""
        find = pynvml.nvmlDeviceGetHandleByIndex if device.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        handle = find(int(device) if device.isdigit() else device)
        capability, total, free = LEAST_CAPABILITY, 0, 0
        with suppress(pynvml.NVMLError_NotSupported):
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        with suppress(pynvml.NVMLError_NotSupported):  # a GPU without memory of its own
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            total, free = int(memory.total), int(memory.free)
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
        return cls(uuid, name, capability, total, free)


def devices(environment: Mapping[str, str] = os.environ) -> dict[str, Gpu]:
    """The NVIDIA GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES; empty without a driver.

    Raises `ConfigError` if the variable names a GPU that isn't there.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        every = ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
        names = [name.strip() for name in environment.get(VISIBLE, every).split(",") if name.strip()]
        return {name: Gpu.of(name) for name in names if name != "-1"}
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        raise ConfigError(f"{VISIBLE} names a GPU that this machine doesn't have; correct it") from None
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def alone(folder: Path, lock: str = "lock") -> Iterator[None]:
    """A context that locks `folder`, which it makes if missing. Raises `ConfigError` if another process has the lock.

    A training survives a killed Snakemake, and a second training would write the same checkpoints. `lock` names the
    locked file; processes with different names can share a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / lock
    try:
        kept = FileLock(file, timeout=0).acquire()
    except Timeout:
        owner = file.read_text(encoding="utf-8").strip()
        raise ConfigError(
            f"process {owner} is at work in {folder}; wait until it ends, or end it (kill), and start again"
        ) from None
    with kept:
        file.write_text(f"{os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            yield
        finally:
            with suppress(FileNotFoundError):  # a finished run removes its folder
                os.truncate(file, 0)  # a file of a job that ended must not name its process


@contextmanager
def lease(count: int) -> Iterator[list[str]]:
    """A context that waits for `count` free GPUs, leases them in their order, and hides all others from CUDA.

    Yields their names; on a machine without GPUs this is an empty list, without waiting. Raises `ConfigError` if the
    machine has fewer GPUs than requested.
    """
    gpus = _supported()
    if gpus and count > len(gpus):
        raise ConfigError(
            f"{count} GPUs are needed, but only {len(gpus)} are visible and supported; lower `processes` or "
            "`tensor_parallel`"
        )
    if not gpus or count == 0:
        yield []
        return
    waiting = False
    while not (taken := _take(gpus, count)):
        if not waiting:
            log.info("waiting for %d free of the GPUs %s", count, ", ".join(gpus))
            waiting = True
        time.sleep(_POLL_SECONDS)
    with ExitStack() as held:
        for lock in taken.values():
            held.callback(lock.release)
        held.enter_context(environment_variables({VISIBLE: ",".join(taken), ORDER: BY_BUS}))
        yield [*taken]


@contextmanager
def lease_free(most: int) -> Iterator[list[str]]:
    """A context that leases the free GPUs, at most `most` of them, without waiting. Yields their names.

    A GPU is free if nobody has leased it and others use little of its memory.
    """
    taken = list[str]()
    with ExitStack() as held:
        for name, gpu in _supported().items():
            if len(taken) < most and gpu.free >= _FREE_SHARE * gpu.total:
                for lock in _take({name: gpu}, 1).values():
                    taken.append(name)
                    held.callback(lock.release)
        yield taken


def _supported() -> dict[str, Gpu]:
    """The GPUs that have kernels; all if none has, so that the job states the reason."""
    gpus = devices()
    return {name: gpu for name, gpu in gpus.items() if gpu.capability >= LEAST_CAPABILITY} or gpus


def _take(gpus: Mapping[str, Gpu], count: int) -> dict[str, FileLock]:
    """Names of `count` free GPUs with their locks: all or none, so that none can block others."""
    if not LOCKS.is_dir():
        LOCKS.mkdir(exist_ok=True)
        LOCKS.chmod(0o1777)
    with FileLock(LOCKS / "node.lock", mode=0o666):  # one process at a time looks, or each might get half of the GPUs
        taken = dict[str, FileLock]()
        for name, gpu in gpus.items():
            if len(taken) < count and (lock := _locked(LOCKS / f"{gpu.uuid}.lock")):
                taken[name] = lock
        if len(taken) < count:
            for lock in taken.values():
                lock.release()
            taken = {}
    return taken


def _locked(file: Path) -> FileLock | None:
    """The lock of a file that all users of the node may write; None if another process has it."""
    lock = FileLock(file, mode=0o666, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """A context in which environment variables have these values."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def keep_to_own_cores(gpus: Sequence[str], visible: Sequence[str]) -> None:
    """Keep this process, and what it starts, to the cores that belong to `gpus`: each of `visible` has an equal part.

    The compiler of one job then doesn't slow the launches of another. With fewer cores than GPUs nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    ends = [len(cores) * i // len(visible) for i in range(len(visible) + 1)]
    parts = {name: cores[begin:end] for name, begin, end in zip(visible, ends, ends[1:], strict=False)}
    if own_cores := {core for name in gpus for core in parts[name]}:
        os.sched_setaffinity(0, own_cores)


#: The variables by which users configure the allocator; the second is the older name, which all versions read.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def join_free_memory(
    environment: MutableMapping[str, str] = os.environ, kernel: str = platform.release().lower()
) -> None:
    """Let the allocator join free parts of GPU memory, so that a large tensor fits where small ones were.

    Without it, a cap leaves gigabytes that are free and not usable: a KV cache finds no whole place between the tensors
    that an update has left. Call it before the process uses a GPU. A configuration by the user stays. WSL's driver
    refuses the calls that this needs, so nothing changes there.
    """
    if "microsoft" not in kernel and not any(name in environment for name in VARIABLES):
        environment[VARIABLES[-1]] = EXPANDABLE


# The machines of a run: which one this is, and where they meet.

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
    """Whether this process answers for the run's files, as the process of machine 0 and torchrun's first do."""
    if by_torchrun(environment):
        return environment["RANK"] == "0"
    return nodes == 1 or node_number(environment) == 0
