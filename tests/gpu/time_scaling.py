"""Runs on one and several GPUs, on random weights of published shapes: seconds, idle seconds and memory of their steps.

    python -m tests.gpu.time_scaling OUT --cases 7b-1,7b-2

OUT gets run.json and metrics.jsonl of each case of `tests.scaling.CASES`, as training writes them. A case that failed
has its error in run.json. `--scratch` keeps checkpoints for the next call: 65 GB for 32B in bfloat16 and 21 in NVFP4.
A full fine-tuning needs as much again for its trained policy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from safetensors.torch import load_file, save_file

from qerl.bench.workloads import lognormal_lengths
from qerl.checkpoints.files import weight_files
from qerl.checkpoints.shapes import QWEN, config_of
from qerl.data.sources import prepare
from qerl.host.console import configure_logging
from qerl.jobs import TrainJob
from qerl.results.paths import POLICY, ROLLOUTS
from qerl.rl import train
from qerl.rl.train import Trainer
from qerl.rollout.sampler import Completion, Sampler, SamplingParams
from qerl.settings.data import DatasetSettings, Generated
from tests.jobs import train_job
from tests.scaling import CASES, Case
from tests.tiny import random_checkpoint


def write_inputs(case: Case, scratch: Path) -> None:
    """Write checkpoint and problems of a case, unless `scratch` has them."""
    scratch.mkdir(exist_ok=True)
    base, data = _base(case, scratch), scratch / "data"
    if not base.exists():
        _write_base(base, case.size, case.run().weights)
    if not data.exists():
        prepare(DatasetSettings(format="gsm8k", origin=Generated(train=4000, validation=4, test=4)), data)


def _write_base(folder: Path, size: str, weights: str) -> None:
    """Write a random checkpoint whose blocks are equal: to draw and pack those of 32B takes ten minutes."""
    values = config_of(size)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        one, whole = Path(scratch) / "one", Path(scratch) / "whole"
        with patch.dict(QWEN, {"one": {**values, "num_hidden_layers": 1}}):
            random_checkpoint(one, "one", weights)
        tensors = {name: tensor for file in weight_files(one) for name, tensor in load_file(file).items()}
        blocks = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
        files = {"others.safetensors": {name: tensor for name, tensor in tensors.items() if name not in blocks}}
        for number in range(values["num_hidden_layers"]):
            place = f".layers.{number}."
            files[f"{number}.safetensors"] = {name.replace(".layers.0.", place): t for name, t in blocks.items()}
        shutil.copytree(one, whole, ignore=shutil.ignore_patterns("*.safetensors*"))
        for name, held in files.items():
            save_file(held, whole / name, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
        (whole / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((one / "config.json").read_text())
        config |= {"num_hidden_layers": len(files) - 1, "layer_types": config["layer_types"] * (len(files) - 1)}
        (whole / "config.json").write_text(json.dumps(config))
        whole.rename(folder)


def time_case(name: str, case: Case, scratch: Path, out: Path) -> None:
    """Run a case, and write its results to `out`/NAME."""
    configure_logging()
    with TemporaryDirectory(dir=scratch) as work:
        paths = _base(case, scratch), scratch / "data", Path(work), out / name
        with patch.object(train, "_train", train_to_lengths):
            train.train_run(train_job(case.run(), *paths, on_failure="row"))
    for folder in (POLICY, ROLLOUTS):
        shutil.rmtree(out / name / folder, ignore_errors=True)


def _base(case: Case, scratch: Path) -> Path:
    return scratch / f"{case.size}-{case.run().weights}"


_train = train._train


def train_to_lengths(job: TrainJob, *others: Any) -> None:
    """`qerl.rl.train._train` with completions of the case's lengths, or of the greatest.

    A run's processes import it by its name, and find the lengths by the run's.
    """
    make_trainer, case = train.make_trainer, CASES.get(job.id)

    def with_lengths(*of_trainer: Any) -> Trainer:
        trainer = make_trainer(*of_trainer)
        trainer.collector.sampler = _Lengths(trainer.collector.sampler, case and case.lengths)  # type: ignore[assignment]
        return trainer

    with patch.object(train, "make_trainer", with_lengths):
        _train(job, *others)


class _Lengths:
    """A sampler whose completions end at lengths drawn once, by their places in the batch; no token stops them."""

    def __init__(self, sampler: Sampler, lengths: tuple[int, float] | None) -> None:
        self._sampler, self._lengths = sampler, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        if self._lengths is None:
            # vLLM's sampler has no lengths, and needs none here.
            return self._sampler.generate(prompts, replace(params, ignore_eos=True))
        numbers, shape = np.random.default_rng(0), (len(prompts), params.count)
        lengths = lognormal_lengths(numbers, *self._lengths, params.max_tokens, shape)
        return self._sampler.generate(prompts, replace(params, ignore_eos=True, lengths=tuple(map(tuple, lengths))))


def _alone(function: Callable[..., None], *arguments: Any) -> bool:
    """Call a function in a process of its own, whose GPU memory is free afterwards. Returns whether it succeeded."""
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def main(
    out: Path, cases: Annotated[str, typer.Option()] = ",".join(CASES), scratch: Path = Path("/tmp/scaling")
) -> None:
    """Time the cases, separated by commas."""
    failed = []
    for name in cases.split(","):
        case = CASES[name]
        done = _alone(write_inputs, case, scratch) and _alone(time_case, name, case, scratch, out)
        failed += [] if done else [name]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
