"""A training run: its loop (paper Algorithm 1), what watches and steers it, and its way from files to files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch

from qerl.checkpoints.files import check_checkpoint, usable_length
from qerl.data.grading import extract, statement
from qerl.data.hub import hash_of, model_files
from qerl.data.sources import split_file
from qerl.host.console import log, showing
from qerl.host.gpus import peak_memory_bytes, seconds
from qerl.host.lease import is_first
from qerl.host.process import Announcement, Interrupted, announced
from qerl.host.provenance import NO_ROOM, flush, write_text, writing
from qerl.jobs import TrainJob
from qerl.models.adapter_files import Base
from qerl.models.loading import check_attention_dropout
from qerl.models.policy import Policy, trained_in_full, trained_in_shards, weight_bytes, with_adapter
from qerl.results.paths import DATASET, METRICS, POLICY, ROLLOUTS, RUN, without_folders
from qerl.results.schema import (
    DIVERGED,
    NO_MEMORY,
    Provenance,
    Quartiles,
    RunResult,
    RunSummary,
    StepMetrics,
    line,
    whole,
    write,
)
from qerl.rl.checkpoint import Checkpoints, ResumeError, restore, whole_state
from qerl.rl.noise import Noise
from qerl.rl.parallel import Processes, connected, start_processes
from qerl.rl.rollouts import Collector, Rollout, Task
from qerl.rl.update import Choices, DivergedError, Updater
from qerl.rl.value import add_value
from qerl.rollout.factory import ShardedSampler, make_sampler
from qerl.rollout.sampler import NotFiniteError, Sampler
from qerl.settings.base import UserError
from qerl.settings.run import UNDECIDING, RunSettings
from qerl.trackers import Record, Trackers

# Warnings about rewards that give no gradient, with a completion as an example.

#: The number of consecutive steps without a difference in reward that causes a warning.
PATIENCE = 3
#: The number of characters of a completion's end that a warning shows.
_SHOWN = 200


class NoSignalError(UserError):
    """Rewards give no gradient, and `on_no_signal` is `stop`. The message is for the user."""


class Watch:
    """Watches the rollouts of a run, and warns at most once that their rewards give no gradient.

    `rows` are the metrics of the steps before, of a run that continues.
    """

    def __init__(self, settings: RunSettings, task: Task, rows: Sequence[dict[str, float]] = ()) -> None:
        self.settings = settings
        self.task = task
        reward = settings.reward
        self._grades_answers = not (reward.functions or settings.environment) and bool(reward.correct or reward.format)
        self._flat = len([*takewhile(lambda row: not _teaches(row, settings), reversed(rows))])
        self._warned = False

    def observe(self, step: int, rollout: Rollout, writes: bool = True) -> None:
        """Warn in the process that writes, or raise `NoSignalError` in all (`on_no_signal: stop`).

        The cause is either a first step without a readable answer, or `PATIENCE` steps of equal rewards.
        """
        # Decided by the rollout alone, which all processes have, so that all of them stop or none.
        self._flat = 0 if _teaches(rollout.metrics, self.settings) else self._flat + 1
        if self._warned:
            return
        if step == 1 and self._grades_answers and not self._reads_any(rollout):
            what = "no completion states an answer that the grader reads"
        elif self._flat >= PATIENCE:
            what = f"all completions of a problem earned the same in each of the last {PATIENCE} steps, "
            what += "which teaches nothing"
        else:
            return
        self._warned = True
        # With an example, because most causes show in a completion: cut off, another form, another language.
        group = rollout.groups[0]
        text = " ".join(group.texts[0].split())
        shown = text if len(text) <= _SHOWN else f"... {text[-_SHOWN:]}"
        wanted = statement(group.problem.answer, self.task.format, self.task.answer)
        graded = f"The grader wants {wanted!r}, a" if self._grades_answers else "A"
        message = f"step {step}: {what}. {graded} completion is {shown!r}. {self._remedy(rollout)}"
        if self.settings.on_no_signal == "stop":
            raise NoSignalError(message)
        if writes:
            log.warning("%s", message)

    def _reads_any(self, rollout: Rollout) -> bool:
        """Whether the grader reads an answer in some completion."""
        form = self.task.format, self.task.answer, self.task.units
        return any(extract(text, *form) is not None for group in rollout.groups for text in group.texts)

    def _remedy(self, rollout: Rollout) -> str:
        limit, metrics = self.settings.rollout.sampling.max_tokens, rollout.metrics
        if metrics["truncated"] > 0.5:
            cut = f"{metrics['truncated']:.0%} of the completions were cut off"
            return f"{cut}: raise rollout.sampling.max_tokens={limit}"
        if not self._grades_answers:
            return "Look at what the run's `reward` gives such completions"
        if not self._reads_any(rollout):
            asked = f"now {self.task.instruction!r}" if self.task.instruction else "now empty"
            return f"Change the data set's `instruction` ({asked}), or its `answer` or `format`"
        easy = metrics["reward/correct"] == 1
        return f"Give {'harder' if easy else 'easier'} problems, or raise rollout.group_size"


def _teaches(metrics: dict[str, float], settings: RunSettings) -> bool:
    """Whether the rewards give a gradient: they differ within a group, or for ppo within the batch."""
    return metrics["reward/std"] > 0 if settings.loss.name == "ppo" else metrics["reward/equal_groups"] < 1


def report(rows: list[dict[str, float]], settings: RunSettings) -> None:
    """Log the rewards of a finished run, and warn if none of its steps had a gradient."""
    said = f"reward {rows[0]['reward']:.3f} -> {rows[-1]['reward']:.3f} in {len(rows)} step{'s' * (len(rows) != 1)}"
    measure = f"validation/{settings.validation.measure}"
    if best := best_step(rows, measure):
        of_last, of_best = rows[-1].get(measure, math.nan), rows[best - 1][measure]
        said += f"; held-out {settings.validation.measure} {rows[0]['validation/base']:.3f} -> {of_last:.3f}"
        said += f", best {of_best:.3f} after step {best}" + ", which is kept" * (settings.validation.keep == "best")
    if any(_teaches(row, settings) for row in rows):
        log.info("%s", said)
    else:
        log.warning("%s: nothing was learned, since rewards differed in no step", said)


# Failures that an experiment may count as results (`on_failure: row`): out of memory, over the time limit, diverged.
#
# No other is caught: a job can't know that a machine was repaired, so delete the folder to try again. A higher time
# limit tries again by itself; it counts the seconds of steps over all attempts.


class TimeLimitError(RuntimeError):
    """A run has exceeded its time limit. The message is one sentence for the user."""


@dataclass(frozen=True)
class Failure:
    """A failure: its kind, as tables show it, and its message."""

    kind: str
    reason: str


@contextmanager
def noted(work: Path, time_limit: float | None) -> Iterator[None]:
    """Write a failure that can be a result to a note in `work`, and re-raise it. Each process writes its own note."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, TimeLimitError, DivergedError, NotFiniteError) as error:
        # By a note, because the process that started this one sees no exception of it, only its exit status.
        kind = DIVERGED if isinstance(error, (DivergedError, NotFiniteError)) else NO_MEMORY
        note = Failure(f"timeout of {time_limit:g} h" if isinstance(error, TimeLimitError) else kind, str(error))
        work.mkdir(parents=True, exist_ok=True)
        (work / f"failure-{os.getpid()}.json").write_text(json.dumps(asdict(note)), encoding="utf-8")
        raise


