"""`qerl rule`: what the workflow's rules call."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from qerl.cli.console import print_error
from qerl.jobs.base import KilledError
from qerl.jobs.dispatch import parse_job, run


def rule(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job as JSON, as `qerl.plan` makes it.")],
    gpu_percent: Annotated[
        int | None, typer.Option(help="Lease this part of a GPU and of its memory. Default: the job's GPUs, whole.")
    ] = None,
) -> None:
    """Do a job of the workflow: parse it, and call the function that its kind names."""
    try:
        run(parse_job(job), gpu_percent)
    except KilledError as error:
        print_error(error)
        raise typer.Exit(128 + signal.SIGKILL) from None  # as if this process were: the rule tries it again
