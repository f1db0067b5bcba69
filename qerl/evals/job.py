"""An evaluation from files to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.checkpoints.context import usable_length
from qerl.evals import RESULT, SAMPLES
from qerl.evals.evaluate import evaluate
from qerl.host.progress import log
from qerl.layers.noisy_norm import noise_norm
from qerl.policy.policy import Policy, load_policy
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.rl.failures import failed
from qerl.rollout.factory import make_sampler
from qerl.settings.evaluation import EvaluationSettings


def evaluate_policy(
    settings: EvaluationSettings,
    row: dict[str, Any],
    checkpoint: Path,
    trained: Path | None,
    datasets: dict[str, Path],
    out: Path,
) -> None:
    """Score a base or the outcome of a run on every task of `settings`; `row` says which policy it is.

    Of a run that failed, the result says that and has no task.
    """
    if trained and (status := failed(trained)):
        out.mkdir(parents=True, exist_ok=True)
        (out / SAMPLES).write_text("")
        write_json(out / RESULT, {**row, "tasks": {}, "status": status, "provenance": stamp(settings.seed)})
        log.warning("not evaluated: the run is %s", status)
        return
    score_policy(load_policy(checkpoint, trained, settings.dtype), settings, row, datasets, out)


def score_policy(
    policy: Policy, settings: EvaluationSettings, row: dict[str, Any], datasets: dict[str, Path], out: Path
) -> None:
    """Score a policy, noise-free, on every task of `settings`; `out` gets samples.jsonl, then result.json."""
    sampler = make_sampler(policy, settings)
    context = usable_length(policy.lm.config.to_dict(), settings)
    tasks = evaluate(sampler, policy.tokenizer, settings, datasets, out, log.info, context)
    # That it was noise-free is told as it was, not as it should have been.
    told = {"tasks": tasks, "sampler": sampler.served, "noise_norm": noise_norm(policy.lm)}
    write_json(out / RESULT, {**row, **told, "provenance": stamp(settings.seed)})
