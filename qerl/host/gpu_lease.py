"""GPU leases, which give a process exclusive GPUs of this node, and locks on folders of runs.

Jobs of several workflows thus never share a GPU by accident. A lease is a `filelock` on one file per GPU: an flock,
which the kernel releases when the process ends for any reason. NVML lists the GPUs, because CUDA_VISIBLE_DEVICES must
be set before torch is imported.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pynvml
from filelock import FileLock, Timeout

from qerl.host.progress import log
from qerl.settings.base import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 1.0


def devices(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The GPUs that this process may use, as a mapping from their name in CUDA_VISIBLE_DEVICES to their UUID.

    Locks use the UUID, because within a SLURM job or a container every first GPU has the index 0.
    """
    uuids = _uuids()
    visible = environment.get(VISIBLE)
    if visible is None:
        return uuids
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return {name: uuids.get(name, name) for name in names} if uuids else {}


def _uuids() -> dict[str, str]:
    """The UUID of every GPU of this machine by its index; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return {str(index): pynvml.nvmlDeviceGetUUID(handle) for index, handle in enumerate(handles)}
    finally:
        pynvml.nvmlShutdown()


def lock_folder() -> Path:
    """The folder of this node's locks, which all users share."""
    folder = Path(tempfile.gettempdir()) / "qerl-gpus"
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    return folder


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
        raise ConfigError(
            f"process {file.read_text().strip()} is at work in {folder}; wait until it ends, or end it (kill), and "
            "start again: it continues from the state there"
        ) from None
    with kept:
        file.write_text(f"{os.getpid()} on {socket.gethostname()}")
        yield


@contextmanager
def lease(count: int) -> Iterator[list[str]]:
    """A context that waits for `count` free GPUs, leases them, and hides all others from CUDA.

    Yields their names; on a machine without GPUs this is an empty list, without waiting. Raises `ConfigError` if the
    machine has fewer GPUs than requested.
    """
    visible = devices()
    if visible and count > len(visible):
        raise ConfigError(
            f"{count} GPUs are needed, but only {len(visible)} are visible; lower `processes` or `tensor_parallel`"
        )
    if not visible or count == 0:
        yield []
        return
    with ExitStack() as locks:
        names = _wait(visible, count, locks)
        before = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = ",".join(names)
        try:
            yield names
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def keep_to_own_cores(gpus: Sequence[str], visible: Sequence[str]) -> None:
    """Keep this process, and what it starts, to the cores that belong to `gpus`: each of `there` has an equal part.

    The compiler of one job then doesn't slow the launches of another. With fewer cores than GPUs nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    ends = [len(cores) * i // len(visible) for i in range(len(visible) + 1)]
    parts = {name: cores[begin:end] for name, begin, end in zip(visible, ends, ends[1:], strict=False)}
    if own_cores := {core for name in gpus for core in parts[name]}:
        os.sched_setaffinity(0, own_cores)


def _wait(visible: Mapping[str, str], count: int, locks: ExitStack) -> list[str]:
    """Names of `count` GPUs whose locks are now in `held`: all at once or none, so that two waiting can't block."""
    logged = False
    while True:
        with ExitStack() as tried:
            free = (name for name, uuid in visible.items() if _lock(uuid, tried))
            names = list(itertools.islice(free, count))
            if len(names) == count:
                locks.push(tried.pop_all())
                return names
        if not logged:
            log.info("waiting for %d free of the GPUs %s", count, ", ".join(visible))
            logged = True
        time.sleep(_POLL_SECONDS)


def _lock(uuid: str, locks: ExitStack) -> bool:
    # All users of the node may write the file, regardless of its owner.
    lock = FileLock(lock_folder() / f"{uuid}.lock", mode=0o666, timeout=0)
    try:
        locks.enter_context(lock)
    except Timeout:
        return False
    return True
