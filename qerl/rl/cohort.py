"""A cohort: runs that train side by side on one frozen base, whose rollouts one engine draws together.

Each run is a thread with a trainer of its own, and one thread works at a time. The threads meet where they ask for
completions: once every run waits for some, the engine draws all of them in one batch, and the runs go on in turn. So a
run does what it does alone, to the bit but for the rounding of the engine's batch sizes. Updates follow one another.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from qerl.data.hub import contents_of
from qerl.host.console import log, naming
from qerl.host.gpus import free_memory, leave_out
from qerl.host.imports import main_thread
from qerl.host.lease import is_first
from qerl.host.process import Announcement, Interrupted, announced
from qerl.host.provenance import flush, write_text
from qerl.jobs import TrainJob, refused_engine
from qerl.models.policy import Policy, with_adapters
from qerl.results.paths import RUN, VERSION
from qerl.rl.train import Place, prepared, state_folder, train_run
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Completion, NotFiniteError, Request, Sampler, SamplingParams, refuse_nan
from qerl.settings.base import ConfigError, UserError

#: The completions of each prompt of a request.
Drawn = list[list[Completion]]
#: The completions of a request of each run.
Draw = Callable[[Sequence[Request]], Sequence[Drawn | NotFiniteError]]


class Meeting:
    """Where the threads of runs wait for their turn, and for completions, which `draw` gives for one request of each.

    A run that has left has an empty request from then on. An error of one run's completions is that run's alone.
    """

    def __init__(self, runs: int, draw: Draw) -> None:
        self._runs, self._draw = runs, draw
        self._turns = threading.Condition()
        #: The runs that can go on, in order (the first one works), and what the others ask for.
        self._ready = list(range(runs))
        self._requests: dict[int, Request] = {}
        self._drawn: dict[int, Drawn | BaseException] = {}
        #: Seconds of the latest drawing.
        self._seconds = 0.0
        #: What ends all runs at their next request.
        self._end: BaseException | None = None

    def begin(self, run: int) -> None:
        """Wait for the run's first turn."""
        with self._turns:
            self._turns.wait_for(lambda: self._ready[0] == run)

    def generate(self, run: int, request: Request) -> Drawn:
        """The completions of a run's request. Raises what the drawing of the batch raises."""
        asked = time.perf_counter()
        with self._turns:
            self._requests[run] = request
            self._pass_on()
            self._turns.wait_for(lambda: self._ready[0] == run)
            drawn = self._end or self._drawn.pop(run)
        # A run's times are those of its own work and of the drawing that it shares.
        leave_out(time.perf_counter() - asked - self._seconds)
        if isinstance(drawn, BaseException):
            raise drawn
        return drawn

    def leave(self) -> None:
        """End the turn of a run that asks for nothing any more; the others go on without it."""
        with self._turns:
            self._pass_on()

    def end(self, error: BaseException) -> None:
        """Have every run raise `error` where it asks for completions, or waits for them."""
        self._end = error

    def _pass_on(self) -> None:
        """Give the turn to the next run. If all wait for completions, they are drawn first."""
        self._ready.pop(0)
        if not self._ready and self._requests:
            begun = time.perf_counter()
            none = Request((), replace(next(iter(self._requests.values())).params, turns=None))
            try:
                if self._end is None:
                    drawn = self._draw([self._requests.get(run, none) for run in range(self._runs)])
                    self._drawn = {run: drawn[run] for run in self._requests}
            except Exception as error:  # noqa: BLE001 - every run raises it, in its own thread
                self._drawn = dict.fromkeys(self._requests, error)
            self._ready, self._requests = sorted(self._requests), {}
            self._seconds = time.perf_counter() - begun
        self._turns.notify_all()