def failure(work: Path) -> Failure | None:
    """The failure that the processes noted for this attempt, if any; the first of several notes tells enough."""
    notes = sorted(work.glob("failure-*.json"))
    return Failure(**json.loads(notes[0].read_text(encoding="utf-8"))) if notes else None


# The training loop (paper Algorithm 1): roll out with noise, update, log, checkpoint.

_TO_LOWER = "lower micro_batch_tokens, or set gradient_checkpointing: true and the sampler's sleep: true"


def headline(row: Mapping[str, float]) -> str:
    """What is shown of a step: reward, mean length, KL to the base or else of sampler and trainer, tokens a second."""
    kl = f"KL {row['reference/kl']:.2g}" if row["reference/kl"] else f"sampler KL {row['mismatch/kl']:.2g}"
    rate = row["completion_tokens"] / row["seconds/step"]
    said = f"reward {row['reward']:.3f}, length {row['completion_length']:.0f}, {kl}, {rate:,.0f} tokens/s"
    if "validation/pass@1" in row:
        said += f", held-out pass@1 {row['validation/pass@1']:.3f}, reward {row['validation/reward']:.3f}"
        said += f" in {row['seconds/validation']:.0f} s"
    return said


def best_step(rows: list[dict[str, float]], measure: str) -> int | None:
    """The first step with the highest score; None if there is no score yet. NaN, of no known reward, is none."""
    scored = [row for row in rows if not math.isnan(row.get(measure, math.nan))]
    return int(max(scored, key=lambda row: row[measure])["step"]) if scored else None


