"""`qerl watch`: the state of a workflow, once or as long as it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qerl.cli.console import console

if TYPE_CHECKING:
    from qerl.plan.watch import State, WatchedJob

#: The longest reason in characters; the whole is in the job's log.
_LONGEST = 160
_STATES: tuple[State, ...] = ("done", "running", "failed", "waits")


def watch(
    results: Annotated[Path, typer.Argument(help="The folder of results, as `qerl where` prints it.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once, as where there is no terminal.")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5.0,
    all_jobs: Annotated[bool, typer.Option("--all", help="List waiting and finished jobs too.")] = False,
) -> None:
    """Show what of a workflow is done, runs, failed or waits, where it runs, and its GPU-hours."""
    from qerl.plan.watch import running_jobs, watched_jobs

    screen = console()
    jobs = watched_jobs(results, running_jobs())
    if once or not screen.is_terminal:
        screen.print(_page(jobs, all_jobs, screen))
        return
    with Live(_page(jobs, all_jobs, screen), console=screen, auto_refresh=False) as live:
        while any(job.state != "done" for job in jobs):
            time.sleep(every)
            jobs = watched_jobs(results, running_jobs())
            live.update(_page(jobs, all_jobs, screen), refresh=True)


def _page(jobs: Sequence[WatchedJob], all_jobs: bool, screen: Console) -> Group:
    from qerl.report.summary import fitting

    listed = [job for job in jobs if all_jobs or job.state in ("running", "failed")]
    tables = [_summary(jobs), *([_details(listed, jobs)] if listed else [])]
    return Group(*(fitting(table, screen) for table in tables))


def _table(columns: Sequence[str], numbers: int) -> Table:
    """A table whose last columns, that many, are numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place >= len(columns) - numbers else "left", overflow="fold")
    return table


def _summary(jobs: Sequence[WatchedJob]) -> Table:
    table = _table(("rule", *_STATES, "GPU-hours spent", "left"), 6)
    for rule in dict.fromkeys(job.job.rule for job in jobs):
        _add_sums(table, rule, [job for job in jobs if job.job.rule == rule], jobs)
    _add_sums(table, "all", jobs, jobs)
    return table


def _add_sums(table: Table, title: str, part: Sequence[WatchedJob], jobs: Sequence[WatchedJob]) -> None:
    from qerl.plan.watch import hours_left

    states = Counter(job.state for job in part)
    hours = _sum([job.spent for job in part]), _sum([hours_left(job, jobs) for job in part])
    table.add_row(title, *(str(states[state]) for state in _STATES), *hours)


def _details(listed: Sequence[WatchedJob], jobs: Sequence[WatchedJob]) -> Table:
    from qerl.plan.watch import hours_left

    table = _table(("rule", "job", "state", "where or why", "progress", "spent", "left"), 2)
    for job in sorted(listed, key=lambda job: (job.state != "running", job.state != "failed", job.state != "waits")):
        texts = job.job.rule, job.job.id, job.state, shorten(job.where, _LONGEST, placeholder=" ..."), job.progress
        table.add_row(*map(Text, texts), _sum([job.spent]), _sum([hours_left(job, jobs)]))
    return table


def _sum(hours: Sequence[float | None]) -> str:
    """The sum of known hours, and how many are unknown."""
    known = [value for value in hours if value is not None]
    unknown = len(hours) - len(known)
    return ", ".join([f"{sum(known):.2f}"] * bool(known) + [f"{unknown} unknown"] * bool(unknown))
