"""Seconds of the first two GRPO steps of a process that finds no compiled kernels, and of a second one that finds them.

    python -m tests.gpu.time_first_step OUT.json --size 7B

Completions have mixed lengths, and half of the groups no gradient. The weights are on the GPU before the first step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from qerl.bench import steps
from qerl.host.provenance import stamp, write_json
from qerl.models.policy import choose_device
from qerl.models.random import random_policy, with_random_adapter
from qerl.settings.workloads import EngineStep, StepWork


def main(
    out: Path,
    size: Annotated[str, typer.Option()] = "7B",
    caches: Annotated[Path | None, typer.Option(help="Measure this process, with the caches in this folder.")] = None,
) -> None:
    """Write the seconds of both processes' steps; with `caches` those of this one to `out`."""
    if caches is None:
        with TemporaryDirectory() as folder:
            again = [sys.executable, "-m", "tests.gpu.time_first_step", "--size", size, "--caches", folder]
            places = {"XDG_CACHE_HOME": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for name in ("cold", "warm"):
                file = str(out.with_stem(f"{out.stem}-{name}"))
                subprocess.run([*again, file], env={**os.environ, **places}, check=True)
        return
    work = StepWork(
        size=size, weights="nvfp4", rank=16, prompts=16, group_size=8, prompt=256, tokens=2048, median=300, sigma=0.8,
        equal_groups=0.5, repeats=1,
    )  # fmt: skip
    asked, rows, step = EngineStep(recompute="auto", micro_batch_tokens=36_864, kv_cache_gib=None), [], steps._step

    def kept(*arguments: Any) -> Any:
        rows.append(found := step(*arguments))
        return found

    base = random_policy(work.base, 0, choose_device())
    torch.cuda.synchronize()
    adapted = with_random_adapter(base, work.rank, train_norms=False)
    with TemporaryDirectory() as folder, adapted as policy, patch.object(steps, "_step", kept):
        steps.steps_with(policy, work, steps.run_settings(work, asked), Path(folder))
    write_json(out, {"size": size, "steps": [row.model_dump() for row in rows], "provenance": stamp()})


if __name__ == "__main__":
    typer.run(main)