class Trainer:
    """Trains a policy; `run` continues from the newest checkpoint. Every process of a run has a trainer.

    `work` gets metrics, stored rollouts and checkpoints, which have the `fingerprint`.
    """

    def __init__(
        self, settings: RunSettings, policy: Policy, sampler: Sampler, task: Task, work: Path, fingerprint: str = ""
    ) -> None:
        self.processes = Processes()
        self.settings = settings
        self.policy = policy
        self.work = work
        self.collector = Collector(settings, policy, sampler, task)
        self.checkpoints = Checkpoints(work, fingerprint)
        self.noise = Noise(policy.lm, settings.noise, settings.seed)
        self.updater = Updater(settings, policy, self.processes)
        #: The ids of the problems that some completion has solved.
        self.solved: set[str] = set()
        #: The trained tensors of the best score, with `validation.keep: best`.
        self.best: dict[str, torch.Tensor] = {}
        #: The lines of the metrics file.
        self._lines: list[str] = []

    def run(
        self, time_limit: float | None = None, end: Announcement | None = None, trackers: Trackers | None = None
    ) -> list[dict[str, float]]:
        """Train to the last step, and return the metrics of all steps, which `trackers` get as they come.

        Raises `TimeLimitError` if all steps, including those before a kill, took longer than `time_limit` hours. Raises
        `Interrupted` after a step during which `end` was announced, with a checkpoint of it.
        """
        rows = self._resume()
        watch = Watch(self.settings, self.collector.task, rows)
        store = self.work / ROLLOUTS
        if trackers:  # rows that a kill kept from them
            trackers.log(rows)
        writes, last = self.processes.writes, self.settings.steps
        with showing(last, "steps", len(rows)) if writes else nullcontext(lambda about="": None) as advance:
            before = self._scores(0) if self.settings.validation.every and not rows else {}
            for step in range(len(rows) + 1, last + 1):
                if self._is_at_plateau(rows):
                    break
                if time_limit is not None:
                    self._keep_to(time_limit, rows)
                rows.append(self.step(step, int(rows[-1]["problems"]) if rows else 0, watch, store))
                self._validate(rows, before)
                if writes:
                    self._write(rows)
                if trackers:
                    trackers.log(rows)
                # All processes must decide alike, also if only one of several machines has the signal.
                ending = int(self.processes.max(end.number)) if end else 0
                # The last step needs no checkpoint: the results are written at once.
                if (ending or step % self.settings.checkpoint_every == 0) and step < last:
                    self._save(rows)
                advance(headline(rows[-1]))
                if ending and step < last:
                    self.processes.wait()  # the others end when this one does, perhaps amid their checkpoint
                    raise Interrupted(ending)
        with torch.no_grad():
            for name, parameter in self.policy.trainable() if self.best else ():
                parameter.copy_(self.best[name])
        return rows

    def _keep_to(self, hours: float, rows: list[dict[str, float]]) -> None:
        # All processes must decide alike, so the longest time counts.
        taken = sum(row["seconds/step"] + row.get("seconds/validation", 0) for row in rows)
        if self.processes.max(taken) < 3600 * hours:
            return
        self._save(rows)  # a start with a higher limit continues
        raise TimeLimitError(
            f"the run is over its time limit of {hours:g} h after {len(rows)} of {self.settings.steps} steps; raise "
            "time_limit of its experiment to continue"
        )

    def step(self, step: int, position: int, watch: Watch | None = None, store: Path | None = None) -> dict[str, float]:
        """Do one rollout and its updates, and return the metrics; earlier steps have used `position` problems.

        `watch` sees the rollout, and the folder `store` gets it; benches, which call this, have neither.
        """
        with seconds() as total, self.noise.at(step, self.settings.steps) as report:
            with seconds() as sync_time:
                # After the noise is set: the sampler reads it, or copies it, here.
                self.collector.sampler.sync()
            with seconds() as rollout_time:
                rollout = self.collector.collect(step, position)
            if watch:
                watch.observe(step, rollout, self.processes.writes)
            # The policy is updated without noise, so that the gradient is taken at the weights that stay. With
            # the other mode it has the rollout's noise, so that both compute the same probabilities.
            if self.settings.noise.mode == "sampler":
                self.noise.clear()
            if self.policy.root is not None:
                cast(ShardedSampler, self.collector.sampler).end_rollout()
            self.solved |= {group.problem.id for group in rollout.groups if group.solved}
            stored = self.collector.to_store(step, rollout) if store else None
            with seconds() as update_time:
                try:
                    update = self.updater.update(step, rollout.samples, stored)
                except torch.OutOfMemoryError as error:
                    raise torch.OutOfMemoryError(f"the update ran out of GPU memory; {_TO_LOWER}") from error
            if stored and store:
                stored.write(store)
        completed = rollout.metrics["completion_tokens"]
        read = sum(s.length for s in rollout.samples) * self.settings.loss.updates_per_rollout
        return {
            "step": step,
            **rollout.metrics,
            "discovery": len(self.solved) / len(self.collector.task.problems),
            **update,
            "temperature": self.settings.rollout.sampling.temperature,
            "noise/sigma": report.sigma,
            "noise/norm": report.norm,
            "tokens_per_second/rollout": completed / rollout_time.value,
            "tokens_per_second/update": read / update_time.value,
            "seconds/sync": sync_time.value,
            "seconds/rollout": rollout_time.value,
            "seconds/update": update_time.value,
            "seconds/step": total.value,
            "memory_bytes": peak_memory_bytes(),
        }

    # --- scores on held-out problems ---

    def _scores(self, step: int) -> dict[str, float]:
        """The scores of the policy after `step`, without noise, and the seconds that they took."""
        with seconds() as taken:
            self.collector.sampler.sync()
            scores = self.collector.score(step)
            if self.policy.root is not None:
                cast(ShardedSampler, self.collector.sampler).end_rollout()
        return {**scores, "seconds/validation": taken.value}

    def _validate(self, rows: list[dict[str, float]], before: dict[str, float]) -> None:
        """Add the scores after the last of `rows`, if they are due, and those `before` the first step to its row."""
        validation, step = self.settings.validation, len(rows)
        measure = f"validation/{validation.measure}"
        if before and step == 1:
            rows[0] |= {"validation/base": before[measure], "seconds/validation": before["seconds/validation"]}
        if not validation.every or (step % validation.every and step < self.settings.steps):
            return
        scores, spent = self._scores(step), rows[-1].get("seconds/validation", 0.0)
        rows[-1] |= {**scores, "seconds/validation": scores["seconds/validation"] + spent}
        if validation.keep == "best" and best_step(rows, measure) == step:
            self.best = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.policy.trainable()}

    def _is_at_plateau(self, rows: list[dict[str, float]]) -> bool:
        """Whether `validation.patience` scores in a row were no better than the best one."""
        validation = self.settings.validation
        measure = f"validation/{validation.measure}"
        best = best_step(rows, measure)
        if validation.patience is None or best is None:
            return False
        if sum(measure in row for row in rows[best:]) < validation.patience:
            return False
        if self.processes.writes:
            log.info("the run ends after step %d: %s was best after step %d", len(rows), measure, best)
        return True

    def trained_policy(self) -> Policy:
        """The policy with whole weights, to be saved. Every process calls this, and samples no more."""
        if self.policy.root is None:
            return self.policy
        return cast(ShardedSampler, self.collector.sampler).whole_policy()

    # --- state ---

    def _save(self, rows: list[dict[str, float]]) -> None:
        """Save a checkpoint. Every process calls this, because each may have a part of the state."""
        state = whole_state(dict(self.policy.trainable()), self.updater.optimizer, self.processes)
        if self.processes.writes:
            choices = self.updater.choices and asdict(self.updater.choices)
            progress = {"rows": rows, "solved": sorted(self.solved), "choices": choices, "best": self.best}
            self.checkpoints.save(len(rows), {**state, **progress})

    def _resume(self) -> list[dict[str, float]]:
        """Continue from the newest checkpoint, and return the metrics of the steps before; none without one."""
        newest = self.checkpoints.load() if self.processes.writes else None
        state = restore(newest, dict(self.policy.trainable()), self.updater.optimizer, self.processes)
        if state is None:
            return []
        # Passes compute with rounded copies of weights that are trained in 16 bits; the checkpoint has the exact ones.
        self.policy.use_trained()
        # What free memory decided at first holds for the whole run: it changes the last bits.
        self.updater.choices = state["choices"] and Choices(**state["choices"])
        self.solved, self.best = set(state["solved"]), state["best"]
        rows: list[dict[str, float]] = state["rows"]
        if self.processes.writes:
            log.info("continuing from step %d of %d", len(rows), self.settings.steps)
        return rows

    def _write(self, rows: list[dict[str, float]]) -> None:
        """Write the metrics file. It is rewritten at each step, so that a kill leaves no partial or repeated row."""
        self._lines += [line(StepMetrics.model_validate(row)) for row in rows[len(self._lines) :]]
        write_text(self.work / METRICS, "".join(self._lines))


