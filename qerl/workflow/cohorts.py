"""The job that trains runs of a workflow side by side, before the jobs of these runs, which take the results."""

from __future__ import annotations

from collections.abc import Sequence

from qerl.checkpoints.shapes import ModelShape
from qerl.host.console import log
from qerl.host.lease import devices
from qerl.host.provenance import write_text
from qerl.jobs import CohortJob, TrainJob
from qerl.memory_model import StepSettings, runs_that_fit
from qerl.models.loading import config_of, has_packed_delta_nets
from qerl.models.structure import structure_of
from qerl.results.paths import RUN, VERSION
from qerl.rl.cohort import cohorts, store, train_cohort

#: Tokens of a prompt whose length has no limit, for the memory model.
_PROMPT_TOKENS = 512


def train_side_by_side(job: CohortJob) -> None:
    """Train the runs that have no results yet, as many at a time as fit the GPU, and store their results.

    A run that is left alone, or fails, is left to its own job, which continues it alone and says why it fails: it must
    not keep the results of others back. Where there are none, the first failure is raised.
    """
    waiting, failures = list[TrainJob](), list[Exception]()
    for run in job.runs:
        version, stored = run.out / VERSION, store(run)
        known = version.read_text(encoding="utf-8") if version.is_file() and (run.out / RUN).is_file() else ""
        if known.split()[:1] != run.version.split()[:1] and not (stored / RUN).is_file():
            waiting.append(run.model_copy(update={"out": stored, "on_failure": "stop"}))
    for cohort in cohorts(waiting):
        most = fitting(cohort)
        for some in (cohort[first : first + most] for first in range(0, len(cohort), most)):
            if len(some) > 1:
                try:
                    train_cohort(some)
                except Exception as error:  # noqa: BLE001 - raised below, or the job of the run that has it meets it
                    failures.append(error)
    if failures and not any(run.on_failure == "row" or (store(run) / RUN).is_file() for run in job.runs):
        raise failures[0]
    for failure in failures:
        log.warning("%s; runs that aren't finished continue in jobs of their own", failure)
    write_text(job.out, "")


def fitting(runs: Sequence[TrainJob]) -> int:
    """The number of these runs, at least 1, that fit the GPU side by side by the memory model.

    All do where it knows nothing: without a GPU, and for models whose blocks it doesn't predict.
    """
    capacity = max((gpu.total for gpu in devices().values()), default=0)
    structure = structure_of(config := config_of(checkpoint := runs[0].checkpoint))
    if not capacity or not structure.takes_packed_rows:
        return len(runs)
    shape = ModelShape.of(config.to_dict()).with_packed_nets(has_packed_delta_nets(checkpoint))
    if shape.block_weights != structure.block_weights:
        return len(runs)
    each, first = [run.settings for run in runs], runs[0].settings
    largest = max((one.rollout for one in each), key=lambda one: one.prompts * one.group_size)
    settings = StepSettings(
        weights=first.weights,
        rank=max(one.adapter.rank for one in each),
        prompts=largest.prompts,
        group=largest.group_size,
        prompt_tokens=max(one.rollout.max_prompt_tokens or _PROMPT_TOKENS for one in each),
        max_tokens=max(one.rollout.sampling.max_tokens for one in each),
        recompute=first.gradient_checkpointing,
        micro_batch_tokens=max(one.micro_batch_tokens for one in each),
        kv_cache_gib=first.rollout.native.kv_cache_gib,
        kv_cache_dtype=first.rollout.native.kv_cache_dtype,
        sleep=first.rollout.native.sleep,
        optimizer=first.optimizer.name,
        runs=len(runs),
    )
    most = max(1, runs_that_fit(shape, settings, capacity))
    if most < len(runs):
        log.info("%d of %d runs fit the GPU's memory side by side", most, len(runs))
    return most
