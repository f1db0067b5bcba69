"""The run of a job by `qerl rule`: with its lock, its GPUs, and the libraries that it needs."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module

from qerl.host.imports import imports
from qerl.host.lease import WHOLE, alone, devices, join_free_memory, keep_to_own_cores, lease, percent_of_each
from qerl.host.provenance import check_writable, writing
from qerl.jobs import Job


def run(job: Job, gpu_percent: int | None = None) -> None:
    """Run a job with its GPUs and its lock.

    `gpu_percent` is the part of a GPU that the job leases, whose memory it may use; None leases its GPUs whole.
    """
    check_writable(job.out)
    percent = percent_of_each(job.gpus, gpu_percent)
    visible = [*devices()] if job.own_cores else []
    with ExitStack() as held:
        if job.lock:  # before the GPU, which a job that outlived a killed Snakemake may still have
            held.enter_context(alone(*job.lock))
        gpus = held.enter_context(lease(job.gpus, percent))
        if job.own_cores and gpus:
            keep_to_own_cores(gpus, visible)
        module, _, name = job.function.partition(":")
        if job.joins_free_memory:
            join_free_memory()
        with imports(job.without):
            if gpus and percent < WHOLE:
                _keep_to_share(percent / WHOLE)
            function = getattr(import_module(module), name)
        with writing(job.out):
            function(job)


def _keep_to_share(share: float) -> None:
    from qerl.host.gpus import cap_share  # imports torch, which must not see the other GPUs

    cap_share(share)
