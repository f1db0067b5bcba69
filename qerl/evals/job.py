"""An evaluation from files to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl.config import EvaluationSettings
from qerl.evals.evaluate import evaluate
from qerl.models.policy import load_policy
from qerl.progress import log
from qerl.provenance import stamp, write_json
from qerl.rollout.make import make_sampler


def evaluate_policy(
    settings: EvaluationSettings,
    row: dict[str, Any],
    checkpoint: Path,
    trained: Path | None,
    datasets: dict[str, Path],
    out: Path,
) -> None:
    """Score a policy, noise-free, on every task of `settings`; `row` says which policy it is."""
    policy = load_policy(checkpoint, trained, settings.dtype)
    tasks = evaluate(make_sampler(policy, settings), policy.tokenizer, settings, datasets, out, log.info)
    write_json(out / "result.json", {**row, "tasks": tasks, "provenance": stamp(settings.seed)})
