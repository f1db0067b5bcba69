"""Runs on one and several GPUs, on random weights of published shapes: seconds, idle seconds and memory of their steps.

    python -m tests.gpu.time_scaling OUT --cases 7b-1,7b-2

OUT gets run.json and metrics.jsonl of each case of `tests.scaling.CASES`, as training writes them. A case that failed
has its error in run.json. `--scratch` has checkpoints: 65 GB for 32B in bfloat16, and as much again for its trained
policy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.data.sources import prepare
from qerl.host.progress import configure_logging
from qerl.random_models.checkpoint import write_checkpoint
from qerl.random_models.tokenizer import TEXTS, generation_config
from qerl.results.paths import POLICY, ROLLOUTS
from qerl.rl.train import train_run
from qerl.settings.data import DatasetSettings, Generated
from tests.jobs import train_job
from tests.scaling import CASES, Case


def write_inputs(case: Case, scratch: Path) -> None:
    """Write checkpoint and problems of a case, unless `scratch` has them."""
    base, data = _base(case, scratch), scratch / "data"
    if not base.exists():
        write_checkpoint(base, case.size, case.run().weights, TEXTS)
    if not data.exists():
        prepare(DatasetSettings(format="gsm8k", origin=Generated(train=4000, validation=4, test=4)), data)
    (base / "generation_config.json").write_text(json.dumps(_stops(case)))


def time_case(name: str, case: Case, scratch: Path, out: Path) -> None:
    """Run a case, and write its results to `out`/NAME."""
    configure_logging()
    with TemporaryDirectory(dir=scratch) as work:
        paths = _base(case, scratch), scratch / "data", Path(work), out / name
        train_run(train_job(case.run(), *paths, on_failure="row"))
    for folder in (POLICY, ROLLOUTS):
        shutil.rmtree(out / name / folder, ignore_errors=True)


def _base(case: Case, scratch: Path) -> Path:
    return scratch / f"{case.size}-{case.run().weights}"


def _stops(case: Case) -> dict[str, Any]:
    """The generation config: one stop token, or as many as end completions at the case's mean length.

    Random weights draw all tokens about equally often, so that lengths are geometric.
    """
    config = generation_config()
    vocabulary = ARCHITECTURES[case.size].vocabulary
    if case.mean_length:
        config["eos_token_id"] = list(range(0, vocabulary, case.mean_length))
    return config


def _alone(function: Callable[..., None], *arguments: Any) -> bool:
    """Call a function in a process of its own, whose GPU memory is free afterwards. Returns whether it succeeded."""
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def main(out: Path, cases: Annotated[str, typer.Option()] = ",".join(CASES), scratch: Path = Path("/tmp")) -> None:
    """Time the cases, separated by commas."""
    failed = []
    with TemporaryDirectory(dir=scratch) as folder:
        for name in cases.split(","):
            case = CASES[name]
            done = _alone(write_inputs, case, Path(folder)) and _alone(time_case, name, case, Path(folder), out)
            failed += [] if done else [name]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