# A run, from and to files.


def make_policy(settings: RunSettings, checkpoint: Path) -> Policy:
    """The policy with which a run starts. Raises `ConfigError` for a model with dropout in attention."""
    check_attention_dropout(checkpoint)
    if settings.method == "full":
        trained = trained_in_shards if settings.processes > 1 else trained_in_full
        policy = trained(checkpoint, settings.dtype)
    else:
        policy = with_adapter(checkpoint, settings.adapter, settings.dtype, settings.seed)
    return prepared(policy, settings)


def prepared(policy: Policy, settings: RunSettings) -> Policy:
    """The policy with what its updates need: a value function for ppo, and gradient checkpointing if set."""
    if settings.loss.name == "ppo":
        add_value(policy, settings.loss.ppo)
    if settings.gradient_checkpointing is True:  # active only in training mode, and so in updates
        policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    return policy


@dataclass(frozen=True)
class Place:
    """What a run in a cohort shares with others (`qerl.rl.cohort`): its policy's base, and the sampler."""

    policy: Policy
    sampler: Sampler


def make_trainer(
    settings: RunSettings, checkpoint: Path, data: Path, work: Path, fingerprint: str = "", place: Place | None = None
) -> Trainer:
    """The trainer of policy, sampler and problems. `work` gets metrics and checkpoints, with the fingerprint."""
    Processes()  # selects this process's GPU before anything is allocated on one
    policy = place.policy if place else make_policy(settings, checkpoint)
    context = usable_length(policy.lm.config.to_dict(), settings.rollout)
    task = Task.of(data, settings.validation).fitting(policy.tokenizer, settings.rollout, context)
    sampler = place.sampler if place else make_sampler(policy, settings.rollout)
    return Trainer(settings, policy, sampler, task, work, fingerprint)


