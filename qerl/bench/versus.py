"""Results of GRPO steps beside each other: seconds of a step, how many times the first one's, and memory.

python -m qerl.bench.versus OURS.json TRL.json QLORA.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import typer
from tabulate import tabulate

from qerl.bench.grpo_step_work import PARTS
from qerl.results.intervals import ratio_interval
from qerl.settings.base import ConfigError

_GB = 1e9


def versus(results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each result: medians over its steps; the ratio to the first with the interval of `ratio_interval`.

    A `ConfigError` where the work isn't the first one's.
    """
    first = results[0]
    if failed := [result for result in results if result["status"] != "ok"]:
        raise ConfigError(f"{failed[0]['system']} came to no result ({failed[0]['status']}); leave its file out")
    for result in results[1:]:
        _check_same_work(first, result)
    ratios = ["1", *(_ratio(result, first) for result in results[1:])]
    return [_row(result, ratio) for result, ratio in zip(results, ratios, strict=True)]


def _check_same_work(first: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in first["work"].items():
        if name not in ("weights", "repeats") and other["work"][name] != value:
            told = f"{other['system']} had {name}={other['work'][name]}, {first['system']} {value}"
            raise ConfigError(f"{told}; only the same work compares")


def _seconds(result: dict[str, Any], part: str) -> list[float]:
    return [step[part] for step in result["steps"]]


def _row(result: dict[str, Any], ratio: str) -> dict[str, str]:
    memory = result["memory"]
    return {
        "system": result["system"],
        "sampler": result["sampler"],
        "recompute": str(result["settings"]["recompute"]).lower(),
        "step, s": f"{median(_seconds(result, 'step')):.2f}",
        **{f"{part}, s": f"{median(_seconds(result, part)):.2f}" for part in PARTS},
        "times the first": ratio,
        "peak without KV cache, GB": f"{memory['without_kv_cache_bytes'] / _GB:.1f}",
        "KV cache, GB": f"{memory['kv_cache_bytes'] / _GB:.1f}",
    }


def _ratio(result: dict[str, Any], first: dict[str, Any]) -> str:
    """The ratio of two results' step times, with its interval where steps were repeated."""
    ratio = ratio_interval(_seconds(result, "step"), _seconds(first, "step"))
    ends = "" if math.isnan(ratio.low) else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.mean:.2f}{ends}"


def main(files: list[Path]) -> None:
    """Print the table of FILES, as Markdown; the first is what others are compared with."""
    results = [json.loads(file.read_text()) for file in files]
    print(tabulate(versus(results), headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    typer.run(main)