class Calls:
    """Calls that threads leave to the main thread, which alone can be interrupted by a signal."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def __call__(self, function: Callable[[], Any]) -> Any:
        """The value of `function()`, or what it raises."""
        answer: Future[Any] = Future()
        self._waiting.put((function, answer))
        return answer.result()

    def serve(self, threads: Sequence[threading.Thread], end: Announcement) -> None:
        """Do the calls until the threads have ended."""
        said = end.number
        while any(thread.is_alive() for thread in threads):
            if end.number != said:
                said = end.number
                log.info("all runs end after their present step; a second signal ends them without it")
            try:  # not without a limit: Python handles a signal in this thread, which must not only wait
                function, answer = self._waiting.get(timeout=0.1)
            except Empty:
                continue
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)
                if isinstance(error, KeyboardInterrupt):
                    raise


@dataclass(frozen=True)
class Seat:
    """The sampler of one run of a cohort."""

    meeting: Meeting
    run: int
    policy: Policy
    sampler: Sampler

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences of all runs that are decoded together."""
        return self.sampler.max_sequences

    @property
    def served(self) -> str:
        """Description of engine, kernels and weights, which results store."""
        return self.sampler.served

    def sync(self) -> None:
        """Do nothing: the engine syncs all runs before it draws."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Drawn:
        """See `Sampler`. It waits until the other runs ask, too."""
        drawn = self.meeting.generate(self.run, Request(prompts, params))
        refuse_nan(drawn)
        return drawn


def refused_cohort(jobs: Sequence[TrainJob]) -> str | None:
    """A sentence that says why these runs can't train side by side; None if they can."""
    first = jobs[0]
    if refusal := refused_engine(jobs):
        return refusal
    for job in jobs:
        if job.checkpoint != first.checkpoint and contents_of(job.checkpoint) != contents_of(first.checkpoint):
            return f"{first.id} and {job.id} have other bases, and runs side by side share one"
    for name in ("work", "out"):
        if len({getattr(job, name) for job in jobs}) < len(jobs):
            return f"runs side by side need a folder {name} each"
    return None


def cohorts(jobs: Sequence[TrainJob]) -> list[list[TrainJob]]:
    """The runs in groups that can train side by side, each in the first group with which it can."""
    groups: list[list[TrainJob]] = []
    for job in jobs:
        refusal = None
        for group in groups:
            if (refusal := refused_cohort([group[0], job])) is None:
                group.append(job)
                break
        else:
            groups.append([job])
            if refusal:
                log.info("%s; they train apart", refusal)
    return groups