def state_folder(job: TrainJob) -> Path:
    """The folder of the run's state, named by the settings and the code that decide it, its base and its problems.

    Files' modification times don't count, because a clock may be wrong, and copies may keep old times.
    """
    check_checkpoint(job.checkpoint)
    files = [*model_files(job.checkpoint), job.data / DATASET, split_file(job.data, "train")]
    text = job.settings.model_dump_json(exclude=UNDECIDING) + job.code + "".join(map(hash_of, files))
    return job.work / hashlib.sha256(text.encode()).hexdigest()[:16]


def train_run(job: TrainJob, place: Place | None = None, end: Announcement | None = None) -> None:
    """Train a run and write its results to `job.out`; signals are the caller's if it gives `end`.

    `job.work` keeps the state of a killed run, from which the next start continues. Callers lock it
    (`qerl.host.lease.alone`). On several machines the first one writes. `job.out` is written only at the end; with
    `on_failure: row` also if the run is out of memory, over `time_limit` or diverges.
    """
    # A note of an earlier attempt would pass for the cause of this one's failure.
    for note in job.work.glob("failure-*.json"):
        note.unlink()
    state, first = state_folder(job), is_first(job.settings.nodes)
    if not state.exists() and any(job.work.glob("*/step-*")):
        log.info("the run starts anew: checkpoints in %s are of other settings, code, base or data", job.work)
    nodes, timeout = job.settings.nodes, job.settings.node_timeout
    try:
        if not start_processes(job.settings.processes, _train, job, state, nodes=nodes, node_timeout=timeout):
            with connected(nodes, timeout):
                _train(job, state, place, end)
    except (RuntimeError, MemoryError, ValueError):
        # Only failures that the processes noted can be rows: a defect or a full disk isn't a result.
        cause = failure(job.work)
        if cause is None or job.on_failure == "stop":
            raise
        if first:
            _write_failure(job, cause, state)
    else:
        if first:
            # Only now, as the results are on disk. Checkpoints go first: a start after a kill would continue from one,
            # and miss the stored rollouts that are gone.
            for checkpoint in state.glob("step-*.pt"):
                checkpoint.unlink()
            shutil.rmtree(job.work)


