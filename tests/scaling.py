"""Runs that are timed on several GPUs, and the table of docs/scaling.md, which `python -m tests.scaling` writes.

`tests/gpu/time_scaling.py` measures them; files to keep are committed under `RESULTS`, a folder for each run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from qerl.results.paths import METRICS, RUN
from qerl.results.schema import OK, RunResult, StepMetrics, read, read_rows
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from qerl.settings.workflow import merged

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/scaling.md", ROOT / "results/reference/h200/scaling"
#: Untimed steps at the start of a run.
WARMUP = 1
_HEAD = ("run", "GPUs", "step, s", "speed-up", "goal", "idle, s: mean, longest", "peak, GB")
_MISSING = "not measured"
#: 16 prompts x 8 completions of 1,024 tokens. Rewards are hashes of texts, so that every group has a gradient.
_BASE: dict[str, Any] = {
    "dataset": "arithmetic",
    "steps": WARMUP + 3,
    "rollout": {"prompts": 16, "group_size": 8, "sampling": {"max_tokens": 1024}},
    "adapter": {"rank": 16, "alpha": 16, "train_norms": False},
    "reward": {"correct": 0.0, "format": 0.0, "functions": {"own": "qerl.bench.workloads:reward"}},
    "checkpoint_every": 100,
}
FULL = {
    "steps": WARMUP + 2,
    "micro_batch_tokens": 8192,
    "weights": "bf16",
    "method": "full",
    "gradient_checkpointing": True,
    "rollout": {"native": {"sleep": True}},
    "optimizer": {"name": "adamw8bit", "learning_rate": 1e-6},
}
_MIXED = {"rollout": {"sampling": {"max_tokens": 2048}}}
#: The lengths of config/peers.yaml's mixed steps.
_LENGTHS = 300, 0.8


@dataclass(frozen=True)
class Case:
    """A run on random weights of a shape."""

    title: str
    size: str
    gpus: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    #: Median and standard deviation of the log of completions' lengths, as the rollout bench draws them; None for the
    #: greatest length alone.
    lengths: tuple[int, float] | None = None
    #: The case on one GPU, this one's work as a multiple of that one's, and the least speed-up that is wanted.
    compared: tuple[str, int, float | None] | None = None

    def run(self) -> RunSettings:
        """The settings of the run; vLLM shares its GPUs within one process."""
        ours = {"model": self.size, "weights": "nvfp4", "processes": self.gpus}
        return parse(RunSettings, merged({**_BASE, **ours}, self.settings), self.title)


CASES = {
    "7b-1": Case("7B NVFP4 r16", "7B"),
    "7b-2": Case("the same work (strong)", "7B", 2, compared=("7b-1", 1, 1.78)),
    "7b-2-weak": Case("twice the prompts (weak)", "7B", 2, {"rollout": {"prompts": 32}}, compared=("7b-1", 2, 1.97)),
    "7b-mixed-1": Case("7B NVFP4 r16, mixed lengths", "7B", 1, _MIXED, _LENGTHS),
    "7b-mixed-2": Case("the same work (strong)", "7B", 2, _MIXED, _LENGTHS, ("7b-mixed-1", 1, 1.75)),
    # Without recomputation the activations of 32B don't fit.
    "32b-1": Case("32B NVFP4 r16", "32B", 1, {"gradient_checkpointing": True}),
    "32b-2": Case("the same work (strong)", "32B", 2, {"gradient_checkpointing": True}, compared=("32b-1", 1, None)),
    "14b-full-2": Case("14B in full, AdamW in 8 bits", "14B", 2, FULL),
    "32b-full-4": Case("32B in full, AdamW in 8 bits", "32B", 4, FULL),
    "32b-vllm-2": Case(
        "32B BF16 r16, vLLM with tensor_parallel: 2",
        "32B",
        2,
        {
            "weights": "bf16",
            "processes": 1,
            "gradient_checkpointing": True,
            "adapter": {"train_norms": True},
            "noise": {"schedule": "exponential"},
            "rollout": {
                "prompts": 4,
                "engine": "vllm",
                "vllm": {"tensor_parallel": 2, "utilization": 0.4, "max_model_len": 2048, "max_sequences": 32},
            },
        },
    ),
}


#: `qerl train` of seeds 0 to 3 of 7B, 4 x 8 completions of up to 512 tokens each: folder, title, GPUs. Seed s is on GPU
#: s % GPUs, beside the others of that GPU.
SEEDS = (("four-seeds-1", "four seeds of 7B NVFP4 r16 side by side", 1), ("four-seeds-2", "the same seeds", 2))


def table(folder: Path = RESULTS) -> str:
    """The table of all cases, by the files that `folder` has of them."""
    rows = [_cells(name, case, folder) for name, case in CASES.items()]
    if all((folder / name).is_dir() for name, *_ in SEEDS):
        rows += _rows_of_seeds(folder)
    return "\n".join("| " + " | ".join(row) + " |" for row in [_HEAD, ["---"] * len(_HEAD), *rows])


def _cells(name: str, case: Case, folder: Path) -> tuple[str, ...]:
    file = folder / name / RUN
    goal = f"{case.compared[2]}" if case.compared and case.compared[2] else ""
    if not file.is_file():
        return case.title, str(case.gpus), _MISSING, "", goal, "", ""
    result = read(RunResult, file)
    if result.status != OK or result.summary is None:
        return case.title, str(case.gpus), result.status, "", goal, "", ""
    timed = list(_timed(folder / name))
    peak = f"{result.summary.peak_memory_bytes / 1e9:.1f}" if result.summary.peak_memory_bytes else ""
    return (
        case.title,
        str(case.gpus),
        f"{_seconds(timed):.2f}",
        _speed_up(case, timed, folder),
        goal,
        _idle(timed),
        peak,
    )


def _timed(folder: Path) -> Iterator[StepMetrics]:
    return (row for row in read_rows(StepMetrics, folder / METRICS) if row.step > WARMUP)


def _seconds(timed: list[StepMetrics]) -> float:
    return float(median(row.step_seconds for row in timed))


def _speed_up(case: Case, timed: list[StepMetrics], folder: Path) -> str:
    if case.compared is None or not (folder / case.compared[0] / METRICS).is_file():
        return ""
    alone, work, _ = case.compared
    return f"{work * _seconds(list(_timed(folder / alone))) / _seconds(timed):.2f}"


def _rows_of_seeds(folder: Path) -> Iterator[tuple[str, ...]]:
    """A step of all seeds: on the GPU that takes longest, the common rollout and the update of each of its seeds."""
    steps = []
    for name, title, gpus in SEEDS:
        seeds = [list(_timed(folder / name / f"seed{seed}")) for seed in range(4)]
        rollouts = [median(row.rollout_seconds for row in rows) for rows in seeds]
        updates = [median(row.update_seconds for row in rows) for rows in seeds]
        steps.append(max(rollouts[gpu] + sum(updates[gpu::gpus]) for gpu in range(gpus)))
        results = [read(RunResult, folder / name / f"seed{seed}" / RUN).summary for seed in range(4)]
        peak = max(one.peak_memory_bytes or 0 for one in results if one) / 1e9
        yield (
            title,
            str(gpus),
            f"{steps[-1]:.2f}",
            f"{steps[0] / steps[-1]:.2f}" if gpus > 1 else "",
            "",
            "",
            f"{peak:.1f}",
        )


def _idle(timed: list[StepMetrics]) -> str:
    waits = [(row.idle_seconds, row.idle_seconds_max) for row in timed if row.idle_seconds is not None]
    return f"{median(mean for mean, _ in waits):.2f}, {max(most for _, most in waits):.2f}" if waits else ""


def page() -> str:
    """The page with the table as the stored results have it."""
    between = f"<!-- scaling -->\n{table()}\n<!-- end -->"
    return re.sub(r"<!-- scaling -->.*?<!-- end -->", lambda _: between, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
