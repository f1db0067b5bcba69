"""Seconds and memory of a GRPO step by arm (paper Table 3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qerl.bench.points import Point, run_points
from qerl.policy.policy import weight_bytes
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.rl.train import make_trainer
from qerl.settings.base import parse
from qerl.settings.benches import StepBench
from qerl.settings.run import RunSettings


def _measure(settings: RunSettings, checkpoint: Path, data: Path, work: Path) -> Callable[[int], dict[str, float]]:
    trainer = make_trainer(settings, checkpoint, data, work)
    held = weight_bytes(trainer.policy)

    def once(round_: int) -> dict[str, float]:
        metrics = trainer.step(round_ + 1, round_ * settings.rollout.prompts)
        return {**{part: metrics[f"seconds/{part}"] for part in ("step", "rollout", "update")}, "weight_bytes": held}

    return once


def bench_step(name: str, settings: StepBench, rows: list[dict[str, Any]], out: Path) -> None:
    """Time one step of each run in `rows` (id, arm, varied, settings, checkpoint and data folders), in turn."""
    with TemporaryDirectory() as work:
        points = []
        for row in rows:
            run = parse(RunSettings, row["settings"], f"arm {row['arm']}")
            label = {
                "model": run.model,
                "arm": row["arm"],
                "varied": row["varied"],
                "weights": run.weights,
                "recipe": run.recipe,
                "method": run.method,
                "rank": run.adapter.rank if run.method == "lora" else 0,
                "prompts": run.rollout.prompts,
                "group_size": run.rollout.group_size,
                "gradient_checkpointing": run.gradient_checkpointing,
            }
            folders = Path(row["checkpoint"]), Path(row["data"]), Path(work) / row["id"]
            points.append(Point(label, lambda run=run, folders=folders: _measure(run, *folders)))  # type: ignore[misc]
        measured = [_row(point) for point in run_points(points, settings.repeats, settings.interleave)]
    write_json(out, {"bench": name, "kind": "step", "points": measured, "provenance": stamp()})


def _row(point: Point) -> dict[str, Any]:
    parts = {part: [sample[part] for sample in point.samples] for part in ("step", "rollout", "update")}
    return {
        **point.label,
        "samples": parts["step"],
        "rollout_seconds": parts["rollout"],
        "update_seconds": parts["update"],
        "weight_bytes": point.samples[0]["weight_bytes"] if point.samples else None,
        "peak_memory_bytes": point.peak_memory_bytes or None,
        "status": point.status,
    }
