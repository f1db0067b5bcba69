"""The metrics of the gates, collected from stored results of one configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.results.paths import METRICS, RESULT, RUN, SAMPLES
from qerl.results.schema.gates import GateMeasurements

#: Columns of metrics.jsonl that two runs of the same code have in common to the bit, on the same machine.
GOLDEN = ("loss", "reward", "grad_norm")


def collect(key: str, files: Sequence[Path]) -> GateMeasurements:
    """The metrics in results, told apart by the names and folders that the workflow gives them."""
    runs = [file for file in files if file.name == RUN]
    evaluations = {file: _read(file) for file in files if file.name == RESULT}
    [bench] = [file for file in files if file.parent.name == "profile"]
    [numerics], [speed] = ([file for file in files if file.name == f"{name}.json"] for name in ("numerics", "speed"))
    of_speed = _read(speed)
    values = _read(numerics)["values"]
    series: dict[str, list[float]] = {}
    for file in runs:
        run, steps = _read(file), _lines(file.with_name(METRICS))
        values |= _of_run(_name(run), run, steps)
        series |= {f"{column}/{_name(run)}": [step[column] for step in steps] for column in GOLDEN}
    stored = {f"stored/{result['stored']}": file for file, result in evaluations.items() if "stored" in result}
    trained = {file: result for file, result in evaluations.items() if "stored" not in result}
    return GateMeasurements(
        key=key,
        values=values | {f"evaluation-noise/{_name(result)}": result["noise_norm"] for result in trained.values()},
        series=series,
        accuracies=_accuracies(trained),
        completions={name: _completions(file) for name, file in stored.items()},
        ratios={**_of_formats(_read(bench)), **_of_commits(of_speed)},
        compared_with=of_speed["baseline"],
        provenance=of_speed["provenance"],
    )


def _name(result: Mapping[str, Any]) -> str:
    """The arm, with what the grid varies: "nvfp4-lora", "nvfp4-lora/seed=1"."""
    varied = [f"{key}={value}" for key, value in result["varied"].items()]
    return "/".join([result["arm"], *(varied if varied != ["seed=0"] else [])])


def _of_run(name: str, run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Peak memory in MB, and the KL between sampler and trainer: the largest without noise, the smallest with it."""
    quiet = [step["mismatch/kl"] for step in steps if not step["noise/sigma"]]
    noisy = [step["mismatch/kl"] for step in steps if step["noise/sigma"]]
    yield f"memory/{name}", run["summary"]["peak_memory_bytes"] / 1e6
    if quiet:
        yield f"mismatch/{name}", max(quiet)
    if noisy:
        yield f"noise/{name}", min(noisy)


def _accuracies(trained: Mapping[Path, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The accuracies of every arm's runs."""
    accuracies: dict[str, dict[str, float]] = {}
    for file, result in trained.items():
        right = [row["correct"] for row in _samples(file)]
        accuracy = sum(right) / len(right)
        varied = ", ".join(f"{key}={value}" for key, value in result["varied"].items())
        accuracies.setdefault(f"accuracy/{result['arm']}", {})[varied] = accuracy
    return accuracies


def _completions(file: Path) -> dict[str, str]:
    return {
        f"{row['dataset']} {row['problem']} {row['repeat']}": f"{_hash(row['completion'])} {int(row['correct'])}"
        for row in _samples(file)
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _samples(file: Path) -> list[dict[str, Any]]:
    """The completions beside a result.json."""
    return _lines(file.with_name(SAMPLES))


def _of_formats(bench: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds a token of each 4-bit format beside those of bf16, measured in turn in one process."""
    points = {(point["weights"], point["rank"]): [1 / rate for rate in point["samples"]] for point in bench["points"]}
    return {
        f"{weights}-to-bf16/rank={rank}": (seconds, points["bf16", rank])
        for (weights, rank), seconds in points.items()
        if weights != "bf16"
    }


def _of_commits(speed: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    return {
        f"{workload}-to-baseline": (seconds["now"], seconds["baseline"])
        for workload, seconds in speed["samples"].items()
    }


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
