"""The metrics that gates judge, collected from the stored results of one configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qerl.results.files import read, read_rows
from qerl.results.paths import METRICS, NUMERICS, PROFILE, RESULT, RUN, SAMPLES, SPEED, STORED
from qerl.results.schema.evaluation import EvaluationResult, SampleRow, StoredPolicyResult
from qerl.results.schema.gates import GateMeasurements, NumericsResult, SpeedResult
from qerl.results.schema.profile import RolloutBenchResult
from qerl.results.schema.training import RunResult, StepMetrics

#: Columns of metrics.jsonl that are equal, bit for bit, in two runs of the same code on the same machine.
GOLDEN = ("loss", "reward", "grad_norm")
Pairs = tuple[list[float], list[float]]


def collect(key: str, files: Sequence[Path]) -> GateMeasurements:
    """The metrics of result files, whose kinds follow from the names and folders that the workflow gives them."""
    [bench] = [read(RolloutBenchResult, file) for file in files if file.parent.name == PROFILE]
    [numerics] = [read(NumericsResult, file) for file in files if file.name == NUMERICS]
    [speed] = [read(SpeedResult, file) for file in files if file.name == SPEED]
    values, series = dict(numerics.values), dict[str, list[float]]()
    for file in files:
        if file.name == RUN:
            run, steps = read(RunResult, file), list(read_rows(StepMetrics, file.with_name(METRICS)))
            values |= _of_run(run, steps)
            series |= {f"{column}/{_name(run)}": [getattr(step, column) for step in steps] for column in GOLDEN}
    evaluations = [file for file in files if file.name == RESULT]
    stored = [file for file in evaluations if file.parent.parent.name == STORED]
    trained = {file: read(EvaluationResult, file) for file in evaluations if file not in stored}
    return GateMeasurements(
        key=key,
        values=values | {f"evaluation-noise/{_name(result)}": result.noise_norm for result in trained.values()},
        series=series,
        accuracies=_accuracies(trained),
        completions={f"{STORED}/{read(StoredPolicyResult, file).stored}": _completions(file) for file in stored},
        ratios={**_of_formats(bench), **_of_commits(speed)},
        compared_with=speed.baseline,
        provenance=speed.provenance,
    )


def _name(result: RunResult | EvaluationResult) -> str:
    """The arm with the varied keys of the grid, such as "nvfp4-lora" or "nvfp4-lora/seed=1"."""
    varied = [f"{key}={value}" for key, value in result.varied.items()]
    return "/".join([str(result.arm), *(varied if varied != ["seed=0"] else [])])


def _of_run(run: RunResult, steps: Sequence[StepMetrics]) -> Iterator[tuple[str, float]]:
    """Peak memory in MB, and the KL between sampler and trainer: the largest without noise, the smallest with it."""
    quiet = [step.mismatch_kl for step in steps if not step.noise_sigma]
    noisy = [step.mismatch_kl for step in steps if step.noise_sigma]
    if run.summary and run.summary.peak_memory_bytes:
        yield f"memory/{_name(run)}", run.summary.peak_memory_bytes / 1e6
    if quiet:
        yield f"mismatch/{_name(run)}", max(quiet)
    if noisy:
        yield f"noise/{_name(run)}", min(noisy)


def _accuracies(trained: Mapping[Path, EvaluationResult]) -> dict[str, dict[str, float]]:
    """The accuracies of every arm's runs."""
    accuracies: dict[str, dict[str, float]] = {}
    for file, result in trained.items():
        right = [row.correct for row in _samples(file)]
        varied = ", ".join(f"{key}={value}" for key, value in result.varied.items())
        accuracies.setdefault(f"accuracy/{result.arm}", {})[varied] = sum(right) / len(right)
    return accuracies


def _completions(file: Path) -> dict[str, str]:
    return {
        f"{row.dataset} {row.problem} {row.repeat}": f"{_hash(row.completion)} {row.correct}" for row in _samples(file)
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _samples(file: Path) -> Iterator[SampleRow]:
    """The completions beside a result.json."""
    return read_rows(SampleRow, file.with_name(SAMPLES))


def _of_formats(bench: RolloutBenchResult) -> dict[str, Pairs]:
    """Seconds per token of each 4-bit format paired with those of bf16, measured alternately in one process."""
    points = {(point.weights, point.rank): [1 / rate for rate in point.samples] for point in bench.points}
    return {
        f"{weights}-to-bf16/rank={rank}": (seconds, points["bf16", rank])
        for (weights, rank), seconds in points.items()
        if weights != "bf16"
    }


def _of_commits(speed: SpeedResult) -> dict[str, Pairs]:
    return {f"{workload}-to-baseline": (pairs.now, pairs.baseline) for workload, pairs in speed.samples.items()}
