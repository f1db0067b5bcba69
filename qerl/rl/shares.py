"""Several runs on the GPUs of this machine: each GPU trains its share of them in a process of its own.

Runs are dealt by their expected work, so that all GPUs end together. A share is trained as all runs are on an only GPU:
those that can train side by side as a cohort, and cohorts one after another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from qerl.host.console import log, naming
from qerl.host.gpus import free_memory
from qerl.host.imports import begin
from qerl.host.lease import BY_BUS, ORDER, VISIBLE, by_torchrun, environment_variables, lease_free
from qerl.host.process import Announcement, Interrupted, announced
from qerl.jobs import KilledError, TrainJob
from qerl.results.paths import METRICS
from qerl.results.schema import StepMetrics, read_rows
from qerl.rl.cohort import cohorts, train_cohort
from qerl.rl.parallel import ENVIRONMENT, INTERRUPTED, UNGUARDED, beginning, unguarded
from qerl.rl.train import state_folder, train_run
from qerl.settings.base import UserError

#: Runs that train one after another, or as a cohort side by side.
Groups = Sequence[Sequence[TrainJob]]
#: For processes that share a screen: rich then takes it for no terminal, and progress is lines instead of bars.
_ENVIRONMENT = {**ENVIRONMENT, ORDER: BY_BUS, "TTY_COMPATIBLE": "0"}
#: Seconds after which a signal is passed on at the latest.
_POLL_SECONDS = 0.1


def train_runs(jobs: Sequence[TrainJob]) -> None:
    """Train runs side by side where they can, on all free GPUs that this process sees.

    What ends a run, or the process of a GPU, leaves the others going, and the first such error is raised at the end.
    Runs that need several GPUs train one after another, when the others have ended.
    """
    groups, failures = cohorts(jobs), list[BaseException]()
    shared = [group for group in groups if group[0].settings.gpus == 1]
    several = torch.cuda.device_count() > 1 and not by_torchrun()
    with lease_free(sum(map(len, shared)) if several else 0) as gpus:
        if gpus:
            free_memory()  # which making bases has taken
            failures += train_shares(deal(shared, len(gpus)), gpus)
        else:
            train_in_turn(shared, failures)
    if not any(isinstance(failure, Interrupted) for failure in failures):
        train_in_turn([group for group in groups if group not in shared], failures)
    for failure in sorted(failures, key=lambda failure: isinstance(failure, Interrupted)):
        raise failure


def train_in_turn(groups: Groups, failures: list[BaseException], end: Announcement | None = None) -> None:
    """Train groups one after another in this process, and add what ended one of them to `failures`."""
    for group in groups:
        if end and end.number:
            raise Interrupted(end.number)
        name = group[0].id
        try:
            if len(group) > 1:
                train_cohort(group, end)
            else:
                with naming(name):
                    train_run(group[0], end=end)
        except Exception as error:  # noqa: BLE001 - whatever ended it, the others are trained
            if len(group) == 1:
                log.error("%s: %s", name, error, exc_info=not isinstance(error, UserError))
                if error.args == (str(error),):
                    error.args = (f"{name}: {error}",)
            failures.append(error)
            free_memory(error)  # for the next


# The sharing-out.


def expected_tokens(job: TrainJob) -> int:
    """The tokens that a run still has to draw: as many a step as at an earlier start, or else the most."""
    metrics, rollout = state_folder(job) / METRICS, job.settings.rollout
    drawn = [row.completion_tokens for row in read_rows(StepMetrics, metrics)] if metrics.is_file() else []
    most = rollout.prompts * rollout.group_size * rollout.sampling.max_tokens
    return round((job.settings.steps - len(drawn)) * (statistics.fmean(drawn) if drawn else most))


def deal(groups: Groups, gpus: int) -> list[list[list[TrainJob]]]:
    """The groups of each GPU, of those that get any.

    The group with the most work comes first. It stays whole if that makes no GPU's share larger than an equal one.
    Otherwise its runs are dealt, the longest first. What is dealt goes to the GPU with the least work.
    """
    tokens = {job.out: expected_tokens(job) for group in groups for job in group}

    def work(jobs: Sequence[TrainJob]) -> int:
        return sum(tokens[job.out] for job in jobs)

    loads, shares = [0] * gpus, [list[list[TrainJob]]() for _ in range(gpus)]
    for group in sorted(groups, key=work, reverse=True):
        is_whole = gpus * (min(loads) + work(group)) <= sum(tokens.values())
        parts = [list[TrainJob]() for _ in range(gpus)]
        for piece in [group] if is_whole else sorted(([job] for job in group), key=work, reverse=True):
            least = loads.index(min(loads))
            loads[least] += work(piece)
            parts[least] += piece
        for share, part in zip(shares, parts, strict=True):
            share += [part] if part else []
    return [share for share in shares if share]


# The processes.


def train_shares(shares: Sequence[Groups], gpus: Sequence[str]) -> list[BaseException]:
    """Train each share in a process that sees its GPU alone, and return what ended runs and processes, if anything.

    A signal ends all runs after their present step, and a second one ends the processes at once.
    """
    context, failures, is_told = multiprocessing.get_context("spawn"), list[BaseException](), False
    running: dict[Any, tuple[BaseProcess, str]] = {}
    with announced(also=[signal.SIGINT]) as end, ExitStack() as last:
        for gpu, share in zip(gpus, shares, strict=False):
            runs = ", ".join(job.id for group in share for job in group)
            log.info("GPU %s trains %s", gpu, runs)
            receiving, sending = context.Pipe(duplex=False)
            with environment_variables({**_ENVIRONMENT, VISIBLE: gpu}):
                child = context.Process(target=begin, args=(*beginning(_train_share, len(shares)), share, sending))
                child.start()
            last.callback(child.join)
            last.callback(child.kill)
            sending.close()
            running[receiving] = child, f"the process of GPU {gpu}, which trained {runs},"
        while running:
            if end.number and not is_told:
                is_told = True
                for each, _ in running.values():
                    each.terminate()
            ready: Any
            for ready in wait([*running], _POLL_SECONDS):
                ended, what = running.pop(ready)
                with suppress(EOFError):  # it ended before it sent them
                    failures += ready.recv()
                ended.join()
                if ended.exitcode:
                    failures.append(_reason(ended.exitcode, what, len(shares), end.number))
    return failures


def _reason(status: int, what: str, count: int, signalled: int) -> BaseException:
    """The error of a process that ended with this status."""
    if signalled or status == INTERRUPTED:
        return Interrupted(signalled or signal.SIGTERM)
    if status == UNGUARDED:
        return unguarded(count)
    killed = "was killed, possibly because memory ran out"
    how = killed if status == -signal.SIGKILL else f"ended with status {status}, and what it printed says why"
    return KilledError(f"{what} {how}; start again: the runs continue from their last checkpoints")


def _train_share(groups: Groups, answer: Connection) -> None:
    """Train a share in this process, and send what ended runs."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failures = list[BaseException]()
    try:
        # Repeated signals are one: a terminal or a cluster may send its own to each process.
        with announced(alone=False, also=[signal.SIGINT]) as end:
            train_in_turn(groups, failures, end)
    finally:
        answer.send([*map(_portable, failures)])


def _end_with_parent() -> None:
    """End this process when its parent has ended, which holds the locks of its runs."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """The error for another process. Classes of others may not be unpickled there: they become `RuntimeError`."""
    if isinstance(error, UserError):
        return error
    portable = RuntimeError(f"{error} ({type(error).__name__})")
    portable.add_note("".join(traceback.format_exception(error)))
    return portable
