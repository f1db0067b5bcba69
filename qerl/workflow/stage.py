"""A stage: a job with the function that does it, which it runs with its lock and its GPUs."""

from __future__ import annotations

import dis
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from qerl.host.imports import imports, source_version
from qerl.host.lease import WHOLE, alone, devices, join_free_memory, keep_to_own_cores, lease, percent_of_each
from qerl.host.provenance import check_writable, code_version, writing
from qerl.jobs import Job

#: What does the work of a stage, of which it gets the settings and paths.
Function = Callable[[Any], None]


class Stage(Job):
    """One piece of work: its settings, the paths that it reads and writes, what decides its result, and its function.

    A subclass imports the function in `_function`, so that planning imports none of the large libraries.
    """

    def _function(self) -> Function:
        """The function, imported."""
        raise NotImplementedError

    @property
    def importer(self) -> Callable[..., Function]:
        """What imports the function; another one for each engine in the stages that have several."""
        return type(self)._function

    @property
    def module(self) -> str:
        """The module of the function, by the import itself. All code that it reaches decides the result."""
        steps = dis.get_instructions(self.importer)
        [name] = {step.argval for step in steps if step.opname == "IMPORT_NAME"}
        return str(name)

    @property
    def code(self) -> str:
        """The version of the code that the stage runs, including functions of the user."""
        return " ".join([code_version(self.module), *map(source_version, sorted(self.functions))])

    def run(self, gpu_percent: int | None = None) -> None:
        """Do the work with its GPUs and its lock.

        `gpu_percent` is the part of a GPU that the stage leases, whose memory it may use; None leases its GPUs whole.
        """
        check_writable(self.out)
        percent = percent_of_each(self.gpus, gpu_percent)
        visible = [*devices()] if self.own_cores else []
        with ExitStack() as kept:
            if self.lock:  # before the GPU, which a job that outlived a killed Snakemake may still have
                kept.enter_context(alone(*self.lock))
            gpus = kept.enter_context(lease(self.gpus, percent))
            if self.own_cores and gpus:
                keep_to_own_cores(gpus, visible)
            if self.joins_free_memory:
                join_free_memory()
            with imports(self.without):
                if gpus and percent < WHOLE:
                    _keep_to_share(percent / WHOLE)
                function = self._function()
            with writing(self.out):
                function(self)


def _keep_to_share(share: float) -> None:
    from qerl.host.gpus import cap_share  # imports torch, which must not see the other GPUs

    cap_share(share)
