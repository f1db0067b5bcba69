"""A training run, from and to files."""

from __future__ import annotations

import hashlib
import shutil
import statistics
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from qerl.checkpoints.files import check_checkpoint, usable_length
from qerl.data.inputs import hash_of, model_files
from qerl.data.sources import split_file
from qerl.host.console import log
from qerl.host.gpus import peak_memory_bytes
from qerl.host.interrupt import announced
from qerl.host.nodes import is_first
from qerl.host.provenance import NO_ROOM, flush, write_text, writing
from qerl.jobs import TrainJob
from qerl.models.adapter_files import Base
from qerl.models.loading import check_attention_dropout
from qerl.models.policy import Policy, trained_in_full, trained_in_shards, weight_bytes, with_adapter
from qerl.results.paths import DATASET, METRICS, POLICY, ROLLOUTS, RUN, without_folders
from qerl.results.schema import Provenance, Quartiles, RunResult, RunSummary, whole
from qerl.results.store import write
from qerl.rl.checkpoint import Checkpoints, ResumeError
from qerl.rl.failures import Failure, failure, forget, noted
from qerl.rl.parallel import Processes, run_in_processes
from qerl.rl.rollouts import Collector, Task
from qerl.rl.trainer import Trainer, report
from qerl.rl.value import add_value
from qerl.rollout.factory import make_sampler
from qerl.settings.run import UNDECIDING, RunSettings
from qerl.trackers import Record, Trackers


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


def make_trainer(settings: RunSettings, checkpoint: Path, data: Path, work: Path, fingerprint: str = "") -> Trainer:
    """The trainer of policy, sampler and problems. `work` gets metrics and checkpoints, with the fingerprint."""
    Processes()  # selects this process's GPU before anything is allocated on one
    policy = make_policy(settings, checkpoint)
    context = usable_length(policy.lm.config.to_dict(), settings.rollout)
    task = Task.of(data).fitting(policy.tokenizer, settings.rollout, context)
    checkpoints = Checkpoints(work, fingerprint)
    collector = Collector(settings, policy, make_sampler(policy, settings.rollout), task)
    return Trainer(settings, policy, collector, checkpoints, work / METRICS)


def _state_folder(job: TrainJob) -> Path:
    """The folder of the run's state, named by the settings and the code that decide it, its base and its problems.

    Files' modification times don't count, because a clock may be wrong, and copies may keep old times.
    """
    check_checkpoint(job.checkpoint)
    files = [*model_files(job.checkpoint), job.data / DATASET, split_file(job.data, "train")]
    text = job.settings.model_dump_json(exclude=UNDECIDING) + job.code + "".join(map(hash_of, files))
    return job.work / hashlib.sha256(text.encode()).hexdigest()[:16]


def train_run(job: TrainJob) -> None:
    """Train a run and write its results to `job.out`.

    `job.work` keeps the state of a killed run, from which the next start continues. Callers lock it
    (`qerl.host.lease.alone`). On several machines the first one
    writes. `job.out` is written only at the end; with `on_failure: row` also if the run is out
    of memory, over `time_limit` or diverges.
    """
    # A note of an earlier attempt would pass for the cause of this one's failure.
    forget(job.work)
    state, first = _state_folder(job), is_first(job.settings.nodes)
    if not state.exists() and any(job.work.glob("*/step-*")):
        log.info("the run starts anew: checkpoints in %s are of other settings, code, base or data", job.work)
    try:
        shared = {"nodes": job.settings.nodes, "node_timeout": job.settings.node_timeout}
        run_in_processes(job.settings.processes, _train, job, state, **shared)
    except (RuntimeError, MemoryError, ValueError):
        # Only failures that the processes noted can be rows: a defect or a full disk isn't a result.
        cause = failure(job.work)
        if cause is None or job.on_failure == "stop":
            raise
        if first:
            _write_failure(job, cause, state)
    else:
        if first:
            # Only now, as the results are on disk.
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


def _train(job: TrainJob, state: Path) -> None:
    """Train in one process of a run; the first process writes the results."""
    with ExitStack() as last:
        with noted(state.parent, job.time_limit):
            trainer = make_trainer(job.settings, job.checkpoint, job.data, state, state.name)
            # Closed after the results are written: a tracker's library may wait for its server.
            trackers = last.enter_context(_trackers(job, state, trainer.processes))
            # To the end, because the results of the last step are no checkpoint before they are written.
            end = last.enter_context(announced(alone=trainer.processes.count == 1))
            rows = trainer.run(job.time_limit, end, trackers)
        # Before the whole policy is gathered, whose memory isn't that of training.
        peak = trainer.processes.max(peak_memory_bytes())
        whole = trainer.trained_policy()
        if trainer.processes.writes:
            _write_result(job, trainer, whole, rows, peak)


def _write_result(
    job: TrainJob, trainer: Trainer, whole_policy: Policy, rows: list[dict[str, float]], peak: float
) -> None:
    """Write policy, metrics and run.json; `peak` is this attempt's largest memory in any process, in bytes."""
    trained = sum(p.numel() for _, p in trainer.policy.trainable())
    job.out.mkdir(parents=True, exist_ok=True)
    bytes_of_weights = weight_bytes(trainer.policy)
    _save(whole_policy, trainer, job.out, Base(job.base.name, job.base.revision) if job.base else None)
    summary = RunSummary(
        steps=len(rows),
        seconds=sum(row["seconds/step"] for row in rows),
        peak_memory_bytes=max(peak, *(row["memory_bytes"] for row in rows)),
        trainable_parameters=trained,
        weight_bytes=bytes_of_weights,
        sampler=trainer.collector.sampler.served,
        **_speeds(rows),
    )
    stamped = Provenance.of_now(job.settings.seed)
    write(job.out / RUN, RunResult(**_named(job), summary=summary, provenance=stamped))
    report(rows, job.settings)


def _trackers(job: TrainJob, state: Path, processes: Processes) -> AbstractContextManager[Trackers | None]:
    """The trackers of a run, in the project of its experiment; none in processes that write no files."""
    if not job.settings.track or not processes.writes:
        return nullcontext()
    record = Record(job.experiment, job.id, state, job.tracked, without_folders(whole(job.settings)))
    return Trackers(job.settings.track, record)


def _save(policy: Policy, trainer: Trainer, out: Path, base: Base | None) -> None:
    """Write policy and metrics. They must be on disk before run.json, which marks the run as finished."""
    try:
        with writing(out):
            policy.save(out / POLICY, base)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ResumeError(
            f"can't write the trained policy to {out} ({error.strerror}); make room and start again: the run continues "
            "from its last checkpoint"
        ) from error
    shutil.copyfile(trainer.metrics, out / METRICS)
    _copy_rollouts(trainer.metrics.parent, out)
    flush(out / POLICY)
    flush(out / METRICS)


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