def _write_failure(job: TrainJob, cause: Failure, state: Path) -> None:
    """Write a result without a policy. Checkpoints remain, so an attempt with more memory or time continues."""
    metrics = state / METRICS
    rows = metrics.read_text(encoding="utf-8") if metrics.is_file() else ""
    status = f"{cause.kind} after {rows.count(chr(10))} of {job.settings.steps} steps"
    (job.out / POLICY).mkdir(parents=True, exist_ok=True)
    write_text(job.out / METRICS, rows)
    _copy_rollouts(state, job.out)
    stamped = Provenance.of_now(job.settings.seed)
    result = RunResult(**_named(job), status=status, reason=cause.reason, summary=None, provenance=stamped)
    write(job.out / RUN, result)
    log.warning("%s: %s (%s)", job.id, status, cause.reason)


def _train(job: TrainJob, state: Path, place: Place | None = None, end: Announcement | None = None) -> None:
    """Train in one process of a run; the first process writes the results."""
    with ExitStack() as last:
        with noted(state.parent, job.time_limit):
            trainer = make_trainer(job.settings, job.checkpoint, job.data, state, state.name, place)
            # Closed after the results are written: a tracker's library may wait for its server.
            trackers = last.enter_context(_trackers(job, state, trainer.processes))
            # To the end, because the results of the last step are no checkpoint before they are written.
            end = end or last.enter_context(announced(alone=trainer.processes.count == 1))
            rows = trainer.run(job.time_limit, end, trackers)
        # Before the whole policy is gathered, whose memory doesn't count as training's.
        peak = trainer.processes.max(peak_memory_bytes())
        policy = trainer.trained_policy()
        if trainer.processes.writes:
            _write_result(job, trainer, policy, rows, peak)


