"""Trainings on several machines as jobs of SLURM, by the resources of Snakemake's plugin for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qerl.plan.sheets import Plan
from qerl.plan.workflow import with_signature
from qerl.settings.base import ConfigError
from qerl.settings.run import RunSettings

#: Values of a job's resources. The plugin's name for a launcher that the rule itself calls is `mpi`, for GPUs of each
#: machine `gres`. `tasks_per_gpu: 0` keeps the plugin from asking for as many tasks on each GPU.
_RESOURCES: Mapping[str, Callable[[RunSettings], int | str]] = {
    "nodes": lambda settings: settings.nodes,
    "tasks": lambda settings: settings.nodes,
    "mpi": lambda settings: "srun",
    "gres": lambda settings: f"gpu:{settings.gpus_of_node}",
    "tasks_per_gpu": lambda settings: 0,
}


def resources_of_machines(plan: Plan) -> dict[str, Callable[[Any], int | str | None]]:
    """The resources that only a run on several machines has, by Snakemake's wildcards; none without such a run.

    A resource is None for a run on one machine, which Snakemake leaves out.
    """
    if all(run.settings.nodes == 1 for run in plan.runs.values()):
        return {}

    def resource(value: Callable[[RunSettings], int | str]) -> Callable[[Any], int | str | None]:
        def of_run(wildcards: Any) -> int | str | None:
            settings = plan.runs[wildcards.run].settings
            return value(settings) if settings.nodes > 1 else None

        return with_signature(of_run)

    return {name: resource(value) for name, value in _RESOURCES.items()}


def launcher(settings: RunSettings) -> str:
    """The start of a training's command, which starts it on all of its machines; empty on one.

    SLURM's variables tell the processes where they meet (`qerl.host.nodes.meeting`).
    """
    nodes, each = settings.nodes, settings.processes_of_node
    return f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={each}" if nodes > 1 else ""


def check_machines(plan: Plan) -> None:
    """Raise `ConfigError` if a run needs several machines, for a Snakemake that starts its jobs on this one."""
    for run in plan.runs.values():
        if run.settings.nodes > 1:
            raise ConfigError(
                f"experiment {run.experiment}, arm {run.arm}: nodes={run.settings.nodes} needs a cluster; use a "
                "profile such as profiles/slurm, or set nodes=1"
            )
