"""The speeds by which plans are priced, from committed measurements. `python -m tests.speeds` writes the file."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.checkpoints.shapes import QWEN
from qerl.results.speeds import load
from qerl.workflow.costs import SPEEDS

ROOT = Path(__file__).parents[1]
MACHINES, FOLDERS = ("h100", "h200"), ("shapes", "peers", "families")
#: The miniature's table of the default run, which measures rollouts alone.
CPU = ROOT / "results/reference/cpu/tables/throughput.csv"
KEY = ["machine", "model", "weights", "method", "rank", "engine", "sequences", "tokens", "gradient_checkpointing"]
RATES = ["rollout_tokens_per_second", "update_tokens_per_second"]


def table() -> pd.DataFrame:
    """A row per speed. Of two that differ in nothing, the last file's counts."""
    best = pd.DataFrame([*_decoded(), *_updates(), *_cpu()]).drop_duplicates([*KEY, "phase"], keep="last")
    return best.sort_values(["phase", *KEY])[[*KEY, *RATES, "source"]]


def _decoded() -> Iterator[dict[str, Any]]:
    for machine, file in _files("decode"):
        for row in load([file], "decode").to_dict("records"):
            if row["engine"] in ("native", "vllm") and row["samples"] and row["runs"] == 1:
                speed = {RATES[0]: round(row["tokens_per_second"]), RATES[1]: "", "phase": "rollout"}
                given = {"engine": row["engine"], "sequences": int(row["sequences"]), "gradient_checkpointing": ""}
                yield _identity(row, machine, file) | given | speed


def _updates() -> Iterator[dict[str, Any]]:
    """Our updates in steps without a cap of memory, in which every group teaches: completions' tokens over seconds."""
    for machine, file in _files("step"):
        [row] = load([file], "grpo_step").to_dict("records")
        ours = row["system"].startswith("qerl")
        if ours and row["samples"] and not row["cap"] and not row["equal_groups"] and not row["median"]:
            rate = round(row["sequences"] * row["tokens"] / row["update_seconds"])
            given = {"engine": "native", "sequences": row["sequences"], "gradient_checkpointing": row["recompute"]}
            yield _identity(row, machine, file) | given | {RATES[0]: "", RATES[1]: rate, "phase": "update"}


def _files(bench: str) -> Iterator[tuple[str, Path]]:
    """The files of Qwen2.5's sizes, with their machines."""
    for machine, folder in product(MACHINES, FOLDERS):
        for file in sorted((ROOT / "results/reference" / machine / folder).glob(f"{bench}-*.json")):
            if set(file.name.split("-")) & set(QWEN):
                yield machine, file


def _identity(row: dict[Any, Any], machine: str, file: Path) -> dict[str, Any]:
    method, source = "lora" if row["rank"] else "none", str(file.relative_to(ROOT))
    identity = {"machine": machine, "model": row["model"], "weights": row["weights"], "method": method}
    return identity | {"rank": row["rank"], "tokens": row["prompt"] + row["tokens"], "source": source}


def _cpu() -> Iterator[dict[str, Any]]:
    for row in pd.read_csv(CPU).to_dict("records"):
        kept = {name: row[name] for name in ("model", "weights", "rank", "sequences")}
        given = {"machine": "cpu", "method": "lora", "engine": "native", "gradient_checkpointing": ""}
        rates = {RATES[0]: round(row["tokens_per_second"]), RATES[1]: ""}
        source = str(CPU.relative_to(ROOT))
        yield {**kept, **given, **rates, "source": source, "phase": "rollout", "tokens": row["completion_tokens"]}


if __name__ == "__main__":
    SPEEDS.write_text(table().to_csv(index=False))
