"""Seconds and memory of a GRPO step by arm (paper Table 3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qerl.bench.timing import Point, run_points
from qerl.jobs.profile import StepJob, TimedRun
from qerl.policy.policy import weight_bytes
from qerl.results.files import write
from qerl.results.schema.profile import StepBenchResult, StepPoint
from qerl.results.schema.stored import Provenance
from qerl.rl.train import make_trainer


def _measure(run: TimedRun, work: Path) -> Callable[[int], dict[str, float]]:
    trainer = make_trainer(run.settings, run.checkpoint, run.data, work)
    weights_bytes = weight_bytes(trainer.policy)

    def once(round_: int) -> dict[str, float]:
        metrics = trainer.step(round_ + 1, round_ * run.settings.rollout.prompts)
        return {
            **{part: metrics[f"seconds/{part}"] for part in ("step", "rollout", "update")},
            "weight_bytes": weights_bytes,
        }

    return once


def bench_step(job: StepJob) -> None:
    """Time repeated steps of each run, round by round."""
    with TemporaryDirectory() as work:
        points = [
            Point(_label(run), lambda run=run: _measure(run, Path(work) / run.id))  # type: ignore[misc]
            for run in job.runs
        ]
        measured = [_row(point) for point in run_points(points, job.settings.repeats, job.settings.interleave)]
    write(job.out, StepBenchResult(bench=job.bench, kind="step", points=measured, provenance=Provenance.of_now()))


def _label(run: TimedRun) -> dict[str, Any]:
    settings = run.settings
    return {
        "model": settings.model,
        "arm": run.arm,
        "varied": run.varied,
        "weights": settings.weights,
        "recipe": settings.recipe,
        "pack_delta_nets": settings.pack_delta_nets,
        "method": settings.method,
        "rank": settings.adapter.rank if settings.method == "lora" else 0,
        "prompts": settings.rollout.prompts,
        "group_size": settings.rollout.group_size,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }


def _row(point: Point) -> StepPoint:
    parts = {part: [sample[part] for sample in point.samples] for part in ("step", "rollout", "update")}
    return StepPoint(
        **point.label,
        samples=parts["step"],
        rollout_seconds=parts["rollout"],
        update_seconds=parts["update"],
        weight_bytes=point.samples[0]["weight_bytes"] if point.samples else None,
        peak_memory_bytes=point.peak_memory_bytes or None,
        status=point.status,
    )