def _write_result(job: TrainJob, trainer: Trainer, policy: Policy, rows: list[dict[str, float]], peak: float) -> None:
    """Write policy, metrics and run.json; `peak` is this attempt's largest memory in any process, in bytes."""
    job.out.mkdir(parents=True, exist_ok=True)
    validation = job.settings.validation
    kept = best_step(rows, f"validation/{validation.measure}") if validation.keep == "best" else None
    summary = RunSummary(
        steps=len(rows),
        kept_step=kept,
        seconds=sum(row["seconds/step"] for row in rows),
        peak_memory_bytes=max(peak, *(row["memory_bytes"] for row in rows)),
        trainable_parameters=sum(p.numel() for _, p in trainer.policy.trainable()),
        weight_bytes=weight_bytes(trainer.policy),
        sampler=trainer.collector.sampler.served,
        **_speeds(rows),
    )
    # Policy and metrics must be on disk before run.json, which marks the run as finished.
    try:
        with writing(job.out):
            policy.save(job.out / POLICY, Base(job.base.name, job.base.revision) if job.base else None)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ResumeError(
            f"can't write the trained policy to {job.out} ({error.strerror}); make room and start again: the run "
            "continues from its last checkpoint"
        ) from error
    # Copied, not moved: a kill before run.json is written finds the state as it was.
    shutil.copyfile(trainer.work / METRICS, job.out / METRICS)
    _copy_rollouts(trainer.work, job.out)
    flush(job.out / POLICY)
    flush(job.out / METRICS)
    stamped = Provenance.of_now(job.settings.seed)
    write(job.out / RUN, RunResult(**_named(job), summary=summary, provenance=stamped))
    report(rows, job.settings)


def _trackers(job: TrainJob, state: Path, processes: Processes) -> AbstractContextManager[Trackers | None]:
    """The trackers of a run, in the project of its experiment; none in processes that write no files."""
    if not job.settings.track or not processes.writes:
        return nullcontext()
    record = Record(job.experiment, job.id, state, job.tracked, without_folders(whole(job.settings)))
    return Trackers(job.settings.track, record)


def _copy_rollouts(state: Path, out: Path) -> None:
    """Copy the stored rollouts. A run that stores none has an empty folder."""
    shutil.rmtree(out / ROLLOUTS, ignore_errors=True)
    (out / ROLLOUTS).mkdir()
    for file in sorted((state / ROLLOUTS).glob("*.gz")):
        shutil.copyfile(file, out / ROLLOUTS / file.name)
    flush(out / ROLLOUTS)


def _named(job: TrainJob) -> dict[str, Any]:
    return {"run": job.id, **{name: getattr(job, name) for name in ("experiment", "arm", "varied", "settings")}}


def _speeds(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the steps, without the first one, a warm-up, if there are others."""
    warm = rows[1:] or rows
    step = [row["seconds/step"] for row in warm]
    quartiles = statistics.quantiles(step, n=4, method="inclusive") if len(step) > 1 else step * 3
    return {
        "rollout_tokens_per_second": statistics.median(row["tokens_per_second/rollout"] for row in warm),
        "update_tokens_per_second": statistics.median(row["tokens_per_second/update"] for row in warm),
        "step_seconds": Quartiles(**dict(zip(("p25", "median", "p75"), quartiles, strict=True))),
    }
