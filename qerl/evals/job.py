"""The job of an evaluation, from and to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.checkpoints.context import usable_length
from qerl.evals.evaluate import evaluate, scorer
from qerl.host.imports import imports
from qerl.host.progress import log
from qerl.jobs.evaluate import EvaluateJob
from qerl.layers.noisy_norm import noise_norm
from qerl.policy.policy import Policy, load_policy
from qerl.results.files import write
from qerl.results.paths import OUTCOMES, RESULT, SAMPLES
from qerl.results.schema.evaluation import evaluation_of
from qerl.rl.failures import failed
from qerl.rollout.factory import make_sampler
from qerl.settings.evaluation import EvaluationSettings


def evaluate_policy(job: EvaluateJob) -> None:
    """Score a base or a run's policy on every task.

    The result of a failed run has its status and no task.
    """
    about = job.policy.model_dump(mode="json")
    if job.trained and (status := failed(job.trained)):
        job.out.mkdir(parents=True, exist_ok=True)
        for name in (SAMPLES, OUTCOMES):
            (job.out / name).write_text("", encoding="utf-8")
        write(job.out / RESULT, evaluation_of(about, job.settings.seed, tasks={}, status=status))
        log.warning("not evaluated: the run is %s", status)
        return
    with imports():
        for task in job.settings.tasks:
            scorer(task.harness)
    policy = load_policy(job.checkpoint, job.trained, job.settings.dtype)
    score_policy(policy, job.settings, about, job.data, job.out)


def score_policy(
    policy: Policy, settings: EvaluationSettings, row: dict[str, Any], datasets: dict[str, Path], out: Path
) -> None:
    """Score a policy, noise-free, on every task of `settings`; `out` gets samples, outcomes, and then result.json."""
    sampler = make_sampler(policy, settings)
    context = usable_length(policy.lm.config.to_dict(), settings)
    tasks = evaluate(sampler, policy.tokenizer, settings, datasets, out, log.info, context)
    # The result states the measured noise, which should be 0.
    noise = noise_norm(policy.lm)
    write(out / RESULT, evaluation_of(row, settings.seed, tasks=tasks, sampler=sampler.served, noise_norm=noise))