def train_cohort(jobs: Sequence[TrainJob], end: Announcement | None = None) -> None:
    """Train runs side by side, each with its results in its job's `out`, as `train_run` does.

    A run that fails or has all of its steps leaves, and the others go on. Afterwards the first failure is raised, with
    the name of its run. A signal, Ctrl-C too, ends all runs after their present step, by `Interrupted`; a second one
    ends them without it where they ask for completions. Raises `ConfigError` for runs without a common base or engine.
    """
    if refusal := refused_cohort(jobs):
        raise ConfigError(f"{refusal}; train them one after another")
    log.info("%s train side by side", ", ".join(job.id for job in jobs))
    settings = [job.settings for job in jobs]
    adapted = with_adapters(jobs[0].checkpoint, [(s.adapter, s.seed) for s in settings], settings[0].dtype)
    policies = [prepared(policy, own) for policy, own in zip(adapted, settings, strict=True)]
    for policy, job in zip(policies, jobs, strict=True):
        policy.lm.name_or_path = str(job.checkpoint)  # to which the saved adapter refers
    sampler = make_sampler(policies[0], settings[0].rollout, others=policies[1:])
    meeting = Meeting(len(jobs), _draw_of(sampler, policies))
    calls, failures = Calls(), list[tuple[str, BaseException]]()

    def work(run: int, end: Announcement) -> None:
        meeting.begin(run)
        main_thread.set(calls)
        with naming(jobs[run].id):
            try:
                train_run(jobs[run], Place(policies[run], Seat(meeting, run, policies[run], sampler)), end)
            except BaseException as error:  # noqa: BLE001 - raised below, after the others have ended
                failures.append((jobs[run].id, error))
                if not isinstance(error, Interrupted):
                    log.error("%s", error, exc_info=not isinstance(error, UserError))
                free_memory(error)  # for the others
            finally:
                meeting.leave()

    with nullcontext(end) if end else announced(also=[signal.SIGINT]) as end:
        threads = [threading.Thread(target=work, args=(run, end), name=job.id) for run, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        try:
            calls.serve(threads, end)
        except KeyboardInterrupt as second:
            meeting.end(second)
            calls.serve(threads, end)
    for name, error in sorted(failures, key=lambda failure: isinstance(failure[1], Interrupted)):
        alone = sum(other is error for _, other in failures) == 1  # else it is of a batch of all runs
        if alone and error.args == (str(error),) and not isinstance(error, Interrupted):
            error.args = (f"{name}: {error}",)
        if isinstance(error, torch.OutOfMemoryError):
            fit = f"`qerl doctor --runs {len(jobs)}` says how many fit, and an own call trains the others"
            error.args = (f"{error}. {len(jobs)} runs share the GPU's memory: {fit}",)
        raise error


_NOT_FINITE = "trained weights are NaN or infinite; lower optimizer.learning_rate or use dtype=float32"


@torch.no_grad()
def _is_finite(policy: Policy) -> bool:
    """Whether the trained weights are finite; others become 0, since the run that has them ends.

    Products other than Hopper's multiply rows by adapters of other runs, too, with 0 in place of A x: 0 times NaN is
    NaN.
    """
    trained = tuple(parameter for _, parameter in policy.trainable())
    if bool(torch.stack(torch._foreach_norm(trained)).isfinite().all()):
        return True
    torch._foreach_zero_(trained)
    return False


def _draw_of(sampler: Sampler, policies: Sequence[Policy]) -> Draw:
    """The engine draws for all runs together, and the eager sampler, which has no batch of several, for one by one."""
    if isinstance(sampler, EngineSampler):
        engine = sampler

        def together(requests: Sequence[Request]) -> Sequence[Drawn | NotFiniteError]:
            lost = [not _is_finite(policy) for policy in policies]
            kept = [Request((), one.params) if gone else one for one, gone in zip(requests, lost, strict=True)]
            drawn = engine.generate_all(kept)
            return [NotFiniteError(_NOT_FINITE) if gone else one for one, gone in zip(drawn, lost, strict=True)]

        return together
    each = [EagerSampler(policy, sampler.max_sequences) for policy in policies]

    def one_by_one(requests: Sequence[Request]) -> list[Drawn | NotFiniteError]:
        drawn: list[Drawn | NotFiniteError] = []
        for one, request in zip(each, requests, strict=True):
            try:
                drawn.append(one.generate(request.prompts, request.params) if request.prompts else [])
            except NotFiniteError as error:  # of this run alone
                drawn.append(error)
        return drawn

    return one_by_one


# A run of a workflow, whose job may find it trained by the job of a cohort.


def store(job: TrainJob) -> Path:
    """The folder to which a workflow's cohort writes a run's results: Snakemake deletes the outputs of a failed job.

    It is named like the run's state, so that its results are of these settings, code, base and problems.
    """
    return job.finished / state_folder(job).name


def deliver_run(job: TrainJob) -> None:
    """Bring the results of a workflow's run to `job.out`: a cohort has stored them, or else a training makes them."""
    stored = store(job)
    if (stored / RUN).is_file():
        shutil.copytree(stored, job.out, dirs_exist_ok=True)
        flush(job.out)
        shutil.rmtree(job.work)
    elif job.taken:  # and so without a GPU
        raise ConfigError(f"{job.finished} has results of another base or of other problems; delete it and start again")
    else:
        train_run(job)
    if is_first(job.settings.nodes):
        write_text(job.out / VERSION, job.version)
        shutil.rmtree(job.finished.parent, ignore_errors=True)
